"""Every drafter family, one file each; importing this package registers them all."""

from drafters.methods import draft_model, eagle, hybrid, medusa, ngram, none, standalone

__all__ = ["draft_model", "eagle", "hybrid", "medusa", "ngram", "none", "standalone"]
