"""The speculators library's own forward on what we export agrees with ours in float32."""

import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafters.base import Batch, NeuralDrafter
from drafters.cache_root import cache_root
from drafters.checkpoint import load_drafter
from drafters.formats.convert import export_drafter
from drafters.target import Target
from tests.foreign import saved, small_target
from tests.tiny import prompts_of

PYTHON = cache_root() / "engines/vllm/bin/python"
WORKER = Path(__file__).with_name("speculators_logits.py")
ANCHOR = 5

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(not PYTHON.exists(), reason="no engines here: run `make engines`"),
]


@pytest.fixture(scope="module")
def target() -> Target:
    return small_target()


def theirs(folder: Path, batch: Batch, work: Path, **more: Tensor) -> Tensor:
    """Return the library's logits."""
    inputs = {"ids": batch.ids, "anchor": torch.tensor([ANCHOR]), "last": batch.last, **more}
    if batch.taps is not None:
        inputs["taps"] = batch.taps
    save_file({name: t.contiguous() for name, t in inputs.items()}, work / "in.safetensors")
    done = subprocess.run(
        [PYTHON, "-P", WORKER, folder, work / "in.safetensors", work / "out.safetensors"],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={**os.environ, "PYTHONPATH": "", "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return load_file(work / "out.safetensors")["logits"]


def exported(
    target: Target, work: Path, family: str, length: int, **options: object
) -> tuple[NeuralDrafter, Batch, Path]:
    """Export a random drafter; return it with a batch of one text and the folder.

    The library's masks come in blocks of 128 slots: EAGLE-3's texts fill one.
    """
    folder = saved(target, work / "ours", family, **options)
    out = work / "theirs"
    export_drafter(folder, "speculators", out, target, dtype=torch.float32)
    drafter = load_drafter(folder, target)
    assert isinstance(drafter, NeuralDrafter)
    ids = torch.tensor(prompts_of(length, vocab_size=48))  # 63 stands for an unknown token
    document, position = torch.zeros_like(ids), torch.arange(length).expand(1, length)
    taps, last = target.forward_batch(ids, document, position, drafter.features)
    return drafter, Batch(ids, torch.ones_like(ids).bool(), document, position, taps, last), out


def agree(theirs: Tensor, ours: Tensor, within: float = 1e-5) -> None:
    """Compare logits; random weights make large ones, so that rounding is judged by their size."""
    difference = float((theirs - ours).norm() / ours.norm())
    assert difference < within, difference


@pytest.mark.parametrize(
    "flags",
    [{}, {"norm_before_residual": True}, {"tap_norm": True, "norm_output": True}],
    ids=["eagle3", "normed-residual", "eagle3.1"],
)
def test_eagle3_at_every_depth(target: Target, tmp_path: Path, flags: dict[str, bool]) -> None:
    drafter, batch, folder = exported(
        target, tmp_path, "eagle", 129, draft_vocab_size=16, unroll=3, **flags
    )
    found = theirs(folder, batch, tmp_path)
    with torch.no_grad():
        for depth, prediction in enumerate(drafter.predict(batch, target)):
            ours = prediction.logits(slice(0, len(prediction.group)))
            # states are fed on, and rounding with them: it grows some fivefold a depth here
            agree(found[depth][prediction.group], ours, within=(2e-6, 1e-5, 5e-5)[depth])


@pytest.mark.parametrize("family", ["dflash", "dspark"])
def test_a_block_slot_by_slot(target: Target, tmp_path: Path, family: str) -> None:
    sparks = {"markov_rank": 4} if family == "dspark" else {}
    drafter, batch, folder = exported(
        target, tmp_path, family, 16, taps=[1, 5], draft_vocab_size=16, qk_norm=True, **sparks
    )
    found = theirs(folder, batch, tmp_path)
    lead = 1 if family == "dflash" else 0
    with torch.no_grad():
        for slot, prediction in enumerate(drafter.predict(batch, target)):
            at = prediction.group.tolist().index(ANCHOR)
            ours = prediction.logits(slice(at, at + 1))
            agree(found[slot + lead][None], ours)


def test_peagle_at_every_depth(target: Target, tmp_path: Path) -> None:
    drafter, batch, folder = exported(
        target, tmp_path, "peagle", 16, draft_vocab_size=16, layers=2, unroll=3
    )
    found = theirs(folder, batch, tmp_path)
    with torch.no_grad():
        for depth, prediction in enumerate(drafter.predict(batch, target)):
            ours = prediction.logits(slice(0, len(prediction.group)))
            agree(found[depth][prediction.group], ours)


def test_mtp_at_the_first_depth(target: Target, tmp_path: Path) -> None:
    """Later depths are trained otherwise there: every step on keys of its own."""
    whole = {"draft_vocab_size": 0, "norm_output": True, "qk_norm": True}
    drafter, batch, folder = exported(target, tmp_path, "mtp", 16, **whole)
    every = torch.arange(target.shape.vocab_size)
    rows = {"embedding": target.embed(every), "head": target.head_rows(every)}
    found = theirs(folder, batch, tmp_path, **rows)[0]
    prediction = next(iter(drafter.predict(batch, target)))
    with torch.no_grad():
        ours = prediction.logits(slice(0, len(found)))
    agree(found, ours)
    assert prediction.group[: len(found)].tolist() == list(range(len(found)))
