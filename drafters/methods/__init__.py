"""Every drafter family, one file each; importing this package registers them all."""

from drafters.methods import dflash, draft_model, dspark, eagle, medusa, ngram, none, standalone

__all__ = ["dflash", "draft_model", "dspark", "eagle", "medusa", "ngram", "none", "standalone"]
