"""Loading: causal LMs, their configs and tokenizers, from a folder or the hub.

Safetensors only. Whatever is wrong is one line that names the model's role and place.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from drafters.errors import UserError
from drafters.selftest import check_kind

_GIVE = (
    "give a folder in Hugging Face format (config.json, safetensors, tokenizer) or the id of one "
    "on the hub"
)


def load_config(path: str | Path, role: str, *, trust_remote_code: bool = False) -> Any:
    """Return a text config.

    Raises:
        UserError: if there is none.
    """
    with _said(role, path):
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        return config.get_text_config()


def load_tokenizer(path: str | Path, role: str, *, trust_remote_code: bool = False) -> Any:
    """Return a tokenizer.

    Raises:
        UserError: if there is none.
    """
    with _said(role, path):
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)


def load_model(
    path: str | Path, role: str, dtype: torch.dtype, *, trust_remote_code: bool = False
) -> Any:
    """Return a causal LM with its head, in eval mode.

    Args:
        path: a folder in Hugging Face format or a hub id.
        role: what an error calls it, such as "target".
        dtype: of its weights.
        trust_remote_code: whether the folder's own Python may run.

    Raises:
        UserError: if it is not there, or of a kind that cannot be served; before any weight is
            read.
    """
    check_kind(load_config(path, role, trust_remote_code=trust_remote_code))
    loader: Any = AutoModelForCausalLM
    with _said(role, path):
        model = loader.from_pretrained(
            path, dtype=dtype, use_safetensors=True, trust_remote_code=trust_remote_code
        )
    return model.eval()


@contextmanager
def _said(role: str, path: str | Path) -> Iterator[None]:
    place = Path(path)
    named_place = place.is_absolute() or str(path).startswith(".") or len(place.parts) > 2
    if not str(path) or (not place.is_dir() and (place.exists() or named_place)):
        raise UserError(f"{role} {str(path)!r}: no such folder; {_GIVE}")
    try:
        yield
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"{role} {path}: {reason}; {_GIVE}") from error
