"""Warm start: a drafter's weights begin as another's where names and shapes fit.

This is no resume: optimizer, schedule and data order start afresh, and the drafter may be of
another family or other options than the one it starts from.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from drafters.base import NeuralDrafter
from drafters.errors import UserError
from drafters.fingerprint import Fingerprint
from drafters.stored import StoredDrafter
from drafters.target import Target

_IDS = "vocabulary.ids"


@dataclass(frozen=True)
class WarmStart:
    """What a folder of a published drafter holds.

    Args:
        folder: where it is.
        family: of the drafter in it.
        tensors: by name.
        made_for: the target it was made for.
    """

    folder: Path
    family: str
    tensors: dict[str, Tensor]
    made_for: Fingerprint

    @classmethod
    def read(cls, folder: str | Path) -> "WarmStart":
        """Read a folder that training or publishing wrote.

        Raises:
            UserError: if it is none.
        """
        try:
            stored = StoredDrafter.read(folder)
            stored.shapes()  # refuses what cannot be read
        except UserError as error:
            raise UserError(
                f"warm_start {folder}: not a folder that training wrote ({error})"
            ) from error
        return cls(stored.folder, stored.family, stored.tensors(), stored.made_for)

    def ids(self, size: int) -> Tensor | None:
        """Return its draft vocabulary if it has this size."""
        ids = self.tensors.get(_IDS)
        return ids if ids is not None and len(ids) == size else None

    @torch.no_grad()
    def apply(self, drafter: NeuralDrafter, target: Target) -> str:
        """Copy what fits and say what was taken, in one line.

        Raises:
            UserError: if nothing fits.
        """
        own = {name: p for name, p in drafter.named_parameters() if p.requires_grad}
        fitting = [
            name
            for name, parameter in own.items()
            if name in self.tensors and self.tensors[name].shape == parameter.shape
        ]
        if not fitting:
            raise UserError(
                f"warm_start {self.folder}: nothing in this {self.family} fits a {drafter.name} "
                "with these options: give another folder or its options"
            )
        for name in fitting:
            own[name].copy_(self.tensors[name])
        left = sorted(set(own) - set(fitting))
        other = self.made_for.difference(Fingerprint.of(target))
        return (
            f"warm start from {self.folder} ({self.family}), not a resume: {len(fitting)} of "
            f"{len(own)} tensors taken"
            + (f", not {', '.join(left)}" if left else "")
            + "; optimizer, schedule and data order start afresh"
            + (f"; it was made for another target ({self.made_for.name})" if other else "")
        )
