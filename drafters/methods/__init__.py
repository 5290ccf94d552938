"""Every drafter family, one file each; importing this package registers them all."""

from drafters.methods import (
    draft_model,
    eagle,
    hybrid,
    lookahead,
    medusa,
    ngram,
    none,
    self_window,
    standalone,
    suffix,
)

__all__ = [
    "draft_model",
    "eagle",
    "hybrid",
    "lookahead",
    "medusa",
    "ngram",
    "none",
    "self_window",
    "standalone",
    "suffix",
]
