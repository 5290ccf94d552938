"""Attention of the training-time test against the dense mask it stands for."""

import pytest
import torch
from torch import Tensor

from drafters.unrolled import UnrolledAttention


def dense(
    queries: list[Tensor], keys: list[Tensor], values: list[Tensor], visible: Tensor
) -> list[Tensor]:
    """Attend step by step with the explicit mask [visible | I | .. | I]."""
    rows, length, heads, dim = queries[0].shape
    groups = heads // keys[0].shape[2]
    outs = []
    for step, query in enumerate(queries):
        k = torch.cat(keys[: step + 1], 1).repeat_interleave(groups, 2)
        v = torch.cat(values[: step + 1], 1).repeat_interleave(groups, 2)
        own = torch.eye(length, dtype=torch.bool).expand(rows, length, length)
        mask = torch.cat([visible] + [own] * step, -1)
        scores = torch.einsum("bthd,bshd->bhts", query, k) * dim**-0.5
        law = scores.masked_fill(~mask[:, None], -torch.inf).softmax(-1)
        outs.append(torch.einsum("bhts,bshd->bthd", law, v).flatten(2))
    return outs


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (3, 1)])
def test_every_step_equals_the_dense_mask_with_gradients(heads: int, kv_heads: int) -> None:
    rows, length, dim, steps = 2, 9, 8, 4
    document = torch.tensor([[0] * 9, [1] * 4 + [2] * 3 + [-1] * 2])
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    visible = (document[:, :, None] == document[:, None, :]) & causal

    def tensors(count: int) -> list[Tensor]:
        return [
            torch.randn(rows, length, count, dim, requires_grad=True, dtype=torch.float64)
            for _ in range(steps)
        ]

    queries, keys, values = tensors(heads), tensors(kv_heads), tensors(kv_heads)
    expected = dense(queries, keys, values, visible)
    attention = UnrolledAttention(visible)
    outs = [attention(*step) for step in zip(queries, keys, values, strict=True)]
    weights = [torch.randn_like(out) for out in outs]
    for out, wanted in zip(outs, expected, strict=True):
        torch.testing.assert_close(out, wanted)
    leaves = queries + keys + values
    ours = torch.autograd.grad(
        sum((o * w).sum() for o, w in zip(outs, weights, strict=True)), leaves
    )
    wanted = torch.autograd.grad(
        sum((o * w).sum() for o, w in zip(expected, weights, strict=True)), leaves
    )
    for mine, theirs in zip(ours, wanted, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_narrowing_to_some_tokens_changes_nothing_for_them() -> None:
    visible = torch.ones(1, 6, 6, dtype=torch.bool).tril()
    q, k, v = (torch.randn(3, 1, 6, 2, 4) for _ in range(3))
    whole, part = UnrolledAttention(visible), UnrolledAttention(visible)
    slots = torch.tensor([[1, 2, 5]])
    assert torch.equal(whole(q[0], k[0], v[0]), part(q[0], k[0], v[0]))
    part.narrow(slots)
    for step in (1, 2):
        narrow = part(q[step][:, slots[0]], k[step][:, slots[0]], v[step][:, slots[0]])
        torch.testing.assert_close(narrow, whole(q[step], k[step], v[step])[:, slots[0]])
