"""Every tensor of a forward is where it must be: checked without a GPU, on tensors without data."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from drafters.cache import KVCache
from drafters.lean import LeanModel
from drafters.placement import Placement
from drafters.reference import ReferenceModel
from drafters.static import StaticModel

DEVICE = "meta"
SIZES = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "sliding_window": 6,
}


def placement_of(rows: int, width: int, span: int, grid: torch.Tensor | None) -> Placement:
    count = rows * width if grid is None else len(grid)
    place = torch.arange(count, device=DEVICE)
    return Placement(
        rows=slice(0, rows),
        cells=place,
        positions=place,
        grid=grid,
        width=width,
        span=span,
        hidden=torch.zeros(rows, width, span, dtype=torch.bool, device=DEVICE),
        query_position=torch.zeros(rows, width, dtype=torch.int64, device=DEVICE),
        counts=[width] * rows,
        guessed=(place[: rows * 2].view(rows, 2), place[: rows * 2].view(rows, 2)),
    )


@pytest.mark.parametrize("kind", [LeanModel, StaticModel, ReferenceModel])
def test_a_forward_mixes_no_devices(kind: Any) -> None:
    config = AutoConfig.for_model("mistral", **SIZES)
    with torch.device(DEVICE):
        base = AutoModelForCausalLM.from_config(config).eval().base_model
    with torch.inference_mode():
        served = kind(base, [6, 6]) if kind is ReferenceModel else kind(base)
        cache = KVCache(2, 20, layers=2, heads=2, head_dim=8, device=DEVICE)
        for grid in (None, torch.arange(5, device=DEVICE)):
            placed = placement_of(2, 3, 12, grid)
            tokens = torch.zeros_like(placed.positions)
            last, taps = served.placed(tokens, placed, cache, (0,))
            assert (last.device.type, last.shape) == (DEVICE, (len(tokens), 32))
            assert taps is not None
            assert taps.device.type == DEVICE


def test_a_tensor_left_behind_is_noticed() -> None:
    """What the test above rests on."""
    with pytest.raises(RuntimeError, match="device"):
        torch.zeros(3, device=DEVICE) + torch.zeros(3)
