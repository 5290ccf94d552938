"""Tally: one contender's passes, flattened and added up."""

from collections.abc import Callable, Collection
from dataclasses import astuple, dataclass

from drafters.base import Account
from inference.bench import Contender
from inference.clock import Clock
from inference.passes import Decoded
from inference.stats import (
    Acceptance,
    Estimate,
    Round,
    Work,
    acceptance,
    distinct,
    looped,
    rate,
    speedup,
)


@dataclass(frozen=True)
class Entry:
    """One round of one prompt: its number, the batch of prompts it ran in, the round."""

    prompt: int
    group: int
    round: Round


Keep = Callable[[Entry], bool]


def everything(_: Entry) -> bool:
    """Keep every round."""
    return True


def without_loops(entry: Entry) -> bool:
    """Keep the rounds that emit no token of a repeated 4-gram."""
    return not entry.round.looped


class Tally:
    """Sums over all passes of a contender, decode only unless a name says otherwise."""

    def __init__(self, contender: Contender) -> None:
        """Flatten the passes."""
        self.passes = contender.passes
        self.decoded: list[tuple[int, Decoded]] = []
        self.entries: list[Entry] = []
        for one in contender.passes:
            for prompt, output in zip(one.prompts, one.outputs, strict=True):
                self.decoded.append((prompt, output))
                self.entries += [Entry(prompt, one.group, r) for r in output.rounds]
        self.draft_modes = {mode for _, one in self.decoded for mode in one.draft_modes}
        clocks = [one.clock for one in contender.passes]
        self.prefill_seconds = sum(clock.prefill for clock in clocks)
        names = Clock().phases
        self.phases = {name: sum(clock.phases[name] for clock in clocks) for name in names}
        self.seconds = sum(self.phases.values())
        self.rounds = sum(clock.rounds for clock in clocks)
        self.tokens = sum(entry.round.emitted for entry in self.entries)

    @property
    def tokens_per_second(self) -> float | None:
        """Return the rate of decoding; None if there was no round."""
        return self.tokens / self.seconds if self.rounds else None

    @property
    def round_seconds(self) -> float | None:
        """Return the mean time of a round of the whole batch; None if there was none."""
        return self.seconds / self.rounds if self.rounds else None

    @property
    def time_share(self) -> dict[str, float | None]:
        """Return each phase's share of the decoding time."""
        return {
            name: seconds / self.seconds if self.rounds else None
            for name, seconds in self.phases.items()
        }

    def accounts(self) -> list[Account]:
        """Return what every member of a joint drafter did; empty for others."""
        table = [[astuple(one) for one in each.accounts] for each in self.passes]
        return [Account(*map(sum, zip(*parts, strict=True))) for parts in zip(*table, strict=True)]

    def acceptance(self, keep: Keep = everything) -> Acceptance:
        """Count the rounds that are kept."""
        return acceptance([entry.round for entry in self.entries if keep(entry)])

    def tau(self) -> Estimate:
        """Return tau with its interval over prompts."""
        return rate(self._work(everything, by_time=False))

    def speedup(self, plain: "Tally", keep: Keep = everything) -> Estimate:
        """Return the gain over plain decoding on the rounds that are kept of both."""
        return speedup(self._work(keep), plain._work(keep))

    def looped_share(self, prompts: Collection[int] | None = None) -> float:
        """Return the share of output tokens, the prefill's included, in repeated 4-grams.

        Args:
            prompts: numbers of those that count; None: all.
        """
        marks = [
            mark
            for prompt, output in self.decoded
            if prompts is None or prompt in prompts
            for mark in looped(output.ids)
        ]
        return sum(marks) / len(marks)

    def distinct(self) -> float | None:
        """Return distinct-4 of the outputs, the prefill's token included; None if all are short."""
        return distinct([output.ids for _, output in self.decoded])

    def by_prompt(self) -> dict[int, list[Round]]:
        """Return each prompt's rounds, all repeats together, in the prompts' order."""
        found: dict[int, list[Round]] = {
            number: [] for number in sorted({n for n, _ in self.decoded})
        }
        for entry in self.entries:
            found[entry.prompt].append(entry.round)
        return found

    def outputs(self, prompt: int) -> list[list[int]]:
        """Return a prompt's ids in every repeat."""
        return [output.ids for number, output in self.decoded if number == prompt]

    def work(self, *, prefill: bool = False) -> list[Work]:
        """Return tokens and seconds of every batch of prompts, of decoding or of all."""
        if not prefill:
            return self._work(everything)
        table = {one.group: [0.0, 0.0] for one in self.passes}
        for one in self.passes:
            table[one.group][0] += sum(len(output.ids) for output in one.outputs)
            table[one.group][1] += one.clock.decode + one.clock.prefill
        return [Work(*table[group]) for group in sorted(table)]

    def _work(self, keep: Keep, *, by_time: bool = True) -> list[Work]:
        """Return tokens and seconds (or rounds) of every batch of prompts, repeats together."""
        table = {one.group: [0.0, 0.0] for one in self.passes}
        for entry in self.entries:
            if keep(entry):
                table[entry.group][0] += entry.round.emitted
                table[entry.group][1] += entry.round.seconds if by_time else 1
        return [Work(*table[group]) for group in sorted(table)]
