"""generate and stream: prompts in, text out, through the engine.

More prompts than rows are served as rows come free; a prompt's output depends on its own seed and
number alone, not on which rows run beside it.
"""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import index

from drafters.base import Commit, Drafter
from drafters.errors import UserError
from drafters.growth import Chain, Growth
from drafters.growth.base import check_at_least
from drafters.rules import Rules
from drafters.sampling import RowRandom, Warp
from drafters.target import Target
from inference.clock import Clock
from inference.costs import Load
from inference.engine import Decoder, Request
from inference.feed import Feed
from inference.modes import tree_mode
from inference.pricing import priced
from inference.prompts import text_ids
from inference.sampling import Sampling, several
from inference.stop import Stop

_ROWS = 8  # rows decoded together unless the caller says otherwise


@dataclass
class Output:
    """What one prompt produced.

    Args:
        ids: emitted tokens, an ending token included.
        finish_reason: "stop" (an ending token or string) or "length".
        accepted, attempted, drafted: per round, the prefill apart: drafted tokens emitted, depths
            judged, nodes drafted. The raw material of alpha and tau.
        draft_modes: how the drafted tokens were chosen; see inference.modes.
        text: the ids decoded; empty without a tokenizer.
        scores: per token, in nats: the log of its probability in the target's own law, before
            warping, whoever drafted it; empty unless asked for.
    """

    ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    accepted: list[int] = field(default_factory=list)
    attempted: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    draft_modes: set[str] = field(default_factory=set)
    text: str = ""
    scores: list[float] = field(default_factory=list)

    @property
    def rounds(self) -> int:
        """Return the number of rounds; the prefill is not one."""
        return len(self.accepted)

    @property
    def tau(self) -> float:
        """Return emitted tokens a round, bonus included, prefill's token excluded."""
        return (len(self.ids) - 1) / self.rounds if self.rounds else 0.0

    def add(self, commit: Commit) -> None:
        """Take in one commit."""
        self.ids.extend(commit.emitted)
        self.finish_reason = commit.finished
        if commit.tree is not None:
            self.accepted.append(commit.accepted)
            self.attempted.append(commit.attempted)
            self.drafted.append(commit.tree.drafted)
            if commit.tree.drafted:
                self.draft_modes.add(tree_mode(commit.tree))


class Generation:
    """A run over prompts: iterate it for commits as they come, then read `outputs`.

    Args:
        target, drafter, growth: who decides, who proposes, in what shape (None: a chain of 4).
        prompts: token ids, or texts for the target's tokenizer.
        sampling: how outputs are drawn.
        rows: how many prompts decode together.
        verify: name of the verifier; None: the default of what the growth drafts.

    Raises:
        UserError: if a prompt cannot be served or the verifier may not judge what the growth
            drafts; before any model work.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        prompts: Sequence[Sequence[int] | str],
        *,
        growth: Growth | None = None,
        sampling: Sampling | None = None,
        rows: int | None = None,
        verify: str | None = None,
    ) -> None:
        """Check the prompts and allocate the engine."""
        if not isinstance(target, Target):
            raise UserError(f"target is {target!r}: give what Target.load made")
        if not hasattr(drafter, "start") or isinstance(drafter, type):
            raise UserError(f"drafter is {drafter!r}: give what load_drafter or build_drafter made")
        if not isinstance(growth, Growth | None) or isinstance(growth, type):
            raise UserError(
                f"growth is {growth!r}: give drafters.growth.Chain(4), or another there"
            )
        self.target = target
        self.sampling = sampling or Sampling()
        if rows is not None:
            check_at_least(rows, 1, "rows")
        if isinstance(prompts, str):  # a sequence of texts too, of one character each
            raise UserError("prompts is one text: give a list of prompts, such as [text]")
        given = several("prompts", prompts, "a list of prompts, each a text or token ids")
        self.prompts = [_ids(target, prompt) for prompt in given]
        if not self.prompts:
            raise UserError("no prompts were given: give at least one")
        if self.sampling.stop_strings and target.tokenizer is None:
            raise UserError(f"{target.name} has no tokenizer to find stop_strings with: give ids")
        limit = target.shape.max_positions
        longest = max(len(prompt) for prompt in self.prompts)
        if longest >= limit:
            raise UserError(
                f"a prompt has {longest} tokens and the target's context holds {limit}: shorten it"
            )
        if longest + self.sampling.max_new_tokens > limit:
            warnings.warn(
                f"outputs end at the target's context of {limit} tokens, before max_new_tokens",
                stacklevel=2,
            )
        eos = self.sampling.eos_ids
        stop = Stop(
            target.eos_ids if eos is None else eos, self.sampling.stop_strings, target.tokenizer
        )
        load = Load(
            min(rows or _ROWS, len(self.prompts)), longest + self.sampling.max_new_tokens // 2
        )
        self.decoder = Decoder(
            target,
            drafter,
            priced(growth or Chain(), target, drafter, load, self.sampling.warp),
            rows=load.rows,
            capacity=longest + self.sampling.max_new_tokens,
            warp=self.sampling.warp,
            stop=stop,
            verify=verify,
        )
        self.outputs = [Output() for _ in self.prompts]
        self._feed = Feed(self.decoder, [self._request(n) for n in range(len(self.prompts))])

    @property
    def clock(self) -> Clock:
        """Return where the time went."""
        return self.decoder.clock

    def __iter__(self) -> Iterator[tuple[int, Commit]]:
        """Yield (number of the prompt, commit) as commits come."""
        for number, commit in self._feed:
            self.outputs[number].add(commit)
            if self.sampling.scores:
                self.outputs[number].scores += _scores(commit)
            yield number, commit

    def run(self) -> list[Output]:
        """Decode to the end; outputs in the order of the prompts, with their texts."""
        for _ in self:
            pass
        if self.target.tokenizer is not None:
            for output in self.outputs:
                output.text = self.target.tokenizer.decode(output.ids, skip_special_tokens=True)
        return self.outputs

    def _request(self, number: int) -> Request:
        coins = RowRandom(self.sampling.seed, number)
        return Request(self.prompts[number], self.sampling.max_new_tokens, coins)


def stream(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int] | str],
    *,
    growth: Growth | None = None,
    sampling: Sampling | None = None,
    rows: int | None = None,
    verify: str | None = None,
) -> Iterator[tuple[int, Commit]]:
    """Yield (number of the prompt, commit) round by round. Arguments as Generation's."""
    yield from Generation(
        target, drafter, prompts, growth=growth, sampling=sampling, rows=rows, verify=verify
    )


def generate(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int] | str],
    *,
    growth: Growth | None = None,
    rows: int | None = None,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    stop_strings: Sequence[str] = (),
    eos_ids: Sequence[int] | int | None = None,
    rules: Rules | None = None,
    verify: str | None = None,
    scores: bool = False,
) -> list[Output]:
    """Decode prompts to the end: exact in law, and greedy output identical in float32.

    Args:
        target: decides.
        drafter: proposes.
        prompts: token ids, or texts for the target's tokenizer (as they are, no chat template).
        growth: the shape of its trees; None: a chain of 4.
        rows: how many prompts decode together.
        max_new_tokens: at most this many tokens a prompt.
        temperature: 0 is greedy.
        top_k: see drafters.sampling.Warp, also for top_p and min_p.
        top_p: as above.
        min_p: as above.
        seed: prompt number i draws from its own streams of it.
        stop_strings: texts that end an output, or one.
        eos_ids: ids that end an output, or one; None: the target's own.
        rules: penalties, biases, forbidden words, a constraint; None: none.
        verify: name of the verifier; None: the default of what the growth drafts.
        scores: whether outputs carry the score of every token.

    Raises:
        UserError: if a value or prompt cannot be served; before any model work.
    """
    ends = None if eos_ids is None else _ends(eos_ids)
    sampling = Sampling(
        max_new_tokens=max_new_tokens,
        warp=Warp(temperature, top_k, top_p, min_p, rules),
        seed=seed,
        stop_strings=(stop_strings,)
        if isinstance(stop_strings, str)
        else several("stop_strings", stop_strings, "texts"),
        eos_ids=ends,
        scores=scores,
    )
    run = Generation(
        target, drafter, prompts, growth=growth, sampling=sampling, rows=rows, verify=verify
    )
    return run.run()


def _scores(commit: Commit) -> list[float]:
    """Return the log-probability of each emitted token after the node it follows."""
    assert commit.logits is not None
    nodes = list(commit.path) or [0]
    laws = commit.logits[nodes].float().log_softmax(-1)
    return laws[range(len(nodes)), list(commit.emitted)].tolist()


def _ends(eos_ids: Sequence[int] | int) -> frozenset[int]:
    given = [eos_ids] if isinstance(eos_ids, int) else eos_ids
    try:
        return frozenset(given)
    except TypeError:
        raise UserError(f"eos_ids is {eos_ids!r}: give token ids") from None


def _ids(target: Target, prompt: Sequence[int] | str) -> list[int]:
    if not isinstance(prompt, str):
        ids = _checked(prompt, target.shape.vocab_size)
    elif target.tokenizer is None:
        raise UserError("a prompt is text but the target has no tokenizer: give token ids")
    else:
        ids = text_ids(target, prompt)
    if not ids:
        raise UserError("a prompt has no tokens: give at least one")
    return ids


def _checked(prompt: Sequence[int], vocab_size: int) -> list[int]:
    try:
        ids = [index(token) for token in prompt]
    except TypeError:
        raise UserError(
            f"a prompt is of {type(prompt).__name__} and holds no token ids: give a text or a list "
            "of ids, of a chat those of inference.prompts.chat_ids(target, messages)"
        ) from None
    for token in ids:
        if not 0 <= token < vocab_size:
            raise UserError(f"a prompt holds id {token}: give 0 to {vocab_size - 1}")
    return ids
