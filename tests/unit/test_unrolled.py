"""Attention of the training-time test against the dense mask it stands for."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from drafters.unrolled import Documents, UnrolledAttention

ROOT = Path(__file__).parents[2]


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
    rows, length, dim, steps = 3, 9, 8, 4
    document = torch.tensor([[0] * 9, [1] * 4 + [2] * 3 + [-1] * 2, [-1] * 3 + [4] * 6])
    real = (document >= 0)[..., None]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    visible = (document[:, :, None] == document[:, None, :]) & causal

    def tensors(count: int) -> list[Tensor]:
        return [
            torch.randn(rows, length, count, dim, requires_grad=True, dtype=torch.float64)
            for _ in range(steps)
        ]

    queries, keys, values = tensors(heads), tensors(kv_heads), tensors(kv_heads)
    expected = dense(queries, keys, values, visible)
    attention = UnrolledAttention(Documents(document))
    outs = [attention(*step) for step in zip(queries, keys, values, strict=True)]
    weights = [torch.randn_like(out) * real for out in outs]
    for out, wanted in zip(outs, expected, strict=True):
        torch.testing.assert_close(out * real, wanted * real)
    leaves = queries + keys + values
    ours = torch.autograd.grad(
        sum((o * w).sum() for o, w in zip(outs, weights, strict=True)), leaves
    )
    wanted = torch.autograd.grad(
        sum((o * w).sum() for o, w in zip(expected, weights, strict=True)), leaves
    )
    for mine, theirs in zip(ours, wanted, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("document", [[0] * 6, [0, 0, 1, 1, 1, 1], [-1, 0, 0, 0, 0, 0]], ids=str)
def test_narrowing_to_some_tokens_changes_nothing_for_them(document: list[int]) -> None:
    documents = Documents(torch.tensor([document]))
    q, k, v = (torch.randn(3, 1, 6, 2, 4) for _ in range(3))
    whole, part = UnrolledAttention(documents), UnrolledAttention(documents)
    slots = torch.tensor([[1, 5, 2]])
    assert torch.equal(whole(q[0], k[0], v[0]), part(q[0], k[0], v[0]))
    part.narrow(slots)
    for step in (1, 2):
        narrow = part(q[step][:, slots[0]], k[step][:, slots[0]], v[step][:, slots[0]])
        torch.testing.assert_close(narrow, whole(q[step], k[step], v[step])[:, slots[0]])


def test_narrowing_again_goes_on_with_some_of_the_rest() -> None:
    """Own keys of earlier steps stay with their tokens."""
    documents = Documents(torch.zeros(2, 6, dtype=torch.int64))
    steps = [[torch.randn(2, 6, heads, 4) for heads in (4, 2, 2)] for _ in range(4)]
    whole, part = UnrolledAttention(documents), UnrolledAttention(documents)
    slots = torch.arange(6).expand(2, 6)
    picks = [None, [[0, 4, 2, 5], [1, 2, 3, 0]], [[2, 0], [3, 1]], [[1], [0]]]
    for step, pick in zip(steps, picks, strict=True):
        if pick is not None:
            places = torch.tensor(pick)
            slots = slots.gather(1, places)
            part.narrow(places)
        index = slots[..., None]
        narrow = part(*(x.gather(1, index[..., None].expand(-1, -1, *x.shape[2:])) for x in step))
        wide = whole(*step)
        torch.testing.assert_close(narrow, wide.gather(1, index.expand(-1, -1, wide.shape[-1])))


def test_documents_become_rows_and_come_back() -> None:
    document = torch.tensor([[0, 0, 0, 1, 1], [-1, 2, 2, -1, -1], [3, 3, 3, 3, 3]])
    documents = Documents(document)
    tokens = torch.arange(15).view(3, 5)
    rows = documents.split(tokens)
    assert [row[:n].tolist() for row, n in zip(rows, (3, 2, 2, 5), strict=True)] == [
        [0, 1, 2],
        [3, 4],
        [6, 7],
        [10, 11, 12, 13, 14],
    ]
    assert torch.equal(documents.join(rows), tokens * (document >= 0))
    plain = Documents(torch.tensor([[0, 0, 0], [1, 1, -1]]))
    assert plain.source is None
    assert torch.equal(plain.split(tokens), tokens)


_PROBE = """
import resource, sys, torch
from drafters.unrolled import Documents, UnrolledAttention
torch.set_num_threads(1)
length, steps = int(sys.argv[1]), int(sys.argv[2])
attention = UnrolledAttention(Documents(torch.zeros(1, length, dtype=torch.int64)))
q, k, v = (torch.randn(1, length, h, 8, requires_grad=True) for h in (4, 2, 2))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
sum(attention(q, k, v).sum() for _ in range(steps)).backward()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 3, 7])
def test_memory_is_linear_in_the_length(steps: int) -> None:
    """At 8192 tokens one matrix [T, T] of one head would take 256 MiB alone."""
    used = []
    for length in (2048, 8192):
        command = [sys.executable, "-c", _PROBE, str(length), str(steps)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
        used.append(int(done.stdout) / 1024)
    assert used[1] < 192
    assert used[1] < 6 * used[0] + 16
