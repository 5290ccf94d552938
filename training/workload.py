"""Workload: what a drafter's training step does for a token, read off the drafter itself.

The family is built twice: without data in its full size, for its parameters, and narrow with the
same options, vocabulary and depth, where a step is run and every linear map counted. A map that ran
so often a token in the narrow one runs as often in the full one. Attention, norms and the optimizer
are not counted.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, LlamaConfig

from drafters.base import Batch, NeuralDrafter
from drafters.errors import UserError
from drafters.losses import LossSettings
from drafters.registry import method, methods
from drafters.shape import TargetShape
from drafters.target import Target
from drafters.teacher import summarise
from training.features import Lesson
from training.objective import Objective

_WIDTH, _LENGTH = 32, 256  # of the narrow drafter, and tokens of its text
_FLOAT = 4  # bytes


@dataclass(frozen=True)
class Workload:
    """What a token of training takes.

    Args:
        parameters: trained ones.
        taps: layers of the target that are read.
        vocabulary: ids that are guessed on.
        forward_flops: of the drafter's linear maps, forward.
        teacher_flops: of the target's head over all ids, once a position.
        kept_bytes: inputs and outputs of the linear maps, which the backward reads.
    """

    parameters: int
    taps: int
    vocabulary: int
    forward_flops: float
    teacher_flops: float
    kept_bytes: float

    @property
    def training_flops(self) -> float:
        """Return forward and backward: a backward takes two forwards' work."""
        return 3 * self.forward_flops


def workload(
    family: str,
    options: Mapping[str, object],
    shape: TargetShape,
    *,
    supervised: float = 1.0,
    loss: LossSettings | None = None,
) -> Workload:
    """Return what a token of training takes.

    Args:
        family: name in the registry.
        options: of the drafter.
        shape: of the target.
        supervised: share of the tokens that are an answer's.
        loss: which loss; its terms decide which heads run.

    Raises:
        UserError: on an unknown family or option, or one that is not trained.
    """
    kind = method(family)
    if not issubclass(kind, NeuralDrafter):
        trained = sorted(n for n, k in methods().items() if issubclass(k, NeuralDrafter))
        raise UserError(f"{family} has no weights to train: give {', '.join(trained)}")
    with torch.device("meta"):
        full = kind.build(options, shape)
    narrow = kind.build(options, _narrow(shape))
    trained = {name: p for name, p in full.named_parameters() if p.requires_grad}
    flops = kept = 0.0
    for (name, share, outer), rows in _counted(narrow, shape, supervised, loss).items():
        inner = shape.hidden_size  # of the target's own head, on some ids or on all
        if name in trained:
            outer, inner = trained[name].shape[0] * share, trained[name].shape[1]
        flops += 2 * rows * inner * outer / _LENGTH
        kept += rows * (inner + outer) * _FLOAT / _LENGTH
    ids = full.ids
    return Workload(
        parameters=sum(p.numel() for p in trained.values()),
        taps=len(full.features.layers),
        vocabulary=shape.vocab_size if ids is None else len(ids),
        forward_flops=flops,
        teacher_flops=2.0 * shape.hidden_size * shape.vocab_size * supervised,
        kept_bytes=kept,
    )


def _narrow(shape: TargetShape) -> TargetShape:
    """Return a shape of as many layers, heads and ids, and next to no width."""
    return replace(shape, hidden_size=_WIDTH, intermediate_size=2 * _WIDTH, head_dim=2)


def _counted(
    drafter: NeuralDrafter, shape: TargetShape, supervised: float, loss: LossSettings | None
) -> Counter[tuple[str, float, int]]:
    """Run a step of a narrow drafter; return rows by weight, share of it, and outputs."""
    settings = loss or LossSettings()
    target, batch = _target(shape.vocab_size), _batch(drafter, shape.vocab_size, supervised)
    summary = summarise(batch, target, settings.temperature, settings.chunk)
    maps = _LinearMaps(drafter)
    objective = Objective(drafter, target, settings)
    with maps:
        objective(Lesson(batch, summary, _LENGTH))
    return maps.rows


def _target(vocab_size: int) -> Target:
    """Return a target that only embeds and has a head."""
    config = LlamaConfig(
        hidden_size=_WIDTH,
        intermediate_size=_WIDTH,
        num_hidden_layers=1,
        num_attention_heads=4,
        vocab_size=vocab_size,
        bos_token_id=None,
        eos_token_id=None,
    )
    loader: Any = AutoModelForCausalLM
    return Target(loader.from_config(config), name="narrow", engine="reference")


def _batch(drafter: NeuralDrafter, vocab_size: int, supervised: float) -> Batch:
    """Return one document whose last tokens are an answer's."""
    place = torch.arange(_LENGTH)[None]
    return Batch(
        ids=torch.randint(vocab_size, (1, _LENGTH)),
        label_mask=place >= round((1 - supervised) * _LENGTH),
        document=torch.zeros_like(place),
        position=place,
        taps=torch.randn(1, _LENGTH, len(drafter.features.layers) * _WIDTH),
        last=torch.randn(1, _LENGTH, _WIDTH),
    )


class _LinearMaps(TorchFunctionMode):
    """Counts the rows that linear maps get, by parameter of a drafter; "" for any other weight."""

    def __init__(self, drafter: NeuralDrafter) -> None:
        super().__init__()
        self.rows: Counter[tuple[str, float, int]] = Counter()
        self._known = {
            p.untyped_storage().data_ptr(): (name, len(p)) for name, p in drafter.named_parameters()
        }

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is F.linear:
            given = args[0]
            weight = args[1] if len(args) > 1 else kwargs["weight"]
            outer = len(weight)
            place = weight.untyped_storage().data_ptr()
            name, whole = self._known.get(place, ("", outer))
            self.rows[name, outer / whole, outer] += given.numel() // given.shape[-1]
        return func(*args, **(kwargs or {}))
