"""d2t and t2d: how EAGLE-3-like dialects write the draft vocabulary.

d2t holds OFFSETS: the target's id of draft id i is i + d2t[i]. t2d is a mask over the target's ids,
not a map. A table of absolute ids under the name d2t loads everywhere and proposes wrong tokens.
"""

import torch
from torch import Tensor

from drafters.errors import UserError
from drafters.formats.foreign import Foreign

D2T, T2D = "d2t", "t2d"


def id_tables(ids: Tensor | None, vocab_size: int) -> dict[str, Tensor]:
    """Return d2t int64 [K] and t2d bool [V] of the kept ids [K]; None: all are kept.

    >>> id_tables(torch.tensor([2, 3, 7]), 9)["d2t"].tolist()
    [2, 2, 5]
    """
    kept = torch.arange(vocab_size) if ids is None else ids
    mask = torch.zeros(vocab_size, dtype=torch.bool)
    mask[kept] = True
    return {D2T: kept - torch.arange(len(kept)), T2D: mask}


def read_ids(foreign: Foreign, size: int, vocab_size: int) -> Tensor | None:
    """Return the kept ids [K] int64, ascending; None if all are kept.

    Args:
        foreign: its tensors d2t and t2d are read where it has them.
        size: K, rows of its head.
        vocab_size: of the target.

    Raises:
        UserError: if d2t is missing though K < V, is a table of absolute ids, leaves the target's
            ids, or is not what t2d says.
    """
    place = foreign.folder
    if not 1 <= size <= vocab_size:
        raise UserError(f"{place}: its head has {size} rows, the target {vocab_size} ids")
    if not foreign.has(D2T):
        if size == vocab_size:
            return None
        raise UserError(
            f"{place}: its head has {size} of the target's {vocab_size} ids and d2t is missing, "
            "so nothing says which ids they are"
        )
    for name, length in ((D2T, size), (T2D, vocab_size)):
        if foreign.has(name) and foreign.shape(name) != (length,):
            raise UserError(f"{place}: {name} is {list(foreign.shape(name))}, not [{length}]")
    tables = foreign.load([name for name in (D2T, T2D) if foreign.has(name)])
    offsets, mask = tables[D2T], tables.get(T2D)
    if offsets.is_floating_point() or offsets.dtype == torch.bool:
        raise UserError(f"{place}: d2t is {offsets.dtype}, not whole numbers")
    offsets = offsets.to(torch.int64)
    ids = torch.arange(size) + offsets
    kept = None if mask is None else mask.bool().nonzero()[:, 0]
    if _absolute(offsets, kept):
        raise UserError(
            f"{place}: d2t holds absolute ids, not offsets: subtract arange({size}) from it"
        )
    ascending = bool((ids[1:] > ids[:-1]).all())
    if not ascending or int(ids[0]) < 0 or int(ids[-1]) >= vocab_size:
        raise UserError(
            f"{place}: i + d2t[i] must be ascending, unique and within 0 to {vocab_size - 1}; it "
            f"runs from {int(ids.min())} to {int(ids.max())}"
        )
    if kept is not None and not torch.equal(kept, ids):
        raise UserError(f"{place}: d2t and t2d do not keep the same ids")
    return None if size == vocab_size else ids


def _absolute(offsets: Tensor, kept: Tensor | None) -> bool:
    """Return whether a table is one of absolute ids, as far as can be told.

    Without a mask: absolute ids all differ, while offsets all differ only where no two kept ids
    are neighbours.
    """
    if len(offsets) < 2:
        return False
    if kept is not None:
        return torch.equal(offsets, kept)
    return bool((offsets[1:] > offsets[:-1]).all())
