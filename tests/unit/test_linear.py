"""Linear maps and norms: every kernel gives what torch's own operators give."""

import ctypes
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from drafters import native
from drafters.layers import rotate
from drafters.linear import FrozenLinear
from drafters.packed import PackedNorm
from drafters.structs import linear_map

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
THEN = {
    "none": lambda y, other: y,
    "silu": lambda y, other: F.silu(y),
    "add": torch.add,
    "multiply": torch.mul,
}


def run(linear: FrozenLinear, then: str, x: Tensor, other: Tensor) -> Tensor:
    if then in ("add", "multiply"):
        return getattr(linear, then)(x, other)
    return linear(x) if then == "none" else linear.silu(x)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("rows", "columns"), [(24, 32), (37, 19), (5, 8), (1, 3)])
def test_every_kernel_gives_the_same(dtype: torch.dtype, rows: int, columns: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight, bias = (
        torch.randn(*shape, generator=generator).to(dtype) for shape in ((rows, columns), (rows,))
    )
    linears = [FrozenLinear([weight], [bias], pack=pack) for pack in (True, False)]
    for tokens in [1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 33, 600]:
        x, other = (torch.randn(tokens, n, generator=generator).to(dtype) for n in (columns, rows))
        exact = F.linear(x.double(), weight.double(), bias.double())
        for then, follow in THEN.items():
            expected = follow(exact, other.double())
            for linear in linears:
                found = run(linear, then, x, other)
                assert found.dtype == dtype
                error = (found.double() - expected).abs().max() / expected.abs().max().clamp_min(1)
                assert error < TOLERANCE[dtype], (tokens, then, linear.map is not None)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(1, 16), (3, 19), (2, 3, 64)])
def test_the_norm_is_torchs(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape).to(dtype)
    norm = PackedNorm(torch.rand(shape[-1]).to(dtype), 1e-5)
    exact = F.rms_norm(x.double(), shape[-1:], norm.weight.double(), 1e-5)
    assert (norm(x).double() - exact).abs().max() < TOLERANCE[dtype]


def test_bfloat16_rounds_to_nearest_even() -> None:
    kernels = native.kernels(torch.bfloat16, "cpu")
    if kernels is None:
        pytest.skip("no C compiler here")
    x = torch.tensor([[1.0], [-3.0], [torch.inf], [torch.nan]]).bfloat16()
    bias = torch.tensor([2.0**-9]).bfloat16()  # half a step at 1: to the even neighbour, which is 1
    one = linear_map(native.panels(torch.ones(1, 1).bfloat16()), bias, 1, 1)
    y = kernels.linear(x, one, "none", None)
    expected = (x.float() + 2.0**-9).bfloat16()
    assert torch.equal(y.view(torch.int16)[:3], expected.view(torch.int16)[:3])
    assert y[3].isnan()


def test_without_a_compiler_torch_serves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DRAFTERS_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert native._library.__wrapped__() is None
    failing = tmp_path / "cc"
    failing.write_text("#!/bin/sh\nexit 1\n")
    failing.chmod(0o755)
    assert native._library.__wrapped__() is None
    assert not list(tmp_path.rglob("*.so"))


@pytest.mark.slow
def test_a_compiled_library_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if native._library() is None:
        pytest.skip("no C compiler here")
    monkeypatch.setenv("DRAFTERS_CACHE", str(tmp_path))
    assert isinstance(native._library.__wrapped__(), ctypes.CDLL)
    first = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.so")}
    assert len(first) == 1
    assert isinstance(native._library.__wrapped__(), ctypes.CDLL)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.so")} == first


def test_the_kernels_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTERS_NATIVE", "0")
    assert native.kernels.__wrapped__(torch.float32, "cpu") is None
    assert native.kernels.__wrapped__(torch.float32, "cuda") is None
    assert native.kernels.__wrapped__(torch.float64, "cpu") is None


def test_rotation_is_the_layers() -> None:
    kernels = _kernels(torch.float32)
    x = torch.randn(3, 5, 8)
    cos, sin = torch.randn(3, 2, 1, 8).unbind(1)  # as one table of both is read
    expected = rotate(x[:, :4], cos, sin)
    kernels.rotate_(x[:, :4], cos, sin)
    torch.testing.assert_close(x[:, :4], expected)


def _kernels(dtype: torch.dtype) -> native.Kernels:
    kernels = native.kernels(dtype, "cpu")
    if kernels is None:
        pytest.skip("no C compiler here")
    return kernels


def test_weights_that_are_bfloat16_numbers_are_read_as_such() -> None:
    _kernels(torch.float32)
    weight = torch.randn(40, 24).bfloat16().float()
    x = torch.randn(3, 24)
    halved, whole = FrozenLinear([weight]), FrozenLinear([weight + 2.0**-20])
    assert halved.map is not None
    assert whole.map is not None
    assert (halved.map.half, whole.map.half) == (1, 0)
    torch.testing.assert_close(halved(x), F.linear(x, weight))
    many = torch.randn(20, 24)
    torch.testing.assert_close(halved(many), F.linear(many, weight))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_token_is_mapped_alike_beside_any_others(dtype: torch.dtype) -> None:
    linear = FrozenLinear([torch.randn(37, 100).to(dtype)])
    if linear.kernels is None:
        pytest.skip("no C compiler here")
    x = torch.randn(30, 100).to(dtype)
    alone = torch.cat([linear.silu(token) for token in x.split(1)])
    for tokens in range(2, 31):
        assert torch.equal(linear.silu(x[:tokens]), alone[:tokens]), tokens


def test_panels_hold_rows_side_by_side() -> None:
    weight = torch.arange(18.0 * 3).view(18, 3)
    laid = native.panels(weight)
    assert laid.shape == (2, 3, 16, 1)
    assert torch.equal(laid[0, ..., 0], weight[:16].T)
    assert torch.equal(laid[1, :, :2, 0], weight[16:].T)
    assert not laid[1, :, 2:].any()


def test_panels_of_halves_hold_two_columns_in_a_word() -> None:
    weight = torch.arange(18.0 * 3).view(18, 3).bfloat16()
    laid = native.panels(weight)
    assert laid.shape == (2, 2, 16, 2)
    assert torch.equal(laid[0, 0], weight[:16, :2])
    assert torch.equal(laid[0, 1, :, 0], weight[:16, 2])
    assert torch.equal(laid[1, 0, :2], weight[16:, :2])
    assert not laid[:, 1, :, 1].any()
    assert not laid[1, :, 2:].any()


@pytest.mark.parametrize("width", [4, 16])
def test_another_width_is_not_read(width: int) -> None:
    """Kernels take addresses: a map of 8 inputs would read beyond the last token's."""
    linear = FrozenLinear([torch.ones(3, 8)], pack=True)
    with pytest.raises((AssertionError, RuntimeError)):
        linear(torch.ones(2, width))
