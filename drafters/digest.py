"""Digest: a short name for a text that tells it from others."""

import hashlib


def digest(text: str) -> str:
    """Return 16 hexadecimal digits of the text's SHA-256."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]
