"""Objective: a drafter with its loss, the one module that accelerate wraps.

Everything that needs a gradient happens inside its forward, so that mixed precision and gradient
synchronisation see it; the target is not a module and stays outside.
"""

from collections.abc import Sequence

import torch
from torch import nn

from drafters.base import NeuralDrafter, Prediction
from drafters.losses import LossSettings, LossSums, drafter_loss
from drafters.target import Target
from drafters.teacher import Teacher
from training.features import Lesson


class Objective(nn.Module):
    """The loss of a drafter.

    Args:
        drafter: its vocabulary must be final.
        target: the teacher.
        settings: which loss.
        drafting: weight of the drafter's loss beside that of the target's own law, which it then
            predicts first, at depth 0; None: it does not, the target stays as it is.
    """

    def __init__(
        self,
        drafter: NeuralDrafter,
        target: Target,
        settings: LossSettings,
        drafting: float | None = None,
    ) -> None:
        """Index the drafter's vocabulary."""
        super().__init__()
        self.drafting = drafting
        self.drafter, self.target, self.settings = drafter, target, settings
        self.teacher = Teacher(target, drafter.ids, settings.temperature)
        self.progress = 0.0  # share of the run that is done, for losses that take turns

    @property
    def first_depth(self) -> int:
        """Return the depth of the sums' first entry: 0 is the target's own law."""
        return 1 if self.drafting is None else 0

    def drafted(self, predictions: Sequence[Prediction]) -> Sequence[Prediction]:
        """Return the drafter's own predictions: all but the target's law, where that learns."""
        return predictions[1 - self.first_depth :]

    def forward(self, lesson: Lesson, share: float = 1.0) -> LossSums:
        """Return the sums of one lesson, times `share`.

        A process that has no lesson left in a step runs any lesson with share 0. The loss depends
        on every parameter whatever the lesson holds, so all processes exchange the same gradients.
        """
        idle = torch.stack([p.sum() * 0 for p in self.parameters() if p.requires_grad]).sum()
        predictions = self.drafter.predict(lesson.batch, self.target)
        settings, drafted = self.settings.at(self.progress), self.drafted(predictions)
        sums = drafter_loss(drafted, lesson.batch, self.teacher, settings, lesson.summary)
        if self.drafting is not None:
            sums = _joined(self._own(predictions[0], lesson), sums, self.drafting)
        scaled = LossSums(*(x * share for x in sums))
        return scaled._replace(loss=scaled.loss + idle)

    def _own(self, law: Prediction, lesson: Lesson) -> LossSums:
        """Return what keeps the target's own law where the frozen target's is: KL on all ids."""
        settings = LossSettings(
            decay=1.0, chunk=self.settings.chunk, keep_logits_mb=self.settings.keep_logits_mb
        )
        plain = lesson.summary._replace(tempered=lesson.summary.normaliser)
        return drafter_loss([law], lesson.batch, Teacher(self.target, None), settings, plain)


def _joined(own: LossSums, drafted: LossSums, share: float) -> LossSums:
    """Return the sums side by side, the drafted depths' with a share of the say."""
    less = drafted._replace(loss=drafted.loss * share, weight=drafted.weight * share)
    return LossSums(*(torch.cat(both) for both in zip(own, less, strict=True)))
