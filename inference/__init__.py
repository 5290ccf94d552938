"""Decode with a drafter and measure what it is worth."""

from inference.generate import Generation, Output, generate, stream
from inference.sampling import Sampling

__all__ = ["Generation", "Output", "Sampling", "generate", "stream"]
