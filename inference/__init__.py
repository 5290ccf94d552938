"""Decode with a drafter and measure what it is worth."""
