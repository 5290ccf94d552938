"""What the foreign files mean: forwards written from the formats' own definitions.

Two parts of one shape under exchanged names (gate and up, keys and values) survive any round trip;
here they would not.
"""

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModel

from drafters.base import Batch, NeuralDrafter, Prediction
from drafters.checkpoint import load_drafter
from drafters.formats.convert import export_drafter
from drafters.formats.id_tables import id_tables
from drafters.target import Target
from tests.foreign import config_of, saved, small_target
from tests.tiny import prompts_of

LENGTH = 9


@pytest.fixture(scope="module")
def target() -> Target:
    return small_target()


def predicted(drafter: NeuralDrafter, target: Target) -> tuple[Batch, list[Prediction]]:
    """Return a batch of one text and what the drafter predicts on it."""
    ids = torch.tensor(prompts_of(LENGTH, vocab_size=64))
    document, position = torch.zeros_like(ids), torch.arange(LENGTH).expand(1, LENGTH)
    taps, last = target.forward_batch(ids, document, position, drafter.features)
    batch = Batch(ids, torch.ones_like(ids).bool(), document, position, taps, last)
    with torch.no_grad():
        return batch, drafter.predict(batch, target)


def close(prediction: Prediction, logits: Tensor) -> None:
    """Compare a prediction with logits [T, K], one row a slot."""
    found = prediction.logits(slice(0, len(prediction.group))).detach()
    torch.testing.assert_close(found, logits[prediction.group], rtol=1e-3, atol=1e-3)


def norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + epsilon).sqrt() * weight


def turned(x: Tensor, theta: float = 10000.0) -> Tensor:
    """Turn heads [T, H, hd] by their positions, halves against each other."""
    half = x.shape[-1] // 2
    angle = torch.arange(len(x))[:, None] * theta ** -(torch.arange(half) / half)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    low, high = x[..., :half], x[..., half:]
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)


def eagle3(
    w: dict[str, Tensor], taps: Tensor, embedding: Tensor, epsilon: float, flags: dict[str, bool]
) -> Tensor:
    """Return the first step's logits [T, K] of a midlayer file, by the published forward."""
    if flags["tap_norm"]:
        parts = taps.unflatten(-1, (3, -1)).unbind(-2)
        taps = torch.cat(
            [norm(x, w[f"fc_norm.{k}.weight"], epsilon) for k, x in enumerate(parts)], -1
        )
    feature = taps @ w["fc.weight"].T
    m = {name.removeprefix("midlayer.").removesuffix(".weight"): t for name, t in w.items()}
    token = norm(embedding, m["input_layernorm"], epsilon)
    hidden = norm(feature, m["hidden_norm"], epsilon)
    both = torch.cat((token, hidden), -1)
    q, k, v = ((both @ m[f"self_attn.{x}_proj"].T).unflatten(-1, (-1, 4)) for x in ("q", "k", "v"))
    q, k = turned(q), turned(k).repeat_interleave(2, 1)
    v = v.repeat_interleave(2, 1)
    scores = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(4)
    scores = scores.masked_fill(~torch.ones(LENGTH, LENGTH).tril().bool(), -torch.inf)
    read = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).flatten(1)
    h = (hidden if flags["norm_before_residual"] else feature) + read @ m["self_attn.o_proj"].T
    x = norm(h, m["post_attention_layernorm"], epsilon)
    h = h + (F.silu(x @ m["mlp.gate_proj"].T) * (x @ m["mlp.up_proj"].T)) @ m["mlp.down_proj"].T
    return norm(h, m["norm"], epsilon) @ m["lm_head"].T


@pytest.mark.slow
@pytest.mark.parametrize(
    "given",
    [(), ("norm_before_residual",), ("tap_norm", "norm_output")],
    ids=["plain", "residual", "eagle3.1"],
)
def test_the_eagle3_file_computes_what_the_drafter_does(
    given: tuple[str, ...], target: Target, tmp_path: Path
) -> None:
    names = ("norm_before_residual", "tap_norm", "norm_output")
    flags = {name: name in given for name in names}
    folder = saved(target, tmp_path / "d", "eagle", draft_vocab_size=16, **flags)
    export_drafter(folder, "vllm", tmp_path / "out", dtype=torch.float32)
    drafter = load_drafter(folder, target)
    assert isinstance(drafter, NeuralDrafter)
    batch, predictions = predicted(drafter, target)
    assert batch.taps is not None
    following = torch.cat((batch.ids[0, 1:], batch.ids[0, -1:]))
    tensors = load_file(tmp_path / "out/model.safetensors")
    epsilon = target.shape.norm_epsilon
    logits = eagle3(tensors, batch.taps[0], target.embed(following), epsilon, flags)
    close(predictions[0], logits)


def test_the_medusa_file_computes_what_the_drafter_does(target: Target, tmp_path: Path) -> None:
    options = {"heads": 2, "blocks": 2, "draft_vocab_size": 0, "shared_head": False}
    folder = saved(target, tmp_path / "d", "medusa", **options)
    export_drafter(folder, "medusa", tmp_path / "out", dtype=torch.float32)
    drafter = load_drafter(folder, target)
    assert isinstance(drafter, NeuralDrafter)
    batch, predictions = predicted(drafter, target)
    w = load_file(tmp_path / "out/medusa_lm_head.safetensors")
    for head, prediction in enumerate(predictions):
        # head h at t guesses x[t + 2 + h]: the law after position t + 1 + h
        assert torch.equal(prediction.positions, prediction.group + head + 1)
        x = batch.last[0]
        for block in range(2):
            weight, bias = (w[f"{head}.{block}.linear.{part}"] for part in ("weight", "bias"))
            x = x + F.silu(x @ weight.T + bias)
        close(prediction, x @ w[f"{head}.2.weight"].T)


def test_transformers_own_dflash_computes_what_the_drafter_does(
    target: Target, tmp_path: Path
) -> None:
    """Its only model of this kind has other names for the projection of the target's states."""
    options = {"taps": [1, 5], "slots": 3, "draft_vocab_size": 16, "qk_norm": True}
    folder = saved(target, tmp_path / "d", "dflash", **options)
    export_drafter(folder, "zlab", tmp_path / "out", target, dtype=torch.float32)
    drafter = load_drafter(folder, target)
    assert isinstance(drafter, NeuralDrafter)
    batch, predictions = predicted(drafter, target)
    config, tensors = config_of(tmp_path / "out"), load_file(tmp_path / "out/model.safetensors")
    inner = config.pop("dflash_config")
    assert batch.taps is not None
    names = {
        "fc.weight": "encoder.fc.weight",
        "hidden_norm.weight": "encoder.output_norm_enc.weight",
    }
    del config["model_type"], config["architectures"]
    known = AutoConfig.for_model("muse_glimmer_assistant", **(config | inner))
    model = AutoModel.from_config(known, attn_implementation="eager").eval()
    own = {
        name: tensors.pop(name) for name in ("embed_tokens.weight", "lm_head.weight", "d2t", "t2d")
    }
    model.load_state_dict({names.get(name, name): tensor for name, tensor in tensors.items()})
    anchor = 5
    block = [int(batch.ids[0, anchor]), *[inner["mask_token_id"]] * 3]
    with torch.no_grad():
        states = model(
            noise_embeds=own["embed_tokens.weight"][block][None],
            context_hidden_states=batch.taps[:, :anchor],
        ).last_hidden_state[0]
    for slot, prediction in enumerate(predictions):
        at = prediction.group.tolist().index(anchor)
        ours = prediction.logits(slice(at, at + 1)).detach()[0]
        torch.testing.assert_close(
            ours, own["lm_head.weight"] @ states[slot + 1], rtol=1e-5, atol=1e-4
        )


@given(st.sets(st.integers(0, 63), min_size=1))
def test_tables_of_any_ids(kept: set[int]) -> None:
    tables = id_tables(torch.tensor(sorted(kept)), 64)
    offsets, mask = tables["d2t"], tables["t2d"]
    assert bool((offsets[1:] >= offsets[:-1]).all())
    assert 0 <= int(offsets[0]) <= int(offsets[-1]) <= 64 - len(kept)
    assert torch.equal(torch.arange(len(kept)) + offsets, mask.nonzero()[:, 0])
    assert set(mask.nonzero()[:, 0].tolist()) == kept
