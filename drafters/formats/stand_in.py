"""The row that stands for an unknown token: parallel drafters' files hold it in an embedding.

Ours learns a vector of its own; readers look up the id `mask_token_id` in the file's embedding,
which is otherwise the target's.
"""

import torch
from torch import Tensor

from drafters.errors import UserError
from drafters.formats.eagle3 import EMBEDDING
from drafters.formats.foreign import Foreign
from drafters.target import Target


def stand_in(ids: Tensor | None, vocab_size: int) -> int:
    """Return the id whose row stands for an unknown token: the last that is not drafted."""
    kept = set() if ids is None else set(ids.tolist())
    return next((i for i in reversed(range(vocab_size)) if i not in kept), vocab_size - 1)


def embedding_with(vector: Tensor, place: int, target: Target, dtype: torch.dtype) -> Tensor:
    """Return the target's embedding [V, D] on the CPU with a vector [D] in one row."""
    every = torch.arange(target.shape.vocab_size, device=target.device)
    embedding = target.embed(every).to("cpu", dtype, copy=True)
    embedding[place] = vector.to(dtype)
    return embedding


def read_stand_in(
    foreign: Foreign, place: object, target: Target
) -> tuple[Tensor, tuple[str, ...]]:
    """Return the vector [D] of an unknown token and what else of a stored embedding is lost.

    Args:
        foreign: the folder.
        place: what its config says is mask_token_id.
        target: its embedding is what drafts here.

    Raises:
        UserError: if there is no such row, or the vector is in a pickle.
    """
    size = target.shape.vocab_size
    if type(place) is not int or not 0 <= place < size:
        raise UserError(f"{foreign.folder}: mask_token_id is {place!r}: give 0 to {size - 1}")
    if (foreign.folder / "mask_embedding.pt").exists():
        raise UserError(
            f"{foreign.folder}: mask_embedding.pt is a pickle and holds the vector of an unknown "
            f"token: write it as row {place} of {EMBEDDING} in the safetensors file"
        )
    if not foreign.has(EMBEDDING):
        return target.embed(torch.tensor([place], device=target.device))[0].to("cpu"), ()
    if foreign.shape(EMBEDDING) != (size, target.shape.hidden_size):
        raise UserError(f"{foreign.folder}: {EMBEDDING} is {list(foreign.shape(EMBEDDING))}")
    stored = foreign.load([EMBEDDING])[EMBEDDING]
    others = torch.arange(size) != place
    own = target.embed(torch.arange(size, device=target.device)).to("cpu", torch.bfloat16)
    same = torch.equal(stored[others].to(torch.bfloat16), own[others])
    said = f"{EMBEDDING}, which is not the target's own (the target's is used)"
    return stored[place].clone(), () if same else (said,)
