"""The engine: rows that decode together, one round after the other.

A round: the session proposes trees, the target runs them over its cache, the verifier judges each
row with that row's own coins, what is final is cut at a stop and committed. Rows come and go;
nothing here knows which drafter proposes.
"""

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from drafters.base import Commit, Drafter, ReadsCache, TargetOutput
from drafters.errors import UserError
from drafters.growth import Growth
from drafters.laws import Laws
from drafters.rules import Context, GuidedWarp
from drafters.sampling import RowRandom, Warp
from drafters.target import Target
from drafters.tree import TokenTree
from inference.clock import Clock, now
from inference.contract import check_made_for, check_root, check_trees
from inference.modes import VERIFIERS, resolve
from inference.spoilt import check_finite, spoilt_rows, step_alone
from inference.stop import Stop


@dataclass(frozen=True)
class Request:
    """One sequence to decode.

    Args:
        prompt: [m] token ids, at least one.
        max_new_tokens: at least 1.
        random: the row's own coins.
    """

    prompt: Sequence[int]
    max_new_tokens: int
    random: RowRandom


@dataclass
class Row:
    """A running request."""

    random: RowRandom
    ids: list[int]
    room: int
    context: Context
    finished: str | None = None


class Decoder:
    """Rows of one batch under one drafter.

    Args:
        target: decides.
        drafter: proposes.
        growth: the shape of its trees.
        rows: batch size.
        capacity: tokens a row may hold, prompt included.
        warp: how logits become laws, for target and drafter alike.
        stop: where outputs end.
        verify: name of the verifier; None: the default of what the growth drafts.

    Raises:
        UserError: if the verifier may not judge what the growth drafts, or the drafter was made
            for a target of another shape.
    """

    @torch.inference_mode()
    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        growth: Growth,
        *,
        rows: int,
        capacity: int,
        warp: Warp,
        stop: Stop,
        verify: str | None = None,
    ) -> None:
        """Allocate the cache and start the drafter's session."""
        check_made_for(drafter, target)
        self.verify = VERIFIERS[resolve(growth, verify)]
        if warp.rules is not None:
            warp.rules.check(target.shape.vocab_size)
        self.target, self.warp, self.stop = target, warp, stop
        self.capacity = min(capacity, target.shape.max_positions)
        self.cache = target.new_cache(rows, self.capacity + growth.nodes + 1)
        self.growth = growth.start(rows)
        self.session = drafter.start(target, self.growth, rows, self.capacity + growth.nodes + 1)
        if isinstance(self.session, ReadsCache):
            self.session.read_cache(self.cache)
        self.rows: list[Row | None] = [None] * rows
        self.clock = Clock()

    @torch.inference_mode()
    def admit(self, requests: Mapping[int, Request]) -> list[Commit | None]:
        """Prefill new rows; each emits its first token.

        Args:
            requests: by the number of a free row.

        Raises:
            UserError: if a prompt is empty or leaves no room, or a budget is below 1.
        """
        start = time.perf_counter()
        prompts: list[torch.Tensor | None] = [None] * len(self.rows)
        for row, request in requests.items():
            assert self.rows[row] is None, f"row {row} is taken"
            self._check(request)
            self.cache.reset(row)
            prompts[row] = torch.tensor(request.prompt)
            room = min(request.max_new_tokens, self.capacity - len(request.prompt))
            ids = list(request.prompt)
            context = Context(ids, len(ids), self.stop.eos_ids)
            self.rows[row] = Row(request.random, ids, room, context)
        outputs = self.target.prefill(prompts, self.cache, self.session.features)
        commits = [
            None if out is None else self._first(row, out) for row, out in enumerate(outputs)
        ]
        self.session.observe(commits)
        self.growth.observe(commits)
        self.clock.prefill += now(self.target.device) - start
        return commits

    @torch.inference_mode()
    def round(self) -> list[Commit | None]:
        """Decode one round of every unfinished row."""
        marks = [time.perf_counter()]
        active = [row if row is not None and row.finished is None else None for row in self.rows]
        trees = self._propose(active)
        marks.append(time.perf_counter())
        trees = [
            None if row is None or tree is None else _within(tree, row.room - 1)
            for row, tree in zip(active, trees, strict=True)
        ]
        layout = self.target.lay_out(trees, self.cache)
        marks.append(time.perf_counter())
        outputs = self.target.run(layout, self.cache, self.session.features)
        marks.append(now(self.target.device))
        laws = [self._laws(*both) for both in zip(active, trees, outputs, strict=True)]
        spoilt = spoilt_rows(laws)
        if spoilt:
            trees, outputs = step_alone(
                self.target, self.cache, self.session.features, trees, outputs, spoilt=spoilt
            )
            for row in spoilt:
                laws[row] = self._laws(active[row], trees[row], outputs[row])
                check_finite(self.target, laws[row])
        commits, paths = self._judge(trees, outputs, laws, spoilt)
        self.cache.keep(paths)
        self.session.observe(commits)
        self.growth.observe(commits)
        marks.append(now(self.target.device))
        self._count(marks)
        return commits

    def release(self, row: int) -> None:
        """Free a row for the next request."""
        self.rows[row] = None

    @property
    def running(self) -> list[int]:
        """Return the rows that go on."""
        return [i for i, row in enumerate(self.rows) if row is not None and row.finished is None]

    def _propose(self, active: Sequence[Row | None]) -> list[TokenTree | None]:
        """Return each row's tree; the roots alone where drafting does not pay.

        A session that is not asked stores what became final, so such a round costs what a plain
        one does.
        """
        if self.growth.levels == 0:
            return [None if row is None else TokenTree.chain(row.ids[-1:]) for row in active]
        random = [None if row is None else row.random for row in active]
        trees = self.session.propose(self._warp(active), random)
        check_trees(active, trees)
        return trees

    def _judge(
        self,
        trees: Sequence[TokenTree | None],
        outputs: Sequence[TargetOutput | None],
        laws: Sequence[Laws | None],
        single: Collection[int],
    ) -> tuple[list[Commit | None], list[list[int] | None]]:
        """Return each row's commit and the path its cache keeps; `single` rows emit one token."""
        commits: list[Commit | None] = []
        paths: list[list[int] | None] = []
        for index, (row, tree, output, law) in enumerate(
            zip(self.rows, trees, outputs, laws, strict=True)
        ):
            if row is None or tree is None or output is None or law is None:
                commits.append(None)
                paths.append(None)
                continue
            check_root(index, row.ids[-1], tree)
            verdict = self.verify(law, tree, row.random.verify)
            emitted = [tree.token_list[node] for node in verdict.path[1:]] + [verdict.token]
            emitted = emitted[:1] if index in single else emitted
            count, finished = self.stop.cut(row.ids, emitted, row.room)
            path, emitted = verdict.path[:count], emitted[:count]
            self._advance(row, emitted, finished)
            commits.append(_commit(tree, path, emitted, output, finished))
            paths.append(path)
        return commits, paths

    def _warp(self, active: Sequence[Row | None]) -> Warp:
        """Return what this round's drafts are warped by: rules look at each row's context."""
        if self.warp.rules is None:
            return self.warp
        return GuidedWarp.of(self.warp, [None if row is None else row.context for row in active])

    def _laws(
        self, row: Row | None, tree: TokenTree | None, output: TargetOutput | None
    ) -> Laws | None:
        """Return the target's laws over a row's tree, None where there is none."""
        if row is None or tree is None or output is None:
            return None
        rules, logits = self.warp.rules, output.logits
        return self.warp.laws(logits if rules is None else rules.over(tree, logits, row.context))

    def _first(self, index: int, output: TargetOutput) -> Commit:
        """Emit a row's first token from the prompt's last logits."""
        row = self.rows[index]
        assert row is not None
        laws = self._laws(row, TokenTree.chain(row.ids[-1:]), output)
        assert laws is not None
        check_finite(self.target, laws)
        token = row.random.verify.draw(laws.law(0))
        prompt = torch.tensor(row.ids)
        _, finished = self.stop.cut(row.ids, [token], row.room)
        self._advance(row, [token], finished)
        return Commit(
            prompt,
            token,
            taps=output.taps,
            last=output.last,
            logits=output.logits,
            finished=finished,
            emitted=(token,),
        )

    @staticmethod
    def _advance(row: Row, emitted: Sequence[int], finished: str | None) -> None:
        row.ids.extend(emitted)
        row.room -= len(emitted)
        row.finished = finished

    def _check(self, request: Request) -> None:
        if not len(request.prompt):
            raise UserError("a prompt has no tokens: give at least one")
        if request.max_new_tokens < 1:
            raise UserError(f"max_new_tokens is {request.max_new_tokens}: give 1 or more")
        if len(request.prompt) >= self.capacity:
            raise UserError(
                f"a prompt has {len(request.prompt)} tokens and the context holds "
                f"{self.capacity}: shorten the prompt"
            )

    def _count(self, marks: Sequence[float]) -> None:
        draft, build, verify, commit = (b - a for a, b in pairwise(marks))
        clock = self.clock
        clock.draft += draft
        clock.build += build
        clock.verify += verify
        clock.commit += commit
        clock.rounds += 1


def _within(tree: TokenTree, depth: int) -> TokenTree:
    """Cut what is too deep to be emitted; a cut by depth looks at no token."""
    return tree if tree.drafted <= depth else tree.limit(depth)


def _commit(
    tree: TokenTree,
    path: list[int],
    emitted: list[int],
    output: TargetOutput,
    finished: str | None,
) -> Commit:
    """Gather what became final along the accepted path."""
    straight = path[-1] == len(path) - 1  # then a view will do: a plain step gathers nothing
    nodes = slice(len(path)) if straight else torch.tensor(path)
    return Commit(
        tree.tokens[nodes],
        emitted[-1],
        taps=None if output.taps is None else output.taps[nodes],
        last=None if output.last is None else output.last[nodes],
        tree=tree,
        logits=output.logits,
        finished=finished,
        emitted=tuple(emitted),
        path=tuple(path),
    )
