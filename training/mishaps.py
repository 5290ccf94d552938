"""Mishaps: steps whose loss or gradient is not finite are left out; a few in a row end the run."""

from collections.abc import Callable, Sequence
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from drafters.errors import UserError
from drafters.whole import whole_file
from training.features import Lesson

IN_A_ROW = 3


class Mishaps:
    """Counts steps that are not finite, one after another.

    Args:
        file: where the batches of the last one go, if it ends the run.
        say: gets a line for a person.
    """

    def __init__(self, file: Path, say: Callable[[str], None]) -> None:
        """Start without any."""
        self.file, self.say, self.count = file, say, 0

    def good(self) -> None:
        """Note a step that was made."""
        self.count = 0

    def bad(self, step: int, loss: float, norm: float) -> bool:
        """Note a step that is left out; tell whether it is one too many."""
        self.count += 1
        self.say(f"step {step} left out: its loss is {loss:.3g}, its gradient's norm {norm:.3g}")
        return self.count >= IN_A_ROW

    def end(self, lessons: Sequence[Lesson]) -> None:
        """Keep the batches of the last step and end the run.

        Raises:
            UserError: always; says where the batches are.
        """
        tensors: dict[str, Tensor] = {}
        for number, lesson in enumerate(lessons):
            for name, value in vars(lesson.batch).items():
                if value is not None:
                    tensors[f"{number}.{name}"] = value.detach().contiguous().cpu()
        with whole_file(self.file) as new:
            save_file(tensors, new)
        raise UserError(
            f"{IN_A_ROW} steps in a row had a loss or gradient that is not finite; the last "
            f"batches are in {self.file}, the weights before them in the output folder: lower "
            "optim.lr, set precision=no, or look at those chats"
        )
