"""Attention of the training-time test: a drafter trained on its own guesses, all tokens at once.

At step 0 a token reads earlier tokens of its document. At step j it reads the same keys and, beside
them, the keys that it made itself at steps 1..j: the mask [causal | I | .. | I], which is what a
cache holds while decoding. Source: EAGLE-3 (Li et al. 2025, section 3.2).
"""

import torch
import torch.nn.functional as F
from torch import Tensor


class UnrolledAttention:
    """The keys and values of one layer over the steps of one batch.

    Args:
        visible: [B, T, T] bool; row t marks the tokens that token t reads at step 0.
    """

    def __init__(self, visible: Tensor) -> None:
        """Start before step 0."""
        self.visible = visible
        self.first: tuple[Tensor, Tensor] | None = None
        self.own: list[tuple[Tensor, Tensor]] = []

    def narrow(self, slots: Tensor) -> None:
        """Go on with the tokens `slots` [B, T'] alone, from step 1 on."""
        index = slots[..., None].expand(-1, -1, self.visible.shape[-1])
        self.visible = self.visible.gather(1, index)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend at the next step.

        Args:
            query: [B, T', H, hd].
            key: [B, T', Hkv, hd].
            value: [B, T', Hkv, hd].

        Returns:
            [B, T', H * hd].
        """
        if self.first is None:
            self.first = key, value
            return _attend(query, key, value, self.visible, query.shape[-1]).flatten(2)
        self.own.append((key, value))
        return self._with_own_keys(query, *self.first)

    def _with_own_keys(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attend to step 0's keys and to each token's own.

        An own key differs from token to token, which a shared list of keys cannot hold. Its score
        can: channel j of the widened queries carries it and a unit key in that channel picks it up.
        Unit values give back the weight that the joint softmax gave it. So any fused kernel serves,
        and no [T, T (J + 1)] matrix exists.
        """
        steps, dim, heads = len(self.own), query.shape[-1], keys.shape[2]
        own_keys = torch.stack([key for key, _ in self.own], 2)
        own_values = torch.stack([value for _, value in self.own], 2)
        grouped = query.unflatten(2, (heads, -1))
        scores = torch.einsum("bthgd,btjhd->bthgj", grouped, own_keys).flatten(2, 3)
        unit = F.pad(torch.eye(steps, dtype=keys.dtype, device=keys.device), (dim, 0))
        unit = unit[None, :, None].expand(len(keys), steps, heads, dim + steps)
        out = _attend(
            torch.cat((query, scores), -1),
            torch.cat((unit, F.pad(keys, (0, steps))), 1),
            torch.cat((unit.to(values.dtype), F.pad(values, (0, steps))), 1),
            F.pad(self.visible, (steps, 0), value=True),
            dim,
        )
        shared, weight = out.split((dim, steps), -1)
        weight = weight.unflatten(2, (heads, -1))
        own = torch.einsum("bthgj,btjhd->bthgd", weight, own_values)
        return (shared + own.flatten(2, 3)).flatten(2)


def _attend(query: Tensor, keys: Tensor, values: Tensor, visible: Tensor, dim: int) -> Tensor:
    """Return [B, T', H, width]; scores are scaled for heads of width `dim`."""
    out = F.scaled_dot_product_attention(
        query.transpose(1, 2),
        keys.transpose(1, 2),
        values.transpose(1, 2),
        attn_mask=visible[:, None],
        scale=dim**-0.5,
        enable_gqa=True,
    )
    return out.transpose(1, 2)
