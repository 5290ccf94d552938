"""Objective: a drafter with its loss, the one module that accelerate wraps.

Everything that needs a gradient happens inside its forward, so that mixed precision and gradient
synchronisation see it; the target is not a module and stays outside.
"""

import torch
from torch import nn

from drafters.base import NeuralDrafter
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
    """

    def __init__(self, drafter: NeuralDrafter, target: Target, settings: LossSettings) -> None:
        """Index the drafter's vocabulary."""
        super().__init__()
        self.drafter, self.target, self.settings = drafter, target, settings
        self.teacher = Teacher(target, drafter.ids, settings.temperature)
        self.progress = 0.0  # share of the run that is done, for losses that take turns

    def forward(self, lesson: Lesson, share: float = 1.0) -> LossSums:
        """Return the sums of one lesson, times `share`.

        A process that has no lesson left in a step runs any lesson with share 0. The loss depends
        on every parameter whatever the lesson holds, so all processes exchange the same gradients.
        """
        idle = torch.stack([p.sum() * 0 for p in self.parameters() if p.requires_grad]).sum()
        predictions = self.drafter.predict(lesson.batch, self.target)
        settings = self.settings.at(self.progress)
        sums = drafter_loss(predictions, lesson.batch, self.teacher, settings, lesson.summary)
        scaled = LossSums(*(x * share for x in sums))
        return scaled._replace(loss=scaled.loss + idle)
