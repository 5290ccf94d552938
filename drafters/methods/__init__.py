"""Every drafter family, one file each; importing this package registers them all."""

from drafters.methods import (
    draft_model,
    eagle,
    eagle1,
    hydra,
    medusa,
    ngram,
    none,
    peagle,
    standalone,
)

__all__ = [
    "draft_model",
    "eagle",
    "eagle1",
    "hydra",
    "medusa",
    "ngram",
    "none",
    "peagle",
    "standalone",
]
