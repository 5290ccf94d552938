"""Correction: what the law of a slot becomes once the token before it is known.

Slots of one forward do not see each other's tokens. A small map from the token before mends that at
the cost of one lookup a node; families say what the map is.
"""

import torch
from torch import Tensor, nn

from drafters.calibration import sequential_temperatures
from drafters.frontier import Frontier
from drafters.vocab import place_of


class Correction(nn.Module):
    """A map that training and decoding share.

    Shapes broadcast: [m, ...] in training, [R, 1, ...] and tokens [R, F] in decoding.

    Args:
        confident: for how many slots it says how likely their drafts are accepted; 0: it does not.
    """

    temperature: Tensor | None

    def __init__(self, confident: int = 0) -> None:
        """Take confidence at its word until it is calibrated."""
        super().__init__()
        self.register_buffer("temperature", torch.ones(confident) if confident else None)

    def forward(self, unary: Tensor, state: Tensor, previous: Tensor) -> Tensor:
        """Return the corrected logits [..., K].

        Args:
            unary: [..., K] the slot's own logits.
            state: [..., D] its post-norm state.
            previous: [...] place of the token before among the K kept ids, K if it is not kept.
        """
        raise NotImplementedError

    def confidence(self, state: Tensor, previous: Tensor) -> Tensor | None:
        """Return the logit [...] of how likely the slot's draft is accepted; None: unknown."""

    def chance(self, depth: int, state: Tensor, previous: Tensor) -> Tensor | None:
        """Return how likely the draft of slot `depth` is accepted [...], as calibrated."""
        logit = self.confidence(state, previous)
        if logit is None or self.temperature is None:
            return None
        return (logit / self.temperature[depth]).sigmoid()

    @torch.no_grad()
    def calibrate(self, logits: Tensor, taken: Tensor) -> None:
        """Fit the temperatures to chains of confidence and acceptance [N, slots]."""
        if self.temperature is not None:
            self.temperature.copy_(sequential_temperatures(logits, taken))


class CorrectedGuesser:
    """One round of a drafter whose slots are corrected: a conditional law below every node.

    Args:
        correction: of the slots' laws.
        unary: [depths, R, K] the slots' own logits; the first is that of the token after each root.
        states: [depths, R, D] their post-norm states.
        roots: [R, 1] int64.
        ids: [K] the draft vocabulary; None: the target's own.
    """

    def __init__(
        self,
        correction: Correction,
        unary: Tensor,
        states: Tensor,
        roots: Tensor,
        ids: Tensor | None,
    ) -> None:
        """Start at the roots."""
        self.correction, self.unary, self.states, self.ids = correction, unary, states, ids
        self._ask(0, roots)

    def _ask(self, depth: int, tokens: Tensor) -> None:
        self._depth, self._previous = depth, place_of(tokens, self.ids, self.unary.shape[-1])

    def root_logits(self) -> Tensor:
        """Return the first depth's logits [R, K]."""
        return self._logits()[:, 0]

    def step(self, frontier: Frontier) -> Tensor:
        """Return the logits [R, F, K] after each frontier node."""
        self._ask(frontier.depth, frontier.tokens)
        return self._logits()

    def confidence(self) -> Tensor | None:
        """Return the chance [R, F] that a draft after each node asked for last is accepted."""
        state = self.states[self._depth][:, None]
        return self.correction.chance(self._depth, state, self._previous)

    def _logits(self) -> Tensor:
        unary, state = self.unary[self._depth], self.states[self._depth]
        return self.correction(unary[:, None], state[:, None], self._previous)
