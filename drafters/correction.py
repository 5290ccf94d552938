"""Correction: what the law of a slot becomes once the token before it is known.

Slots of one forward do not see each other's tokens. A small map from the token before mends that at
the cost of one lookup a node; families say what the map is.
"""

from torch import Tensor, nn


class Correction(nn.Module):
    """A map that training and decoding share.

    Shapes broadcast: [m, ...] in training, [R, 1, ...] and tokens [R, F] in decoding.
    """

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
