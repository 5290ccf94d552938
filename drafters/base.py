"""The nouns that targets, drafters, engine and trainer share.

Features say what a drafter reads from the target; Batch and Prediction carry training; Commit,
Drafter and DraftSession carry decoding. No behaviour lives here.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Protocol, runtime_checkable

from torch import Tensor, nn

from drafters.errors import UserError
from drafters.sampling import RowRandom, Warp
from drafters.tree import TokenTree

if TYPE_CHECKING:
    from drafters.cache import KVCache
    from drafters.growth import Growth
    from drafters.target import Target, TargetShape


@dataclass(frozen=True)
class Features:
    """What a drafter reads from one target forward.

    Args:
        layers: raw outputs of these decoder layers (0-based, ascending); never the last entry of
            HF's hidden_states, which is post-norm.
        last: whether the post-norm state (the head's input) is wanted while decoding.
    """

    layers: tuple[int, ...] = ()
    last: bool = False


@dataclass(frozen=True)
class TargetOutput:
    """What one row gets from a target forward over n tokens.

    Args:
        logits: [n, V]; after prefill [1, V], the last position's.
        taps: [n, K * D] raw layer outputs, ascending by layer; None if no layer was asked for.
        last: [n, D] post-norm state; None if not asked for.
    """

    logits: Tensor
    taps: Tensor | None = None
    last: Tensor | None = None


@dataclass(frozen=True)
class Batch:
    """One training batch. Position t of row b carries token ids[b, t].

    States may be zero from a document's last label on: nothing that is learned can read them.

    Args:
        ids: [B, T] int64.
        label_mask: [B, T] bool; True where ids[b, t] itself is supervised (an answer's token).
        document: [B, T] int64; equal values belong together, -1 is padding.
        position: [B, T] int64; index inside the document.
        taps: [B, T, K * D] raw layer outputs, or None.
        last: [B, T, D] post-norm states: the teacher's law after token t is head(last[b, t]).
    """

    ids: Tensor
    label_mask: Tensor
    document: Tensor
    position: Tensor
    taps: Tensor | None
    last: Tensor


@dataclass(frozen=True)
class Prediction:
    """What a drafter predicts at one depth of a training batch.

    Args:
        positions: [M] int64, flat b * T + t: each imitates the target's law after token t, so its
            label is ids[t+1] and its mask label_mask[t+1], same document (design: one alignment).
        depth: 1 is the first drafted token.
        group: [M] int64; the chain or block each prediction belongs to.
        logits: called with a slice of the M predictions; returns [m, K] on the drafter's ids.
        auxiliary: further tensors [M, ...] a loss may read (confidence, hidden state).
    """

    positions: Tensor
    depth: int
    group: Tensor
    logits: Callable[[slice], Tensor]
    auxiliary: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])


@dataclass(frozen=True)
class Commit:
    """What became final for one row in one round, prefill included.

    Args:
        inputs: [m] int64 tokens that are now in the target's cache: the prompt, or the accepted
            path with the old root first.
        root: the new root. Emitted in a round: inputs[1:] + [root]; at prefill: [root].
        taps: [m, K * D] of `inputs`; None if the drafter reads no layer.
        last: [m, D] of `inputs`; None if the drafter does not read it.
        tree: the tree judged in this round; None for a prefill, which starts the row afresh.
        logits: [N+1, V] the target's logits over the tree; [1, V] at prefill.
        finished: why the row stops after this commit: "stop", "length", or None.
        emitted: the tokens this commit adds to the row's output, after the cut at a stop.
        path: the tree's nodes that `inputs` are, root first; empty at prefill.
    """

    inputs: Tensor
    root: int
    taps: Tensor | None = None
    last: Tensor | None = None
    tree: TokenTree | None = None
    logits: Tensor | None = None
    finished: str | None = None
    emitted: tuple[int, ...] = ()
    path: tuple[int, ...] = ()

    @property
    def accepted(self) -> int:
        """Return how many of the emitted tokens were drafted.

        All but the last are; the last is too where a stop cut the row at an accepted draft.
        """
        return len(self.path) - 1 + self._ends_at_draft if self.tree is not None else 0

    @property
    def attempted(self) -> int:
        """Return how many depths were judged: one is if the node above it was accepted."""
        if self.tree is None:
            return 0
        return len(self.path) - 1 + bool(self.tree.children[self.path[-1]])

    @property
    def _ends_at_draft(self) -> bool:
        # a correction never equals a refused sibling: the residual has no mass there
        assert self.tree is not None
        return self.tree.child(self.path[-1], self.root) is not None


class DraftSession(Protocol):
    """The state of the rows that one drafter drafts for."""

    features: Features

    def observe(self, commits: Sequence[Commit | None]) -> None:
        """Take in what became final, one entry a row; None: nothing new for that row.

        The session drops its own guesses and works on from the target's true features. A commit
        without a tree (prefill) starts its row afresh.
        """
        ...

    def propose(self, warp: Warp, random: Sequence[RowRandom | None]) -> list[TokenTree | None]:
        """Guess a tree for every row that has a generator; None for the others."""
        ...


@runtime_checkable
class ReadsCache(Protocol):
    """A session that reads what the target has cached."""

    def read_cache(self, cache: "KVCache") -> None:
        """Take the target's cache, before any row comes. It is never to be written to."""
        ...


class Drafter(Protocol):
    """Weights (or none) that can start sessions."""

    name: ClassVar[str]
    features: Features

    def options(self) -> Mapping[str, object]:
        """Return the resolved options: with them the registry builds one of the same sizes."""
        ...

    def start(self, target: "Target", growth: "Growth", rows: int, capacity: int) -> DraftSession:
        """Start a session for `rows` rows of at most `capacity` tokens each."""
        ...


@dataclass
class Account:
    """What one member of a joint drafter did, over all rows since its session began.

    Args:
        seconds: proposing and taking in what became final.
        rounds: in which it was asked for a row.
        drafted: nodes that it proposed, submitted or not.
        accepted: levels at which its own tree was right, whoever's node was submitted.
    """

    seconds: float = 0.0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0


@runtime_checkable
class JointSession(Protocol):
    """A session of several drafters, which keeps an account of each."""

    accounts: Sequence[Account]


@runtime_checkable
class JointDrafter(Protocol):
    """A drafter made of others: what each of them costs can be measured apart."""

    members: Sequence[Drafter]


class NeuralDrafter(nn.Module):
    """A drafter with trained weights. It never registers a tensor of the target's."""

    name: ClassVar[str]
    features: Features

    @classmethod
    @abstractmethod
    def build(cls, options: Mapping[str, object], shape: "TargetShape") -> "NeuralDrafter":
        """Make an untrained drafter for a target of this shape from its options.

        Raises:
            UserError: on an unknown option, a wrong type or a value this target cannot serve.
        """

    @classmethod
    def shipped(cls, target: "Target") -> "NeuralDrafter":
        """Return the one whose weights lie in the target's own folder.

        Raises:
            UserError: if there are none, or of a kind that the family cannot run.
        """
        raise UserError(
            f"drafter {cls.name}: no such folder, and not a drafter without weights; target "
            f"{target.name} ships none: give the folder that training or publishing wrote"
        )

    @classmethod
    def rebuild(cls, options: Mapping[str, object], shape: "TargetShape") -> "NeuralDrafter":
        """Make an untrained drafter from the options of a stored one; reads nothing beside them.

        Raises:
            UserError: as `build`, and on options that would send it to another file.
        """
        return cls.build(options, shape)

    @abstractmethod
    def options(self) -> dict[str, object]:
        """Return the resolved options: build(options(), shape) makes the same modules."""

    def completed(
        self, tensors: Mapping[str, Tensor], target: "Target | None"
    ) -> dict[str, Tensor]:
        """Return its stored tensors with what it reads from the target instead, for engines.

        Raises:
            UserError: if the target is needed and not given.
        """
        return dict(tensors)

    @abstractmethod
    def init_from(self, target: "Target") -> None:
        """Start the weights from the target's own where that helps."""

    @abstractmethod
    def predict(self, batch: Batch, target: "Target") -> list[Prediction]:
        """Predict every depth of a training batch."""

    def calibrate(self, confidence: Tensor, taken: Tensor) -> None:
        """Fit how the confidence of its predictions is read, if it predicts any.

        Args:
            confidence: [N, K] logits of N chains of all K depths.
            taken: [N, K] chance that each depth is accepted where those above were.
        """

    @abstractmethod
    def start(self, target: "Target", growth: "Growth", rows: int, capacity: int) -> DraftSession:
        """Start a decoding session."""

    @property
    def ids(self) -> Tensor | None:
        """Return the reduced draft vocabulary [K] int64 ascending, or None for the target's own."""
        return None
