"""Arena: tensors that share memory without sharing a byte."""

import mmap
import weakref
from typing import Any

import pytest
import torch

from drafters import arena
from drafters.arena import Arena


def test_tensors_share_a_piece_and_no_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "_PIECE", 4096)
    own = Arena()
    shapes = [(3, 5), (16, 16), (7,), (1,), (300,), (0, 4), (20, 30), (16, 16)]
    made = [own.zeros(*shape, dtype=torch.float32) for shape in shapes]
    for number, tensor in enumerate(made):
        assert tensor.shape == shapes[number]
        assert not tensor.any()
        assert tensor.data_ptr() % 64 == 0
        tensor.fill_(number)
    for number, tensor in enumerate(made):
        assert bool((tensor == number).all())
    half = own.zeros(6, dtype=torch.bfloat16)
    assert (half.dtype, half.tolist()) == (torch.bfloat16, [0.0] * 6)


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="no huge pages on this system")
def test_a_piece_is_freed_with_its_last_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces: list[weakref.ref[mmap.mmap]] = []
    make = mmap.mmap

    def noted(*given: Any, **more: Any) -> mmap.mmap:
        piece = make(*given, **more)
        pieces.append(weakref.ref(piece))
        return piece

    monkeypatch.setattr(arena, "_PIECE", 4096)
    monkeypatch.setattr(mmap, "mmap", noted)
    own = Arena()
    first, second = (own.zeros(200, dtype=torch.float32) for _ in range(2))
    large = own.zeros(500, dtype=torch.float32)
    del own, first, large
    assert [piece() is None for piece in pieces] == [False, True]
    second.fill_(1)
    del second
    assert [piece() is None for piece in pieces] == [True, True]


def test_a_system_without_huge_pages_has_zeros_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    assert Arena().zeros(2, 3, dtype=torch.bfloat16).tolist() == [[0.0] * 3] * 2
