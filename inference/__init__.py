"""Decode with a drafter and measure what it is worth."""

from inference.generate import Generation, Output, Sampling, generate, stream

__all__ = ["Generation", "Output", "Sampling", "generate", "stream"]
