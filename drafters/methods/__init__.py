"""Every drafter family, one file each; importing this package registers them all."""

from drafters.methods import ngram, none

__all__ = ["ngram", "none"]
