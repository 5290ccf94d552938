"""Every drafter family, one file each; importing this package registers them all."""

from drafters.methods import (
    dflash,
    dflash2,
    draft_model,
    dspark,
    eagle,
    eagle1,
    hybrid,
    hydra,
    medusa,
    mtp,
    ngram,
    none,
    standalone,
)

__all__ = [
    "dflash",
    "dflash2",
    "draft_model",
    "dspark",
    "eagle",
    "eagle1",
    "hybrid",
    "hydra",
    "medusa",
    "mtp",
    "ngram",
    "none",
    "standalone",
]
