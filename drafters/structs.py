"""What native.c calls a map, a norm, a layer and reads: addresses and sizes of tensors."""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_POINTER, _NUMBER = ctypes.c_void_p, ctypes.c_long


class Struct(ctypes.Structure):
    """A struct of native.c, as functions take it.

    Args:
        values: of its fields, in their order.
        kept: tensors whose addresses are among them, which must live as long.
    """

    def __init__(self, *values: Any, kept: tuple[Tensor | None, ...] = ()) -> None:
        """Fill the fields."""
        super().__init__(*values)
        self.kept = kept
        self.address = ctypes.addressof(self)


class Map(Struct):
    """A frozen linear map: the address of its panels, of its bias or None, and sizes."""

    _fields_ = (
        ("weight", _POINTER),
        ("bias", _POINTER),
        ("inputs", _NUMBER),
        ("out", _NUMBER),
        ("half", ctypes.c_int),
    )


class Norm(Struct):
    """An RMSNorm; without a weight: none."""

    _fields_ = (("weight", _POINTER), ("epsilon", ctypes.c_float))


class Reads(Struct):
    """What a batch of new tokens reads of a cache."""

    _fields_ = (
        ("rows", _NUMBER),
        ("width", _NUMBER),
        ("tokens", _POINTER),
        ("first", _POINTER),
        ("count", _POINTER),
        ("mask", _POINTER),
        ("mask_row", _NUMBER),
        ("mask_place", _NUMBER),
    )


class Layer(Struct):
    """A decoder layer; its norms and maps are copied in."""

    _fields_ = (
        ("heads", _NUMBER),
        ("key_heads", _NUMBER),
        ("dim", _NUMBER),
        ("scale", ctypes.c_float),
        ("normed_residual", ctypes.c_int),
        *((name, Norm) for name in ("input_norm", "embedding_norm", "mlp_norm")),
        *((name, Norm) for name in ("query_norm", "key_norm")),
        *((name, Map) for name in ("qkv", "out", "gate", "up", "down")),
    )


def linear_map(panels: Tensor, bias: Tensor | None, inputs: int, out: int) -> Map:
    """Return the map of a weight [out, inputs] that is laid out as `native.panels`."""
    half = panels.dtype == torch.bfloat16
    return Map(panels.data_ptr(), _address(bias), inputs, out, half, kept=(panels, bias))


def norm(weight: Tensor | None, epsilon: float = 0.0) -> Norm:
    """Return the norm with a contiguous weight [D]."""
    return Norm(_address(weight), epsilon, kept=(weight,))


def layer(
    heads: tuple[int, int, int],
    norms: Sequence[Norm],
    maps: Sequence[Map | None],
    *,
    normed_residual: bool,
) -> Layer:
    """Return a layer.

    Args:
        heads: query heads, key heads, and the width of one.
        norms: input, embedding, MLP, query, key.
        maps: queries, keys and values in one; out, gate, up, down.
        normed_residual: whether the residual is the normed state.
    """
    return Layer(*heads, heads[-1] ** -0.5, normed_residual, *norms, *maps)


def reads(
    width: int, runs: tuple[Tensor, Tensor], mask: Tensor | None, tokens: Tensor | None
) -> Reads:
    """Return what the tokens of every row read: one run of cells, less what a mask hides.

    Args:
        width: places of a row.
        runs: first cell and number of cells of each row, both [R] int64.
        mask: [R, 1, width or more, cells], the first `width` added to the scores of every head; a
            token's contiguous. None: all is visible.
        tokens: [R * width] int64, which token is at each place, -1 where none; None: its number.
    """
    first, count = runs
    return Reads(
        first.numel(),
        width,
        _address(tokens),
        first.data_ptr(),
        count.data_ptr(),
        *((None, 0, 0) if mask is None else (mask.data_ptr(), mask.stride(0), mask.stride(2))),
        kept=(tokens, first, count, mask),
    )


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
