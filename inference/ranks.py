"""Ranks: how often the token of each rank is right, depth by depth, on what the target writes.

The drafter's training-time predictions say it: at every depth the true tokens before it are known,
so one pass over a text that the target wrote judges all depths of all positions. What is measured
is what a tree's search needs (drafters/growth/ranks.py).
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from drafters.base import Batch, Drafter, NeuralDrafter
from drafters.errors import UserError
from drafters.growth import Chain
from drafters.sampling import Warp
from drafters.target import Target
from drafters.vocab import place_of
from inference.generate import Generation
from inference.sampling import Sampling


def rank_accuracies(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    ranks: int,
    *,
    max_new_tokens: int = 128,
    warp: Warp | None = None,
    seed: int = 0,
    each: Callable[[], None] = lambda: None,
) -> list[list[float]]:
    """Let the target answer prompts and count at which rank the drafter has its tokens.

    Args:
        target: writes.
        drafter: guesses; its trained depths are judged.
        prompts: token ids.
        ranks: how many ranks are told apart; what is below them counts as wrong.
        max_new_tokens: at most this many a prompt.
        warp: how the target's tokens are drawn; None: greedy.
        seed: of drawn tokens.
        each: called after every prompt.

    Returns:
        [depths][ranks] shares of all positions that a depth guesses.

    Raises:
        UserError: if the drafter guesses by no law of its own, or nothing was long enough to tell.
    """
    if not isinstance(drafter, NeuralDrafter):
        raise UserError(f"drafter {drafter.name} has no trained depths to judge: give one that has")
    hits = list[Tensor]()
    totals = list[int]()
    sampling = Sampling(max_new_tokens, warp or Warp(), seed)
    for prompt in prompts:
        run = Generation(target, drafter, [prompt], growth=Chain(1), sampling=sampling, rows=1)
        answer = [token for _, commit in run for token in commit.emitted]
        batch = _batch(target, drafter, prompt, answer)
        for depth, (hit, total) in enumerate(_counted(drafter, batch, target, ranks)):
            if depth == len(hits):
                hits.append(torch.zeros(ranks, dtype=torch.int64))
                totals.append(0)
            hits[depth] += hit
            totals[depth] += total
        each()
    if not totals or not all(totals):
        raise UserError(
            f"answers of {max_new_tokens} tokens do not reach the drafter's {len(totals)} depths: "
            "give longer ones or more prompts"
        )
    return [(hit / total).tolist() for hit, total in zip(hits, totals, strict=True)]


def _batch(
    target: Target, drafter: NeuralDrafter, prompt: Sequence[int], answer: Sequence[int]
) -> Batch:
    """Return one text; the answer's tokens but the first, which no round drafts, are judged."""
    ids = torch.tensor([[*prompt, *answer]], device=target.device)
    document = torch.zeros_like(ids)
    position = torch.arange(ids.shape[1], device=target.device)[None]
    taps, last = target.forward_batch(ids, document, position, drafter.features)
    return Batch(ids, position > len(prompt), document, position, taps, last)


@torch.no_grad()
def _counted(
    drafter: NeuralDrafter, batch: Batch, target: Target, ranks: int
) -> list[tuple[Tensor, int]]:
    """Return each depth's hits [ranks] and number of guesses."""
    found = list[tuple[Tensor, int]]()
    for guess in sorted(drafter.predict(batch, target), key=lambda p: p.depth):
        logits = guess.logits(slice(0, len(guess.positions)))
        label = batch.ids.flatten()[guess.positions + 1]
        ids, size = drafter.ids, logits.shape[-1]
        place = place_of(label, None if ids is None else ids.to(label.device), size)
        known = place < size
        rank = (logits[known] > logits[known].gather(-1, place[known][:, None])).sum(-1)
        hit = torch.bincount(rank, minlength=ranks)[:ranks].cpu()
        found.append((hit, len(guess.positions)))
    return found
