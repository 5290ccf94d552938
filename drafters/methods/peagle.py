"""`peagle`: P-EAGLE. EAGLE-3's network guesses all depths in one forward.

The first slot is EAGLE-3's: token x[i+1] with the target's feature g[i]. Behind it lie slots that
know neither: one learned vector stands for the token, another for the feature. The slot of depth d
at index i lies at position i + d, reads true slots up to i and those of its own line, and predicts
position i + d + 1. In training every index starts such a line, which is the mask of the
training-time test again, and from depth to depth fewer lines go on. Source: P-EAGLE (2026), with
its conditional drop-token (COD) sampling.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from drafters.alignment import slot_prediction, supervised
from drafters.base import Batch, Prediction
from drafters.errors import UserError
from drafters.growth import Growth
from drafters.layered import LayeredSession
from drafters.methods.eagle import EagleDrafter, EagleOptions
from drafters.parallel import ParallelGuesser, check_levels
from drafters.placement import Placement
from drafters.registry import register
from drafters.session import CachedSession, Final
from drafters.shape import TargetShape
from drafters.target import Target
from drafters.unrolled import Documents, UnrolledAttention


@dataclass
class PeagleOptions(EagleOptions):
    """Options of `peagle` beside those of EagleOptions; `unroll` is how many depths are guessed.

    Args:
        layers: decoder layers of the drafter.
        keep: share of the lines that go on from a depth to the next in training.
        keep_least: share of all lines that every depth keeps.
    """

    layers: int = 4
    keep: float = 0.7
    keep_least: float = 0.2

    def __post_init__(self) -> None:
        """Check the shares."""
        super().__post_init__()
        if not (0 < self.keep <= 1 and 0 <= self.keep_least <= 1):
            raise UserError(
                f"keep is {self.keep}, keep_least {self.keep_least}: give shares from 0 to 1"
            )


@register
class PeagleDrafter(EagleDrafter):
    """P-EAGLE for one target.

    Args:
        config: resolved options.
        shape: of the target.
    """

    name: ClassVar[str] = "peagle"
    schema = PeagleOptions

    def __init__(self, config: PeagleOptions, shape: TargetShape) -> None:
        """Make untrained weights."""
        super().__init__(config, shape)
        self.keep, self.keep_least = config.keep, config.keep_least
        self.unknown_taps = nn.Parameter(torch.randn(self.fusion.in_features))
        self.unknown_token = nn.Parameter(torch.randn(shape.hidden_size))

    @torch.no_grad()
    def init_from(self, target: Target) -> None:
        """Start as EAGLE-3 does; the unknown token is the mean of all."""
        super().init_from(target)
        every = torch.arange(self.shape.vocab_size, device=target.device)
        self.unknown_token.copy_(target.embed(every).float().mean(0))

    def predict(self, batch: Batch, target: Target) -> list[Prediction]:
        """Let a line of slots start at every index; while training, not all go on to the end."""
        maps = self.parts(target)
        state = self.true_features(batch, maps)
        rows, length = batch.ids.shape
        documents = Documents(batch.document)
        attention = [UnrolledAttention(documents) for _ in self.layers]
        slots = torch.arange(length, device=batch.ids.device).expand(rows, length)
        embedding = target.embed(batch.ids.roll(-1, 1)).to(state.dtype)
        unknown = maps.fuse(self.unknown_taps).to(state.dtype)
        lines: list[Tensor | None] = [None, *self._lines(batch)]
        predictions = []
        for depth, among in enumerate(lines):
            if among is not None:
                places = _first(among.gather(1, slots))
                slots = slots.gather(1, places)
                for layer in attention:
                    layer.narrow(places)
                state = unknown.expand(*slots.shape, -1)
                embedding = self.unknown_token.expand(*slots.shape, -1)
            rotary = self.rotary(batch.position.gather(1, slots) + depth, state.dtype)
            out = maps.advance(state, embedding, rotary, attention)
            predictions.append(slot_prediction(batch, slots, depth, out, maps.logits, among=among))
        return predictions

    def _lines(self, batch: Batch) -> list[Tensor]:
        """Return which indices' lines reach depths 1, 2, .. [B, T] bool, each within the last.

        A line goes on while labels follow. In training a share of them is drawn besides.
        """
        labels = torch.stack([supervised(batch, depth + 2) for depth in range(self.config.unroll)])
        count = labels[0].sum(1, keepdim=True)
        draw = torch.zeros(batch.ids.shape)
        if self.training:  # on the CPU, whose generator a run keeps: a resumed run draws the same
            draw = torch.rand(batch.ids.shape)
        draw = draw.to(count.device)
        going = torch.ones_like(labels[0])
        lines: list[Tensor] = []
        for depth in range(1, self.config.unroll):
            going = going & labels[depth:].any(0)
            if self.training:
                share = max(self.keep**depth, self.keep_least)
                order = draw.where(going, -1.0).argsort(dim=1, descending=True)
                rank = order.argsort(dim=1)
                going = going & (rank < (share * count).ceil())
            lines.append(going)
        return lines

    def start(self, target: Target, growth: Growth, rows: int, capacity: int) -> CachedSession:
        """Start a decoding session on a frozen copy of the weights.

        Raises:
            UserError: if the growth asks for more levels than are guessed.
        """
        check_levels(growth, self.config.unroll, "depths")
        return PeagleSession(self, target, growth, rows, capacity)


def _first(chosen: Tensor) -> Tensor:
    """Return the places [B, T'] of what is chosen [B, T] bool, ascending, filled up with others."""
    width = max(1, int(chosen.sum(1).max()))
    return chosen.byte().argsort(dim=1, descending=True, stable=True)[:, :width]


class PeagleSession(LayeredSession):
    """Rows whose guesses run together with the tokens that became final.

    Args:
        drafter: its weights are copied; later training does not reach the session.
        target: gives embeddings, dtype and device.
        growth: the shape of the trees.
        rows: batch size.
        capacity: tokens a row may hold.
    """

    def __init__(
        self, drafter: PeagleDrafter, target: Target, growth: Growth, rows: int, capacity: int
    ) -> None:
        """Pack the weights and allocate the cache."""
        self.maps, ahead = drafter.frozen(target), growth.depth - 1
        sizes = {"layers": len(self.maps.layers), "guesses": ahead, "ahead": ahead}
        super().__init__(drafter, target, growth, rows, capacity, **sizes)
        self.unknown_taps = drafter.unknown_taps.detach().to(target.dtype, copy=True)
        self.unknown_token = drafter.unknown_token.detach().to(target.dtype, copy=True)
        size = growth.depth, rows, len(drafter.vocabulary)
        self.marginals = torch.zeros(size, dtype=target.dtype, device=target.device)

    def encode(self, final: Final, placement: Placement, ends: Tensor, rows: list[int]) -> None:
        """Run true slots and, behind a row's last, the unknown ones; keep the laws of these."""
        assert final.features is not None
        known, reached = _known(placement, ends, rows, self.ahead)
        count = len(known)
        taps = self.unknown_taps.repeat(count, 1)
        taps[known] = final.features
        embedding = self.unknown_token.repeat(count, 1)
        embedding[known] = self.embed(final.tokens)
        rotary, attention = self.rotary(placement), self.attention(placement)
        states = self.maps.advance(self.maps.fuse(taps), embedding, rotary, attention)
        if reached:
            stops = torch.tensor(list(reached.values()), device=states.device)
            first = torch.arange(-self.growth.depth, 0, device=states.device)
            wanted = states[(stops + first[:, None]).flatten()]
            laws = self.maps.logits(wanted).view(len(first), len(stops), -1)
            self.marginals[:, list(reached)] = laws

    def guesser(self, rows: list[int]) -> ParallelGuesser:
        """Look up what was guessed behind the rows' last tokens."""
        return ParallelGuesser(self.marginals[:, rows], self.ids)


def _known(
    placement: Placement, ends: Tensor, rows: Sequence[int], ahead: int
) -> tuple[Tensor, dict[int, int]]:
    """Return which placed slots are true [M] bool, and behind which slot each ended row ends."""
    finals = ends.diff(prepend=ends.new_tensor([-1])).tolist()
    known: list[bool] = []
    reached: dict[int, int] = {}
    for row, final in zip(rows, finals, strict=True):
        total = placement.counts[row]
        known += [place < final for place in range(total)]
        if total == final + ahead:
            reached[row] = len(known)
    return torch.tensor(known), reached
