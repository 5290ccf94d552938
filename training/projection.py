"""Projection: what training a drafter takes on machines that are not here. Arithmetic, no run.

Three stages: the target answers, its states are made, the drafter learns from them. docs/scale.md
works examples; training/achieved.py compares the same arithmetic with runs that were made.
"""

import math
from dataclasses import dataclass
from typing import Any

from training.accelerators import Accelerator
from training.estimate import PARAMETER_BYTES
from training.feature_store import token_bytes
from training.features import forward_values
from training.paper_target import PaperTarget
from training.workload import Workload

WAYS = ("without_target", "with_target", "target_spread")  # of having the target's states
_FLOAT, _HALF = 4, 2  # bytes


@dataclass(frozen=True)
class Project:
    """What is to be trained, and on what.

    Args:
        target: decides.
        work: of a token of the drafter's training.
        device: every GPU.
        devices: their number.
        tokens: of all chats, prompts included.
        epochs: passes over them.
        batch_tokens: of a training batch on a device.
        length: of a chat, in tokens.
        supervised: share of the tokens that are an answer's.
        rows: answers that one copy of the target writes at a time.
        chunk: positions whose logits over all ids exist at once.
        target_bytes: of a value of the target.
    """

    target: PaperTarget
    work: Workload
    device: Accelerator
    devices: int
    tokens: float
    epochs: float = 2.0
    batch_tokens: int = 8192
    length: int = 2048
    supervised: float = 0.65
    rows: int = 128
    chunk: int = 512
    target_bytes: float = _HALF


@dataclass(frozen=True)
class Utilisation:
    """Shares of the data sheet that are taken to be reached.

    Args:
        decode: of the bandwidth, writing answers.
        forward: of the operations, in the target's forwards.
        training: of the operations, in the drafter's steps.
    """

    decode: float = 0.5
    forward: float = 0.4
    training: float = 0.25


def project(plan: Project, reached: Utilisation | None = None) -> dict[str, Any]:
    """Return memory, disk and hours as plain values, with what they assume."""
    reached = reached or Utilisation()
    copies, span = _copies(plan)
    memory = _memory(plan)
    return {
        "target": {
            "name": plan.target.name,
            "parameters": plan.target.parameters,
            "active": plan.target.active + 2 * plan.target.table,
        },
        "drafter": {
            "parameters": plan.work.parameters,
            "taps": plan.work.taps,
            "vocabulary": plan.work.vocabulary,
            "training_flops_a_token": plan.work.training_flops,
        },
        "memory": memory,
        "fits": {
            **{way: memory[way] <= plan.device.memory for way in WAYS},
            "devices_a_copy_of_the_target": span,
            "copies_of_the_target": copies,
        },
        "disk": _disk(plan),
        "hours": _hours(plan, reached),
        "assumed": assumptions(plan, reached),
    }


def _memory(plan: Project) -> dict[str, float]:
    """Return bytes of one device, from below."""
    shape, work = plan.target.shape, plan.work
    rows = max(1, plan.batch_tokens // plan.length)
    parts = {
        "drafter": work.parameters * PARAMETER_BYTES,
        "states_of_a_batch": plan.batch_tokens * (work.taps + 1) * shape.hidden_size * _FLOAT,
        "kept_for_backward": plan.batch_tokens * work.kept_bytes,
        "teacher_logits": plan.chunk * shape.vocab_size * _FLOAT * 2,
    }
    trainer = sum(parts.values())
    tables = 2 * plan.target.table * plan.target_bytes
    forward = forward_values(rows, plan.length, shape, plan.chunk) * _HALF
    whole = plan.target.parameters * plan.target_bytes
    return {
        **parts,
        "embedding_and_head": tables,
        "target": whole,
        "target_forward": forward,
        "without_target": trainer + tables,
        "with_target": trainer + whole + forward,
        "target_spread": trainer + whole / plan.devices + forward,
    }


def _disk(plan: Project) -> dict[str, float]:
    """Return bytes of the stored features."""
    a_token = token_bytes(plan.work.taps, plan.target.shape.hidden_size, "bfloat16")
    return {"gb_a_million_tokens": a_token * 1e6 / 1e9, "gb": a_token * plan.tokens / 1e9}


def _copies(plan: Project) -> tuple[int, int]:
    """Return how many copies of the target the devices hold, and how many devices each needs."""
    room = 0.8 * plan.device.memory  # the rest is for caches and states
    span = math.ceil(plan.target.parameters * plan.target_bytes / room)
    return plan.devices // span, span


def _hours(plan: Project, reached: Utilisation) -> dict[str, float | None]:
    target, device, work = plan.target, plan.device, plan.work
    copies, span = _copies(plan)
    flops = device.flops * plan.devices
    states = plan.tokens * (2 * target.active + work.teacher_flops) / (flops * reached.forward)
    training = plan.tokens * plan.epochs * work.training_flops / (flops * reached.training)
    answers = None
    if copies:
        answers = plan.tokens * plan.supervised / (copies * _answering(plan, span, reached)) / 3600
    return {"answers": answers, "features": states / 3600, "training": training / 3600}


def _answering(plan: Project, span: int, reached: Utilisation) -> float:
    """Return the tokens a second that one copy of the target writes."""
    target, shape = plan.target, plan.target.shape
    cached = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * _HALF * plan.length / 2
    read = target.read(plan.rows) * plan.target_bytes + plan.rows * cached
    work = 2 * (target.active + target.table) * plan.rows
    by_reading = read / (plan.device.bandwidth * span * reached.decode)
    by_work = work / (plan.device.flops * span * reached.forward)
    return plan.rows / max(by_reading, by_work)


def assumptions(plan: Project, reached: Utilisation) -> list[str]:
    """Return what the figures rest on, in lines."""
    share = plan.supervised
    return [
        f"{plan.device.flops / 1e12:g} TFLOP/s of dense bfloat16 and "
        f"{plan.device.bandwidth / 1e12:g} TB/s by data sheet; {reached.decode:.0%} of the "
        f"bandwidth is reached in decoding, {reached.forward:.0%} of the operations in the "
        f"target's forwards, {reached.training:.0%} in the drafter's steps",
        f"chats of {plan.length} tokens, {share:.0%} of them the answer's; each copy of the target "
        f"writes {plan.rows} answers at a time over half a chat of cache; experts are hit evenly",
        f"{plan.batch_tokens} tokens a batch and device, {plan.epochs:g} passes; float32 weights, "
        f"gradients and two moments: {PARAMETER_BYTES} bytes a trained value on every device",
        "linear maps are counted as a narrow build of the drafter runs them, a backward twice its "
        "forward; attention, norms, the optimizer, loading and waiting are not: memory and hours "
        "are from below",
        f"states of {plan.work.taps} tapped layers and the last one in bfloat16",
    ]
