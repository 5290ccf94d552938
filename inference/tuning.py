"""Tuning: from a few measured shapes to what every shape should bring.

Acceptance is measured with the largest chain and the largest trees. What a smaller one would have
accepted is read off: a shorter chain is its beginning, a smaller tree of the same width its best
nodes. Costs come from a table; the forecast is tau over the round that they add up.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from drafters.base import Commit, Drafter
from drafters.errors import UserError
from drafters.growth import BestFirst, Chain, CostAware, Dynamic, Growth
from drafters.sampling import Warp
from drafters.target import Target
from inference.cost_store import cost_key
from inference.costs import CostTable, Load, Shape
from inference.forecast import forecast
from inference.generate import Generation
from inference.meter import Probe
from inference.pricing import free_probes
from inference.sampling import Sampling
from inference.spec import Spec
from inference.stats import Round, acceptance

NODES = (2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 32)  # budgets of trees that are weighed
_COST_NODES = 8  # of the trees that are timed


@dataclass(frozen=True)
class Largest:
    """The largest shapes that are measured.

    Args:
        depth: levels of chains and trees.
        widths: nodes expanded a level, one tree each; none: chains only.
    """

    depth: int = 6
    widths: tuple[int, ...] = (3,)

    def chains(self, warp: Warp) -> list[Chain]:
        """Return the chains: drawn ones too where laws are no point masses."""
        modes = ("argmax",) if warp.greedy else ("argmax", "sampled")
        return [Chain(self.depth, mode) for mode in modes]

    def best(self) -> BestFirst:
        """Return the tree whose best nodes are those of every smaller one of its depth."""
        return BestFirst(NODES[-1], self.depth)

    def trees(self) -> list[Dynamic]:
        """Return trees that keep every node they score, so that all smaller ones lie in them."""
        return [Dynamic(w + w * w * (self.depth - 1), w, self.depth) for w in self.widths]


@dataclass(frozen=True)
class Candidate:
    """A shape with what it accepts.

    Args:
        spec: as command lines name it.
        key: of its costs.
        shape: levels, nodes drafted in the mean, width.
        tau: emitted tokens a round.
        ready: how often all is accepted and the next guess is the bonus; 0: not known.
    """

    spec: str
    key: str
    shape: Shape
    tau: float
    ready: float = 0.0


@dataclass
class ChainTrace:
    """What a long chain accepted, read as what shorter ones would have."""

    rounds: list[Round] = field(default_factory=list[Round])
    drawn: bool = False

    def add(self, commit: Commit) -> None:
        """Take in one round."""
        assert commit.tree is not None
        emitted = len(commit.emitted)
        self.drawn = self.drawn or commit.tree.laws is not None
        self.rounds.append(Round(commit.accepted, commit.attempted, commit.tree.drafted, emitted))

    def tau(self, gamma: int) -> float:
        """Return emitted tokens a round of a chain of gamma."""
        return 1 + sum(acceptance(self.rounds).survival_by_depth[:gamma])

    def ready(self, gamma: int) -> float:
        """Return how often a chain of gamma and one more guess are right; 0 for the longest."""
        deeper = acceptance(self.rounds).survival_by_depth[gamma : gamma + 1]
        return deeper[0] if deeper else 0.0

    def drafted(self, gamma: int) -> float:
        """Return the nodes that it would draft in the mean; a look-up may find fewer."""
        return sum(min(gamma, one.drafted) for one in self.rounds) / len(self.rounds)


@dataclass
class TreeTrace:
    """What a tree accepted that kept all it scored, read as what smaller ones would have.

    Args:
        places: per round and accepted node, for every depth from its own on: how many nodes of
            that depth or less are better.
    """

    places: list[list[dict[int, int]]] = field(default_factory=list[list[dict[int, int]]])

    def add(self, commit: Commit) -> None:
        """Take in one round."""
        tree = commit.tree
        assert tree is not None
        if tree.confidence is None:
            return
        values, depths = tree.confidence.tolist(), tree.depth.tolist()
        order = sorted(range(1, len(values)), key=lambda node: -values[node])  # stable, as growths
        found: list[dict[int, int]] = []
        for node in commit.path[1:]:
            above = [depths[other] for other in order[: order.index(node)]]
            deeper = range(depths[node], max(depths) + 1)
            found.append({d: sum(depth <= d for depth in above) for d in deeper})
        self.places.append(found)

    def tau(self, nodes: int, depth: int) -> float | None:
        """Return emitted tokens a round of a tree of so many nodes and levels; None: unknown."""
        if not self.places:
            return None
        kept = sum(
            place.get(depth, nodes) < nodes for found in self.places for place in found[:depth]
        )
        return 1 + kept / len(self.places)


def candidates(
    target: Target,
    spec: Spec,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    largest: Largest,
    sampling: Sampling,
) -> list[Candidate]:
    """Decode the prompts in the largest shapes and return all that lie in them.

    Args:
        target: decides.
        spec: of the drafter; its own shape is not used.
        drafter: proposes.
        prompts: token ids.
        largest: the shapes.
        sampling: how outputs are drawn.

    Raises:
        UserError: if the drafter cannot draft so deep, or outputs are too short to tell.
    """
    if sampling.max_new_tokens < largest.depth + 2:
        raise UserError(
            f"max_new_tokens is {sampling.max_new_tokens} and depth {largest.depth}: give "
            f"{largest.depth + 2} tokens or more"
        )
    warp, found = sampling.warp, list[Candidate]()
    for chain in largest.chains(warp):
        trace = ChainTrace()
        _decode(target, drafter, prompts, chain, sampling, trace)
        key, drawn = cost_key(drafter, chain, warp), chain.draft == "sampled"
        if not trace.rounds or drawn != trace.drawn:
            continue  # nothing was decoded, or this drafter has no laws to draw from
        for gamma in range(1, chain.gamma + 1):
            text = named(spec, f"growth=chain,gamma={gamma}" + ",draft=sampled" * drawn)
            shape = Shape(gamma, trace.drafted(gamma))
            found.append(Candidate(text, key, shape, trace.tau(gamma), trace.ready(gamma)))
    for tree in largest.trees():
        trace = TreeTrace()
        _decode(target, drafter, prompts, tree, sampling, trace)
        found += _trees(spec, cost_key(drafter, tree, warp), tree, trace)
    if largest.widths:
        best, trace = largest.best(), TreeTrace()
        _decode(target, drafter, prompts, best, sampling, trace)
        found += _best_first(spec, cost_key(drafter, best, warp), best, trace)
    return found


def _best_first(spec: Spec, key: str, best: BestFirst, trace: TreeTrace) -> Iterator[Candidate]:
    for nodes in NODES:
        tau = trace.tau(nodes, best.depth)
        if nodes >= best.depth and tau is not None:
            text = named(spec, f"growth=best_first,nodes={nodes},depth={best.depth}")
            yield Candidate(text, key, Shape(best.depth, nodes, nodes), tau)


def _trees(spec: Spec, key: str, tree: Dynamic, trace: TreeTrace) -> Iterator[Candidate]:
    for depth in range(2, tree.depth + 1):
        most = tree.width + tree.width**2 * (depth - 1)
        for nodes in (n for n in NODES if depth <= n <= most):
            tau = trace.tau(nodes, depth)
            if tau is not None:
                shape = f"growth=dynamic,nodes={nodes},width={tree.width},depth={depth}"
                yield Candidate(named(spec, shape), key, Shape(depth, nodes, tree.width), tau)


def _decode(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    growth: Growth,
    sampling: Sampling,
    trace: ChainTrace | TreeTrace,
) -> None:
    """Hand every round to the trace that could have accepted all and did not end its output."""
    run = Generation(target, drafter, prompts, growth=growth, sampling=sampling, rows=1)
    left = [sampling.max_new_tokens] * len(prompts)
    for number, commit in run:
        if commit.tree is not None and left[number] > growth.depth and not commit.finished:
            trace.add(commit)
        left[number] -= len(commit.emitted)


def named(spec: Spec, shape: str) -> str:
    """Return the spec of this drafter in another shape, as benchmark.py and generate.py read it."""
    options = [f"{key}={value}" for key, value in spec.options.items()]
    return f"{spec.drafter}:{','.join([*options, shape])}"


def probes(drafter: Drafter, largest: Largest, warp: Warp) -> list[Probe]:
    """Return the shapes to time: shallow and deep, chains, trees and cost-aware growths."""
    depths = sorted({1, largest.depth})
    found: list[Probe] = []
    for chain in largest.chains(warp):
        key = cost_key(drafter, chain, warp)
        found += [Probe(key, drafter, replace(chain, gamma=depth)) for depth in depths]
        limits = CostAware(_COST_NODES, 1, largest.depth, chain.draft)
        found += free_probes(limits, drafter, cost_key(drafter, limits, warp))
    for width in largest.widths:
        trees = [Dynamic(_COST_NODES, width, depth) for depth in depths]
        found += [Probe(cost_key(drafter, t, warp), drafter, t, width) for t in trees]
        limits = CostAware(_COST_NODES, width, largest.depth)
        found += free_probes(limits, drafter, cost_key(drafter, limits, warp))
    for nodes in (_COST_NODES, NODES[-1]) if largest.widths else ():
        trees = [BestFirst(nodes, depth) for depth in depths]
        found += [Probe(cost_key(drafter, t, warp), drafter, t, nodes) for t in trees]
    return found


def ranked(
    table: CostTable, shapes: Sequence[Candidate], load: Load, *, overlap: bool = False
) -> list[tuple[Candidate, float]]:
    """Return candidates with the speed-up that they should bring, the best first.

    Args:
        table: of costs.
        shapes: from `candidates`.
        load: rows and context.
        overlap: whether the drafter is to have a device of its own, as fast as this one.
    """
    values = [
        forecast(table, c.key, c.shape, c.tau, load, c.ready if overlap else 0.0) for c in shapes
    ]
    return sorted(zip(shapes, values, strict=True), key=lambda pair: -pair[1])
