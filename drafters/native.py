"""Kernels of native.c: compiled at first use, kept, and left out where that cannot be done.

Nothing here is needed for a right answer: without a C compiler, on another device or in another
dtype `kernels` is None and torch's own operators serve. DRAFTERS_NATIVE=0 switches them off.
"""

import ctypes
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from drafters.arena import ARENA
from drafters.cache_root import cache_root
from drafters.digest import digest
from drafters.structs import Layer, Map, Norm, Reads

_PANEL = 16  # rows of a weight that are read together, as in native.c
_MOST_IN_HALF = 64  # tokens, beyond which processors that multiply bfloat16 itself are faster

_SOURCE = Path(__file__).with_suffix(".c")
_FLAGS = ("-O3", "-march=native", "-fopenmp", "-shared", "-fPIC")
_NAMES = {torch.float32: "float", torch.bfloat16: "bf16"}
_THEN = {"none": 0, "silu": 1, "add": 2, "multiply": 3}


class Kernels:
    """The compiled functions for states of one dtype.

    Args:
        library: of native.c.
        dtype: of the states.
    """

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        """Look the functions up."""
        pointer, number = ctypes.c_void_p, ctypes.c_long
        self.dtype = dtype

        def named(name: str, *arguments: Any) -> Any:
            function = library[f"{name}_{_NAMES[dtype]}"]
            function.argtypes, function.restype = arguments, None
            return function

        self._linear = named("linear", *[pointer] * 4, number, ctypes.c_int)
        self._norm = named("rms_norm", *[pointer] * 3, number, number)
        self._rotate = named("rotate", pointer, number, pointer, pointer, *[number] * 4)
        self._attend = named(
            "attend", pointer, pointer, number, *[pointer] * 3, *[number] * 3, ctypes.c_float
        )
        self._layer = named("layer", *[pointer] * 6, number, *[pointer] * 4, number)
        multiplies = dtype == torch.bfloat16 and "AVX512" in torch.backends.cpu.get_cpu_capability()
        self.most_tokens = _MOST_IN_HALF if multiplies else sys.maxsize

    def linear(self, x: Tensor, by: Map, then: str, other: Tensor | None) -> Tensor:
        """Return x W^T + b, then silu of it, or with `other` [n, out] added or multiplied.

        A token's outputs are the same whatever the other tokens are.

        Args:
            x: [..., in], contiguous: n tokens.
            by: the map; its weight is of the states' dtype or bfloat16.
            then: "none", "silu", "add" or "multiply".
            other: [n, out], contiguous; for the last two.

        Returns:
            [n, out].
        """
        tokens = x.numel() // by.inputs
        y = x.new_empty(tokens, by.out)
        others = None if other is None else other.data_ptr()
        self._linear(by.address, x.data_ptr(), others, y.data_ptr(), tokens, _THEN[then])
        return y

    def attend(
        self, query: Tensor, cache: tuple[Tensor, Tensor], reads: Reads, scale: float
    ) -> Tensor:
        """Let tokens attend to what they read; nothing else is touched.

        Args:
            query: [M, H, hd]; a token's heads contiguous.
            cache: keys and values [cells, Hkv, hd], contiguous, Hkv a divisor of H.
            reads: of these tokens.
            scale: of the scores.

        Returns:
            [M, H * hd].
        """
        tokens, heads, width = query.shape
        y = query.new_empty(tokens, heads * width)
        key_heads = cache[0].shape[1]
        self._attend(
            reads.address,
            query.data_ptr(),
            query.stride(0),
            *(part.data_ptr() for part in cache),
            y.data_ptr(),
            key_heads,
            heads // key_heads,
            width,
            scale,
        )
        return y

    def layer(
        self,
        by: Layer,
        x: Tensor,
        rotary: tuple[Tensor, Tensor],
        reads: Reads,
        cells: Tensor,
        cache: tuple[Tensor, Tensor],
        embedding: Tensor | None,
    ) -> Tensor:
        """Run a decoder layer: the states that its parts give one by one.

        Args:
            by: the layer.
            x: [M, D], contiguous.
            rotary: as for `rotate_`.
            reads: of these tokens.
            cells: [M] int64 cells that their keys and values go to.
            cache: keys and values [cells, Hkv, hd], contiguous.
            embedding: [M, D], contiguous; with an embedding_norm only.

        Returns:
            [M, D].
        """
        y = torch.empty_like(x)
        self._layer(
            by.address,
            reads.address,
            x.data_ptr(),
            None if embedding is None else embedding.data_ptr(),
            *_phases(rotary),
            cells.data_ptr(),
            *(part.data_ptr() for part in cache),
            y.data_ptr(),
            len(x),
        )
        return y

    def rms_norm(self, x: Tensor, by: Norm) -> Tensor:
        """Norm the last dimension of contiguous [..., D]."""
        y = torch.empty_like(x)
        width = x.shape[-1]
        self._norm(by.address, x.data_ptr(), y.data_ptr(), x.numel() // width, width)
        return y

    def rotate_(self, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Apply rotary phases in place.

        Args:
            x: [n, H, hd]; a token's heads contiguous.
            cos: [n, 1, hd]; a token's phases contiguous.
            sin: as cos, its first half negated.
        """
        tokens, heads, width = x.shape
        self._rotate(x.data_ptr(), x.stride(0), *_phases((cos, sin)), tokens, heads, width)


def _phases(rotary: tuple[Tensor, Tensor]) -> tuple[int, int, int]:
    cos, sin = rotary
    assert cos.stride(0) == sin.stride(0)
    return cos.data_ptr(), sin.data_ptr(), cos.stride(0)


def panels(weight: Tensor) -> Tensor:
    """Return [out, in] in the order it is read: 16 rows side by side, zeros where some are missing.

    Returns:
        [ceil(out / 16), in, 16, 1], in bfloat16 [ceil(out / 16), ceil(in / 2), 16, 2].
    """
    (out, wide), together = weight.shape, 2 if weight.dtype == torch.bfloat16 else 1
    count, deep = -(-out // _PANEL), -(-wide // together)
    laid = ARENA.zeros(count, deep, _PANEL, together, dtype=weight.dtype)
    for first in range(0, out, 4096):  # a copy of some rows at a time
        some = F.pad(
            part := weight[first : first + 4096],
            (0, deep * together - wide, 0, -len(part) % _PANEL),
        )
        whole = some.view(-1, _PANEL, deep, together).transpose(1, 2)
        laid[first // _PANEL :][: len(whole)] = whole
    return laid


@cache
def kernels(dtype: torch.dtype, device: str) -> Kernels | None:
    """Return the kernels for a dtype, or None where torch's own operators must serve."""
    if device != "cpu" or dtype not in _NAMES or os.environ.get("DRAFTERS_NATIVE") == "0":
        return None
    library = _library()
    return None if library is None else Kernels(library, dtype)


def version(dtype: torch.dtype, device: str) -> str:
    """Return what tells these kernels from others; "" where torch's own operators serve."""
    return "" if kernels(dtype, device) is None else digest(_SOURCE.read_text())


@cache
def _library() -> ctypes.CDLL | None:
    compiler = next(filter(None, map(shutil.which, _compilers())), None)
    if compiler is None:
        return None
    built = _built(compiler)
    try:
        if not built.exists():
            _compile(compiler, built)
        return ctypes.CDLL(str(built))
    except (OSError, subprocess.SubprocessError):
        return None


def _compilers() -> Sequence[str]:
    return [name for name in (os.environ.get("CC"), "cc", "gcc", "clang") if name]


def _built(compiler: str) -> Path:
    """Return where the library for this source, compiler and processor lies."""
    parts = _SOURCE.read_text(), *_FLAGS, compiler, platform.machine(), _processor()
    what = "\n".join(parts)
    return cache_root() / "native" / f"{digest(what)}.so"


def _processor() -> str:
    """Return what tells one processor's instructions from another's."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _compile(compiler: str, built: Path) -> None:
    """Compile under a temporary name, then rename: another process never loads half a library."""
    built.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=built.parent) as folder:
        fresh = Path(folder) / "native.so"
        command = [compiler, *_FLAGS, str(_SOURCE), "-o", str(fresh), "-lm"]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
        fresh.replace(built)
