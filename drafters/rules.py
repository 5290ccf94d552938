"""Rules: what a context does to the logits after it, node by node of a tree.

Penalties, biases, forbidden words and a constraint depend on the tokens before a node, its own path
in the tree included. Target and drafter are ruled alike, so that p and q mean the same thing; only
the target's rules make the output. Without rules nothing here runs.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral, Real

import torch
from torch import Tensor

from drafters.errors import UserError
from drafters.frontier import Frontier
from drafters.growth import Guesser
from drafters.sampling import Warp
from drafters.tree import TokenTree

Allowed = Callable[[Sequence[int]], Sequence[int]]


@dataclass(frozen=True)
class Context:
    """What one row has been given and has emitted.

    Args:
        ids: prompt and output, the root last; the engine's own list, which grows.
        prompt: how many of them were given.
        ends: ids that end an output: what follows one is never emitted, so no rule is asked.
    """

    ids: Sequence[int]
    prompt: int
    ends: frozenset[int]


@dataclass(frozen=True)
class Rules:
    """How the tokens before a position change its logits, in the order of Hugging Face's generate.

    Args:
        logit_bias: added to the last token of a sequence that the context has begun (HF's
            sequence_bias); a sequence of one token always counts.
        repetition_penalty: above 1 makes tokens of prompt and output less likely: positive logits
            are divided by it, negative ones multiplied.
        presence_penalty: subtracted from the logit of every token of the output.
        frequency_penalty: subtracted as often as the token stands in the output.
        bad_words: sequences that are never completed; one that is an ending token is ignored.
        allowed: called with the context, returns the ids that may follow. It is asked about every
            drafted path that it allowed itself, so each of those needs at least one id. HF's
            prefix_allowed_tokens_fn f is `lambda ids: f(0, torch.tensor(ids))`.

    Raises:
        UserError: if a value is out of range.
    """

    logit_bias: Mapping[tuple[int, ...], float] = field(
        default_factory=dict[tuple[int, ...], float]
    )
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bad_words: Sequence[Sequence[int]] = ()
    allowed: Allowed | None = None

    def __post_init__(self) -> None:
        """Check the values."""
        for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
            if not isinstance(getattr(self, name), Real):
                raise UserError(f"{name} is {getattr(self, name)!r}: give a number")
        if not 0 < self.repetition_penalty < math.inf:
            raise UserError(
                f"repetition_penalty is {self.repetition_penalty}: give more than 0; 1 is off"
            )
        for name in ("presence_penalty", "frequency_penalty"):
            if not math.isfinite(getattr(self, name)):
                raise UserError(f"{name} is {getattr(self, name)}: give a finite number; 0 is off")
        if not isinstance(self.logit_bias, Mapping):
            raise UserError(f"logit_bias is {self.logit_bias!r}: give {{(id, ...): bias}}")
        for bias in self.logit_bias.values():
            if not isinstance(bias, Real) or not bias < math.inf:  # NaN is not below it either
                raise UserError(f"logit_bias holds {bias!r}: give a number; -inf forbids the token")
        if not isinstance(self.bad_words, Sequence):
            raise UserError(f"bad_words is {self.bad_words!r}: give a list of sequences of ids")
        for name, sequences in (("logit_bias", self.logit_bias), ("bad_words", self.bad_words)):
            for sequence in sequences:
                _check_sequence(name, sequence)
        if self.allowed is not None and not callable(self.allowed):
            raise UserError(f"allowed is {self.allowed!r}: give a function of the ids so far")

    def check(self, vocab_size: int) -> None:
        """Refuse ids that the target does not have.

        Raises:
            UserError: names the option and the id.
        """
        for name, sequences in (("logit_bias", self.logit_bias), ("bad_words", self.bad_words)):
            for token in (token for sequence in sequences for token in sequence):
                if not 0 <= token < vocab_size:
                    raise UserError(f"{name} holds id {token}: give 0 to {vocab_size - 1}")

    def report(self) -> dict[str, object]:
        """Return what is not at its default, as plain values; of a constraint that there is one."""
        blank = Rules()
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        found = {name: value for name, value in found.items() if value != getattr(blank, name)}
        if self.logit_bias:
            found["logit_bias"] = [[list(ids), bias] for ids, bias in self.logit_bias.items()]
        if self.allowed is not None:
            found["allowed"] = True
        return found

    def over(self, tree: TokenTree, logits: Tensor, context: Context) -> Tensor:
        """Return the target's ruled logits [N+1, V] float32 over a tree.

        Raises:
            UserError: if no token is left after a path that the rules themselves allow.
        """
        nodes: list[Node] = []
        for parent, token in zip(tree.parent_list, tree.token_list, strict=True):
            node = Node(self, context) if parent < 0 else nodes[parent].child(token)
            node.rule(logits[len(nodes)], None)
            if node.stuck:
                tail = [*context.ids, *node.path][-8:]
                raise UserError(f"the rules leave no token after {tail}: let them allow one")
            nodes.append(node)
        return torch.stack([node.logits for node in nodes])

    def apply(self, scores: Tensor, context: Context, path: Sequence[int]) -> Tensor:
        """Return ruled scores [V] float32 after a context and a path; may be -inf throughout.

        Of a vocabulary cut short, tokens beyond V are left out.
        """
        size, before = len(scores), [*context.ids, *path]
        bias = torch.zeros_like(scores)
        for sequence, value in self.logit_bias.items():
            if sequence[-1] < size and _begun(before, sequence):
                bias[sequence[-1]] += value
        scores = scores + bias
        if self.repetition_penalty != 1:
            seen = torch.tensor(sorted({t for t in before if t < size}), device=scores.device)
            old, penalty = scores[seen], self.repetition_penalty
            scores[seen] = torch.where(old < 0, old * penalty, old / penalty)
        if self.presence_penalty or self.frequency_penalty:
            for token, count in Counter(before[context.prompt :]).items():
                if token < size:
                    scores[token] -= self.presence_penalty + self.frequency_penalty * count
        for word in self.bad_words:
            ending = len(word) == 1 and word[0] in context.ends
            if word[-1] < size and not ending and _begun(before, word):
                scores[word[-1]] = -torch.inf
        return scores if self.allowed is None else _constrain(scores, self.allowed(before))


def _check_sequence(name: str, sequence: object) -> None:
    if isinstance(sequence, str) or not isinstance(sequence, Sequence):
        raise UserError(f"{name} holds {sequence!r}: give a sequence of ids, of one token (id,)")
    if not sequence:
        raise UserError(f"{name} holds an empty sequence: give at least one id in each")
    if not all(isinstance(token, Integral) for token in sequence):
        raise UserError(f"{name} holds {sequence!r}: give token ids")


def _begun(before: Sequence[int], sequence: Sequence[int]) -> bool:
    """Tell whether a sequence lacks only its last token."""
    prefix = list(sequence[:-1])
    return len(before) >= len(prefix) and list(before[len(before) - len(prefix) :]) == prefix


def _constrain(scores: Tensor, allowed: Sequence[int]) -> Tensor:
    mask = torch.full_like(scores, -torch.inf)
    ids = [token for token in allowed if 0 <= token < len(scores)]
    mask[torch.tensor(ids, dtype=torch.int64)] = 0.0
    kept = scores + mask
    # as HF does: where other rules forbid all that is allowed, the constraint wins
    return mask if bool(kept.isneginf().all()) else kept


class Node:
    """One path below a context, and the ruled logits after it.

    Paths that the rules forbid, or that have ended, are closed: nothing asks about them.
    """

    def __init__(self, rules: Rules, context: Context, path: tuple[int, ...] = ()) -> None:
        """Start open."""
        self.rules, self.context, self.path = rules, context, path
        self.open, self.stuck = True, False
        self.logits = torch.empty(0)
        self.ids: Tensor | None = None

    def rule(self, logits: Tensor, ids: Tensor | None) -> None:
        """Take logits [K] on these ids; where the rules leave nothing, they stay as they are."""
        self.logits, self.ids = logits.float(), ids
        if not self.open:
            return
        scores = self.logits
        if ids is not None:
            scores = scores.new_full((int(ids.max()) + 1,), -torch.inf)
            scores[ids] = self.logits
        ruled = self.rules.apply(scores, self.context, self.path)
        ruled = ruled if ids is None else ruled[ids]
        self.stuck = bool(ruled.isneginf().all())
        if not self.stuck:
            self.logits = ruled

    def child(self, token: int) -> "Node":
        """Return the node of a token after this one."""
        node = Node(self.rules, self.context, (*self.path, token))
        node.open = self.open and token not in self.context.ends and self._allows(token)
        return node

    def _allows(self, token: int) -> bool:
        score = self.logits[token] if self.ids is None else self.logits[self.ids == token].sum()
        return not self.stuck and float(score) > -torch.inf


class RuledGuesser:
    """A guesser whose logits are ruled, each node's by its own path: growth notices nothing.

    Args:
        guesser: gives the logits.
        rules: change them.
        contexts: of its rows.
    """

    def __init__(self, guesser: Guesser, rules: Rules, contexts: Sequence[Context]) -> None:
        """Start at the roots."""
        self.guesser = guesser
        self.nodes = [[Node(rules, context)] for context in contexts]

    @property
    def ids(self) -> Tensor | None:
        """Return the draft vocabulary."""
        return self.guesser.ids

    def root_logits(self) -> Tensor:
        """Return the ruled logits [R, K] after each root."""
        return self._ruled(self.guesser.root_logits()[:, None])[:, 0]

    def step(self, frontier: Frontier) -> Tensor:
        """Return the ruled logits [R, F, K] after each frontier node."""
        logits = self.guesser.step(frontier)
        tokens, parents = frontier.tokens.tolist(), frontier.parent.tolist()
        self.nodes = [
            [above[parent].child(token) for token, parent in zip(*row, strict=True)]
            for above, *row in zip(self.nodes, tokens, parents, strict=True)
        ]
        return self._ruled(logits)

    def _ruled(self, logits: Tensor) -> Tensor:
        for row, nodes in zip(logits, self.nodes, strict=True):
            for scores, node in zip(row, nodes, strict=True):
                node.rule(scores, self.ids)
        return torch.stack([torch.stack([node.logits for node in row]) for row in self.nodes])


@dataclass(frozen=True)
class GuidedWarp(Warp):
    """A warp with rules in one round: it knows the context of every row.

    Args:
        contexts: one a row of the batch; None where no row runs.
    """

    contexts: Sequence[Context | None] = ()

    @classmethod
    def of(cls, warp: Warp, contexts: Sequence[Context | None]) -> "GuidedWarp":
        """Return the warp with these contexts."""
        return cls(**{f.name: getattr(warp, f.name) for f in fields(Warp)}, contexts=contexts)

    def guide(self, guesser: Guesser, rows: Sequence[int]) -> Guesser:
        """Return the guesser with its logits ruled by the contexts of these rows."""
        assert self.rules is not None
        contexts = [self.contexts[row] for row in rows]
        return RuledGuesser(guesser, self.rules, [c for c in contexts if c is not None])
