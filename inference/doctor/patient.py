"""Patient: a target with a drafter, the texts they decoded, and training's view of these texts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from drafters.base import Batch, Commit, Drafter, Features, NeuralDrafter
from drafters.growth import Chain
from drafters.registry import build_drafter
from drafters.stored import StoredDrafter
from drafters.target import Target
from inference.generate import Generation, Output, generate
from inference.sampling import Sampling
from inference.served import Engine

_GAMMA = 4  # of drafters that do not say how deep they were trained


@dataclass(frozen=True)
class Proposal:
    """What was drafted in one round of a text: the index of its root, and the chain below it."""

    root: int
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Text:
    """One prompt and its answer, decoded greedily with the drafter.

    Args:
        ids: [n] prompt and answer.
        prompt: tokens of the prompt.
        plain: the answer of plain decoding.
        output: the answer with the drafter.
        proposals: round by round.
        taps, last: [m, ..] what the engine handed to the session of ids[:m]; None if it reads none.
    """

    ids: Tensor
    prompt: int
    plain: tuple[int, ...]
    output: Output
    proposals: tuple[Proposal, ...]
    taps: Tensor | None
    last: Tensor | None


@dataclass
class Patient:
    """What is examined.

    Args:
        target: decides.
        prompts: token ids.
        drafter: None until its folder was found loadable.
        stored: its folder; None: it has none of ours.
        new_tokens: decoded a prompt.
        template_options: what the chat template was given for these prompts.
        engine: somebody else's, which serves it; None: none is asked.
    """

    target: Target
    prompts: Sequence[Sequence[int]]
    drafter: Drafter | None = None
    stored: StoredDrafter | None = None
    new_tokens: int = 48
    template_options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    engine: Engine | None = None

    def load(self) -> None:
        """Load the stored drafter.

        Raises:
            UserError: what a load still refuses of tensors of the right shapes: ids.
        """
        if self.drafter is None:
            assert self.stored is not None
            self.drafter = self.stored.load().to(self.target.device)

    @property
    def neural(self) -> NeuralDrafter | None:
        """Return the drafter if it has weights of ours."""
        return self.drafter if isinstance(self.drafter, NeuralDrafter) else None

    @property
    def trained(self) -> Mapping[str, Any]:
        """Return what training stored beside the weights; may be empty."""
        return {} if self.stored is None else self.stored.training

    @cached_property
    def depth(self) -> int:
        """Return how deep the drafter drafts: as deep as it was trained, if it says."""
        if self.neural is None:
            return _GAMMA
        ids = torch.tensor([*self.prompts[0], *self.plain[0]])
        batch = self.batch(ids, len(self.prompts[0]), self.neural.features)
        found = max(p.depth for p in predict(self.neural, batch, self.target))
        return found if found > 1 else _GAMMA

    @cached_property
    def plain(self) -> list[list[int]]:
        """Return the greedy answers without a drafter."""
        none = build_drafter("none", {}, self.target.shape)
        assert not isinstance(none, NeuralDrafter)
        outputs = generate(self.target, none, self.prompts, max_new_tokens=self.new_tokens)
        return [output.ids for output in outputs]

    @cached_property
    def texts(self) -> list[Text]:
        """Decode every prompt greedily with the drafter, in chains."""
        assert self.drafter is not None
        run = Generation(
            self.target,
            self.drafter,
            self.prompts,
            growth=Chain(self.depth),
            sampling=Sampling(self.new_tokens),
        )
        commits: list[list[Commit]] = [[] for _ in self.prompts]
        for number, commit in run:
            commits[number].append(commit)
        return [
            _text(prompt, plain, output, made)
            for prompt, plain, output, made in zip(
                self.prompts, self.plain, run.outputs, commits, strict=True
            )
        ]

    def batch(self, ids: Tensor, prompt: int, features: Features) -> Batch:
        """Return a text as training sees it: its answer supervised, the target's true states."""
        row = ids[None].to(self.target.device)
        document, position = torch.zeros_like(row), torch.arange(len(ids), device=row.device)[None]
        taps, last = self.target.forward_batch(row, document, position, features)
        return Batch(row, position >= prompt, document, position, taps, last)

    @cached_property
    def tolerance(self) -> float:
        """Return what rounding may change of a logit, relative to the largest."""
        return 8 * max(float(torch.finfo(self.target.dtype).eps), 1e-4)


def predict(drafter: NeuralDrafter, batch: Batch, target: Target) -> "list[Predicted]":
    """Return what a drafter predicts in training on a batch of one row, depth by depth.

    Families that choose where to predict at random choose alike in every call.
    """
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return [
            Predicted(p.depth, p.positions.tolist(), p.logits(slice(0, len(p.positions))).float())
            for p in drafter.predict(batch, target)
        ]


class Predicted:
    """The logits of one depth by the position whose law they imitate."""

    def __init__(self, depth: int, positions: Sequence[int], logits: Tensor) -> None:
        """Index the rows of logits [M, K]."""
        self.depth, self.logits = depth, logits
        self.rows = {position: row for row, position in enumerate(positions)}

    def at(self, position: int) -> Tensor | None:
        """Return the logits [K] at a position, None where nothing was predicted."""
        row = self.rows.get(position)
        return None if row is None else self.logits[row]


def token_of(drafter: NeuralDrafter, logits: Tensor) -> int:
    """Return the target's token that draft logits [K] hold most likely."""
    best = int(logits.argmax())
    return best if drafter.ids is None else int(drafter.ids[best])


def _text(
    prompt: Sequence[int], plain: Sequence[int], output: Output, commits: Sequence[Commit]
) -> Text:
    proposals: list[Proposal] = []
    root = len(prompt)
    for commit in commits:
        if commit.tree is None:
            continue
        proposals.append(Proposal(root, tuple(commit.tree.token_list[1:])))
        root += len(commit.emitted)
    return Text(
        torch.tensor([*prompt, *output.ids]),
        len(prompt),
        tuple(plain),
        output,
        tuple(proposals),
        _joined([commit.taps for commit in commits]),
        _joined([commit.last for commit in commits]),
    )


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    known = [part for part in parts if part is not None]
    return torch.cat(known) if known else None
