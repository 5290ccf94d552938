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

from drafters.cache_root import cache_root
from drafters.digest import digest

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
        self._linear: dict[torch.dtype, Any] = {
            kind: library[f"linear_{_NAMES[kind]}_{_NAMES[dtype]}"]
            for kind in {dtype, torch.bfloat16}
        }
        for linear in self._linear.values():
            linear.argtypes = [*[pointer] * 5, *[number] * 3, ctypes.c_int]
        self._attend: Any = library[f"attend_{_NAMES[dtype]}"]
        self._attend.argtypes = [
            *[pointer, number, *[pointer] * 5],
            *[number, number, pointer],
            *[number] * 5,
            ctypes.c_float,
        ]
        self._norm: Any = library[f"rms_norm_{_NAMES[dtype]}"]
        self._norm.argtypes = [*[pointer] * 3, *[number] * 2, ctypes.c_float]
        self._rotate: Any = library[f"rotate_{_NAMES[dtype]}"]
        self._rotate.argtypes = [pointer, number, pointer, pointer, *[number] * 4]
        for function in (*self._linear.values(), self._attend, self._norm, self._rotate):
            function.restype = None
        multiplies = dtype == torch.bfloat16 and "AVX512" in torch.backends.cpu.get_cpu_capability()
        self.most_tokens = _MOST_IN_HALF if multiplies else sys.maxsize

    def linear(
        self,
        x: Tensor,
        weight: Tensor,
        out: int,
        bias: Tensor | None,
        then: str,
        other: Tensor | None,
    ) -> Tensor:
        """Return x W^T + b, then silu of it, or with `other` [n, out] added or multiplied.

        A token's outputs are the same whatever the other tokens are.

        Args:
            x: [..., in], contiguous: n tokens.
            weight: `panels` of [out, in], of the states' dtype or bfloat16.
            out: rows of that weight.
            bias: [out] or None.
            then: "none", "silu", "add" or "multiply".
            other: [n, out], contiguous; for the last two.

        Returns:
            [n, out].
        """
        wide = x.shape[-1]
        tokens = x.numel() // wide
        y = x.new_empty(tokens, out)
        self._linear[weight.dtype](
            weight.data_ptr(),
            None if bias is None else bias.data_ptr(),
            x.data_ptr(),
            None if other is None else other.data_ptr(),
            y.data_ptr(),
            tokens,
            wide,
            out,
            _THEN[then],
        )
        return y

    def attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        runs: tuple[Tensor, Tensor],
        mask: Tensor | None,
        scale: float,
    ) -> Tensor:
        """Let the tokens of a row attend to one run of cells; nothing else is read.

        Args:
            query: [R * n, H, hd]; a token's heads contiguous.
            keys: [cells, Hkv, hd], contiguous, Hkv a divisor of H.
            values: as keys.
            runs: first cell and number of cells of each row, both [R] int64.
            mask: [R, 1, n or more, cells], the first n added to the scores of every head; a token's
                contiguous. None: all is visible.
            scale: of the scores.

        Returns:
            [R * n, H * hd].
        """
        tokens, heads, width = query.shape
        y = query.new_empty(tokens, heads * width)
        first, count = runs
        rows = first.numel()
        self._attend(
            query.data_ptr(),
            query.stride(0),
            keys.data_ptr(),
            values.data_ptr(),
            first.data_ptr(),
            count.data_ptr(),
            *((None, 0, 0) if mask is None else (mask.data_ptr(), mask.stride(0), mask.stride(2))),
            y.data_ptr(),
            rows,
            tokens // rows,
            keys.shape[1],
            heads // keys.shape[1],
            width,
            scale,
        )
        return y

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Norm the last dimension of contiguous [..., D]."""
        y = torch.empty_like(x)
        width = x.shape[-1]
        rows = x.numel() // width
        self._norm(weight.data_ptr(), x.data_ptr(), y.data_ptr(), rows, width, epsilon)
        return y

    def rotate_(self, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Apply rotary phases in place.

        Args:
            x: [n, H, hd]; a token's heads contiguous.
            cos: [n, 1, hd]; a token's phases contiguous.
            sin: as cos, its first half negated.
        """
        tokens, heads, width = x.shape
        assert cos.stride(0) == sin.stride(0)
        phases = cos.data_ptr(), sin.data_ptr(), cos.stride(0)
        self._rotate(x.data_ptr(), x.stride(0), *phases, tokens, heads, width)


def panels(weight: Tensor) -> Tensor:
    """Return [out, in] in the order it is read: 16 rows side by side, zeros where some are missing.

    Returns:
        [ceil(out / 16), in, 16, 1], in bfloat16 [ceil(out / 16), ceil(in / 2), 16, 2].
    """
    (out, wide), together = weight.shape, 2 if weight.dtype == torch.bfloat16 else 1
    count, deep = -(-out // _PANEL), -(-wide // together)
    laid = weight.new_zeros(count, deep, _PANEL, together)
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
