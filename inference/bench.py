"""Bench: drafters and plain decoding measured on the same prompts, in turns.

Every batch of prompts is decoded by every contender before the next batch begins, in an order that
rotates, so that a slow spell of the machine falls on all of them. Sessions and their packed weights
are made once, before the clock runs. What the numbers mean is inference/summary.py's business.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, field, replace
from statistics import median
from typing import Any

from drafters.base import Account, Drafter, JointSession
from drafters.checkpoint import load_drafter
from drafters.errors import UserError
from drafters.growth import Chain, CostAware, Growth
from drafters.sampling import RowRandom, Warp, check_seed
from drafters.target import Target
from inference.clock import Clock
from inference.cost_store import CostStore
from inference.costs import Costs, CostTable, Load
from inference.engine import Decoder, Request
from inference.meter import SIZES, CostMeter
from inference.passes import Growing, Pass, take
from inference.peer import Peer
from inference.pricing import priced
from inference.prompts import Prompt, first_turn_ids
from inference.spec import Spec
from inference.stop import Stop

BASELINE = "none"
_WARMUP_TOKENS = 16
_COST_SAMPLES = 10  # of every T(n), at least
_FIRST_SAMPLES = 3  # before the race


@dataclass(frozen=True)
class BenchSettings:
    """How a benchmark runs.

    Args:
        max_new_tokens: at most this many tokens a prompt.
        warp: how logits become laws.
        seed: of all rows.
        rows: how many prompts decode together.
        repeats: how often every prompt is decoded.
        warmup: how many prompts every contender decodes, shortly, before the clock runs.
    """

    max_new_tokens: int = 128
    warp: Warp = field(default_factory=Warp)
    seed: int = 0
    rows: int = 1
    repeats: int = 3
    warmup: int = 3

    def __post_init__(self) -> None:
        """Check the values."""
        check_seed(self.seed)
        for name, least in (("max_new_tokens", 2), ("rows", 1), ("repeats", 1), ("warmup", 0)):
            if getattr(self, name) < least:
                raise UserError(f"{name} is {getattr(self, name)}: give {least} or more")


@dataclass
class Contender:
    """A drafter in the race, and what it did.

    Args:
        name: what tables call it.
        drafter: proposes.
        growth: the shape of its trees.
        spec: as the command line named it; None for plain decoding.
        passes: what was measured.
    """

    name: str
    drafter: Drafter
    growth: Growth
    spec: Spec | None = None
    passes: list[Pass] = field(default_factory=list)


@dataclass(frozen=True)
class Measurement:
    """Everything a benchmark measured.

    Args:
        target: the decider.
        settings: how it ran.
        prompts: the questions.
        ids: of each prompt.
        baseline: plain decoding.
        drafters: the others.
        costs: T(n), measured in the same turns.
        context: tokens that were cached when T(n) was timed.
        stored: what was measured on this machine before, for forecasts; None: nothing.
        peers: other libraries' decoding, timed in the same turns.
    """

    target: Target
    settings: BenchSettings
    prompts: Sequence[Prompt]
    ids: Sequence[Sequence[int]]
    baseline: Contender
    drafters: Sequence[Contender]
    costs: Costs
    context: int
    stored: CostTable | None = None
    peers: Sequence[Peer] = ()


def contenders(target: Target, specs: Sequence[Spec]) -> list[Contender]:
    """Load every drafter once, however many shapes it runs in.

    Raises:
        UserError: if one is given twice or cannot be loaded.
    """
    loaded: dict[str, Drafter] = {}
    found: list[Contender] = []
    for spec in specs:
        if any(spec.text == other.name for other in found):
            raise UserError(f"drafter {spec.text!r} is given twice: give each shape once")
        key = f"{spec.drafter}:{sorted(spec.options.items())}"
        if key not in loaded:
            loaded[key] = spec.load(target)
        found.append(Contender(spec.text, loaded[key], spec.growth, spec))
    return found


def steps(prompts: int, drafters: int, settings: BenchSettings, peers: int = 0) -> int:
    """Return how often `measure` reports progress."""
    groups = -(-prompts // settings.rows)
    return (drafters + 1 + peers) * (1 + groups * settings.repeats)


def measure(
    target: Target,
    drafters: Sequence[Contender],
    prompts: Sequence[Prompt],
    settings: BenchSettings,
    advance: Callable[[], None] = lambda: None,
    peers: Sequence[Peer] = (),
) -> Measurement:
    """Measure plain decoding and drafters on the same prompts.

    Args:
        target: decides.
        drafters: from `contenders`; their passes are filled.
        prompts: of which the first turn is answered.
        settings: how to run.
        advance: called after every step, `steps` times.
        peers: other libraries' decoding.

    Raises:
        UserError: if a prompt or so many rows cannot be served; before any model work.
    """
    for peer in peers:
        peer.check_rows(settings.rows)
    ids = first_turn_ids(target, prompts)
    _check_lengths(target, prompts, ids)
    baseline = Contender(BASELINE, load_drafter(BASELINE, target), Chain(1))
    race = [baseline, *drafters]
    context, rows = _typical_context(target, ids, settings), min(settings.rows, len(ids))
    load = Load(rows, len(context))
    meter = CostMeter(target, context, rows=rows, sizes=_sizes(drafters))
    newer = _as_it_is_now(meter, drafters, load)
    decoders = [_decoder(target, contender, ids, settings, load, newer) for contender in race]
    for decoder in decoders:
        _warm_up(decoder, ids, settings)
        advance()
    for peer in peers:
        peer.decode(target, ids[:1], _WARMUP_TOKENS, settings.warp, settings.seed)
        advance()
    for turn, group, samples in _turns(len(ids), settings):
        for place in range(len(race)):
            index = (place + sum(turn)) % len(race)
            race[index].passes.append(_decode(decoders[index], ids, group, settings, turn))
            advance()
        for peer in peers:
            questions = [ids[prompt] for prompt in group]
            most, seed = settings.max_new_tokens, settings.seed + turn[0]
            peer.take(group, peer.decode(target, questions, most, settings.warp, seed))
            advance()
        for _ in range(samples):
            meter.sample()
    store = CostStore(target, settings.warp)
    stored = store.load()
    if stored is not None:
        store.add(_verified(meter, load))  # the machine's speed wanders: later runs read the latest
    return Measurement(
        target, settings, prompts, ids, baseline, drafters, meter.costs, len(context), stored, peers
    )


def _as_it_is_now(meter: CostMeter, drafters: Sequence[Contender], load: Load) -> CostTable | None:
    """Time T(n) before the race where a growth decides by it; None where none does."""
    if not any(isinstance(contender.growth, CostAware) for contender in drafters):
        return None
    for _ in range(_FIRST_SAMPLES):
        meter.sample()
    return _verified(meter, load)


def _verified(meter: CostMeter, load: Load) -> CostTable:
    seconds = meter.costs.seconds.items()
    return CostTable({(load.rows, load.context, n): s for n, s in seconds}, {})


def _turns(
    prompts: int, settings: BenchSettings
) -> Iterator[tuple[tuple[int, int], tuple[int, ...], int]]:
    """Yield (repeat, number of the batch), its prompts, and how often T(n) is timed after it."""
    starts = range(0, prompts, settings.rows)
    samples = -(-_COST_SAMPLES // (len(starts) * settings.repeats))
    for repeat in range(settings.repeats):
        for number, start in enumerate(starts):
            group = tuple(range(start, min(start + settings.rows, prompts)))
            yield (repeat, number), group, samples


def _decoder(
    target: Target,
    contender: Contender,
    ids: Sequence[Sequence[int]],
    settings: BenchSettings,
    load: Load,
    newer: CostTable | None,
) -> Decoder:
    return Decoder(
        target,
        contender.drafter,
        priced(contender.growth, target, contender.drafter, load, settings.warp, newer),
        rows=load.rows,
        capacity=max(len(prompt) for prompt in ids) + settings.max_new_tokens,
        warp=settings.warp,
        stop=Stop(target.eos_ids),
        verify=None if contender.spec is None else contender.spec.verify,
    )


def _warm_up(decoder: Decoder, ids: Sequence[Sequence[int]], settings: BenchSettings) -> None:
    short = replace(settings, max_new_tokens=min(settings.max_new_tokens, _WARMUP_TOKENS))
    for number in range(settings.warmup):
        first = number * settings.rows
        group = {(first + row) % len(ids) for row in range(settings.rows)}
        _decode(decoder, ids, tuple(sorted(group)), short, (0, 0))


def _decode(
    decoder: Decoder,
    ids: Sequence[Sequence[int]],
    group: tuple[int, ...],
    settings: BenchSettings,
    turn: tuple[int, int],
) -> Pass:
    """Decode one batch of prompts; `turn` is its repeat and its number."""
    before, accounts = replace(decoder.clock), _accounts(decoder)
    repeat, number = turn
    requests = {
        row: Request(
            ids[prompt],
            settings.max_new_tokens,
            RowRandom(settings.seed, prompt + repeat * len(ids)),
        )
        for row, prompt in enumerate(group)
    }
    outputs = [Growing(len(ids[prompt])) for prompt in group]
    take(outputs, decoder.admit(requests), {})
    full_rounds: list[float] = []
    while decoder.running:
        active, start = len(decoder.running), decoder.clock.phases
        commits = decoder.round()
        spent = {name: end - start[name] for name, end in decoder.clock.phases.items()}
        take(outputs, commits, {name: seconds / active for name, seconds in spent.items()})
        if active == len(group):
            full_rounds.append(sum(spent.values()))
    for row in requests:
        decoder.release(row)
    clock = Clock(*_difference(decoder.clock, before))
    done = [output.done() for output in outputs]
    pairs = zip(_accounts(decoder), accounts, strict=True)
    members = [Account(*_difference(after, start)) for after, start in pairs]
    return Pass(repeat, number, group, done, clock, full_rounds, members)


def _accounts(decoder: Decoder) -> list[Account]:
    session = decoder.session
    return [replace(one) for one in session.accounts] if isinstance(session, JointSession) else []


def _difference(after: Clock | Account, before: Clock | Account) -> list[Any]:
    return [a - b for a, b in zip(astuple(after), astuple(before), strict=True)]


def _check_lengths(target: Target, prompts: Sequence[Prompt], ids: Sequence[Sequence[int]]) -> None:
    limit = target.shape.max_positions
    for prompt, tokens in zip(prompts, ids, strict=True):
        if len(tokens) >= limit:
            raise UserError(
                f"prompt {prompt.question_id} has {len(tokens)} tokens and the context of "
                f"{target.name} holds {limit}: leave it out"
            )


def _typical_context(
    target: Target, ids: Sequence[Sequence[int]], settings: BenchSettings
) -> list[int]:
    """Return real tokens, as many as a row has cached in the middle of a typical output."""
    length = int(median(len(prompt) for prompt in ids)) + settings.max_new_tokens // 2
    return prefix_of(ids, min(length, target.shape.max_positions - max(SIZES)))


def prefix_of(ids: Sequence[Sequence[int]], length: int) -> list[int]:
    """Return so many tokens of prompts, repeated where they are fewer."""
    tokens = [token for prompt in ids for token in prompt]
    return (tokens * -(-length // len(tokens)))[:length]


def _sizes(drafters: Sequence[Contender]) -> list[int]:
    return sorted({*SIZES, *(contender.growth.nodes + 1 for contender in drafters)})
