"""A target of any size that counts: random weights whose greedy output is known beforehand.

The embedding outweighs what the layers add and the head is the embedding moved on by one token, so
token t is followed by t + 1, with so wide a margin that no rounding changes it. A forward costs
what one of a trained model of these sizes costs: what a GPU does with it can be measured before any
weights are downloaded.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from drafters.errors import UserError
from drafters.target import Target

_EMBEDDING = 100.0  # scale of the embedding: layers add a few units each
_MARGIN = 20.0  # of the right token's logit, or a little less


@dataclass(frozen=True)
class Size:
    """Sizes of a Llama."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    max_position_embeddings: int = 4096


SIZES = {
    "tiny": Size(64, 128, 2, 4, 2, 512, 512),
    "1b": Size(2048, 8192, 16, 32, 8, 128256),
    "8b": Size(4096, 14336, 32, 32, 8, 128256),
}


class Bytes:
    """Stands in for a tokenizer: the ids of a text are its bytes."""

    chat_template = None

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        """Return the ids."""
        return {"input_ids": list(text.encode())}

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        """Return the ids as numbers: most are no bytes."""
        return " ".join(map(str, ids))

    def get_vocab(self) -> dict[str, int]:
        """Return no names of ids."""
        return {}


def counting_target(
    size: str, *, dtype: torch.dtype, device: str, engine: str | None = None
) -> Target:
    """Make a target that counts, its weights drawn where they will lie.

    Args:
        size: one of SIZES.
        dtype: of the weights.
        device: where they lie.
        engine: see Target.

    Raises:
        UserError: if there is no such size.
    """
    if size not in SIZES:
        raise UserError(f"size is {size!r}: give {', '.join(SIZES)}")
    config = LlamaConfig(
        **asdict(SIZES[size]), tie_word_embeddings=False, bos_token_id=None, eos_token_id=None
    )
    loader: Any = AutoModelForCausalLM
    with torch.device(device):
        torch.manual_seed(0)
        model = loader.from_config(config, dtype=dtype)
    with torch.no_grad():
        table = model.get_input_embeddings().weight.normal_()
        head = model.get_output_embeddings().weight
        head.copy_(table.roll(1, 0)).mul_(_MARGIN / config.hidden_size)
        table.mul_(_EMBEDDING)
    return Target(model, Bytes(), name=f"counting-{size}", engine=engine)


def count(vocab_size: int, ids: Sequence[int], length: int) -> list[int]:
    """Return what a counting target adds to these ids.

    >>> count(10, [3, 8], 3)
    [9, 0, 1]
    """
    return [(ids[-1] + step) % vocab_size for step in range(1, length + 1)]
