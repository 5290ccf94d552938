"""Summary: what a benchmark measured, as the plain values of benchmark.json.

Every figure is defined in docs/metrics.md. Tokens and seconds are those of rounds: the prefill and
its token are shown apart.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from statistics import fmean
from typing import Any

import torch

from drafters.base import Drafter, JointDrafter
from drafters.growth import CostAware
from inference.bench import Contender, Measurement
from inference.by_prompt import by_prompt
from inference.cost_store import cost_key
from inference.costs import Load, Shape
from inference.equality import equality
from inference.facts import dtype_name, parameters, stored_values, target_facts
from inference.forecast import (
    RoundCost,
    break_even_tau,
    cost_ratio,
    forecast,
    predicted_speedup,
)
from inference.machine import machine, versions
from inference.modes import LOSSY, shown
from inference.peer import Peer
from inference.stats import Estimate, Work, rate, ratio_of_medians, speedup
from inference.tally import Keep, Tally, without_loops

FORMAT_VERSION = 1
PLAIN_SHARE = 0.95  # of 1 / T(1): below it plain decoding would be a straw man
# The step of a smaller target is mostly Python, which T(1) leaves out: its share says nothing.
JUDGED_PARAMETERS = 10_000_000
JUDGED_ROUNDS = 100  # fewer are over in a few seconds, which anything else may have spoilt
POSITIONS = (0, 256, 512, 1024, 2048, 4096, 8192)  # where buckets of context positions start


def summarise(measured: Measurement, source: str) -> dict[str, Any]:
    """Return everything benchmark.json holds; `source` names the prompt set."""
    plain = Tally(measured.baseline)
    check = _plain_check(measured)
    drafters = [_drafter(measured, contender, plain) for contender in measured.drafters]
    return {
        "format_version": FORMAT_VERSION,
        "target": target_facts(measured.target),
        "machine": machine(),
        "versions": versions(),
        "settings": _settings(measured, source),
        "baseline": {
            "tokens": plain.tokens,
            "seconds": plain.seconds,
            "tokens_per_second": plain.tokens_per_second,
            "prefill_seconds": plain.prefill_seconds,
            "round_seconds": plain.round_seconds,
            "time_share": plain.time_share,
            "looped_share": plain.looped_share(),
            "distinct_4": plain.distinct(),
            "check": check,
        },
        "verify_cost": measured.costs.relative(),
        "verify_seconds": {str(n): s for n, s in measured.costs.seconds.items()},
        "drafters": drafters,
        "peers": [_peer(measured, peer, plain) for peer in measured.peers],
        "failures": _failures(measured, check, drafters),
    }


def _settings(measured: Measurement, source: str) -> dict[str, Any]:
    warp = measured.settings.warp
    values = asdict(replace(measured.settings, warp=replace(warp, rules=None)))
    return {
        "prompts_file": source,
        "prompts": len(measured.prompts),
        "dtype": dtype_name(measured.target),
        "context": measured.context,
        **values.pop("warp"),
        "rules": None if warp.rules is None else warp.rules.report(),
        **values,
    }


def _drafter(measured: Measurement, contender: Contender, plain: Tally) -> dict[str, Any]:
    own = Tally(contender)
    found, gain = own.acceptance(), own.speedup(plain)
    return {
        **_identity(contender, own),
        "tau": found.tau,
        "tau_interval": own.tau().interval,
        "alpha": found.alpha,
        "alpha_by_depth": found.alpha_by_depth,
        "survival_by_depth": found.survival_by_depth,
        "accepted_per_round": found.accepted_per_round,
        "acceptance_rate": found.acceptance_rate,
        "rounds": found.rounds,
        "rounds_without_draft": found.undrafted,
        "tokens": own.tokens,
        "seconds": own.seconds,
        "tokens_per_second": own.tokens_per_second,
        "prefill_seconds": own.prefill_seconds,
        "round_seconds": own.round_seconds,
        "speedup": gain.value,
        "speedup_interval": gain.interval,
        **_costs(measured, contender, own, plain),
        "forecast_speedup": _forecast(measured, contender, own),
        "time_share": own.time_share,
        "members": _members(contender.drafter, own),
        **equality(measured, own, plain),
        "looped_share": own.looped_share(),
        "distinct_4": own.distinct(),
        "without_loops": _part(own, plain, without_loops),
        "by_category": _by_category(measured, own, plain),
        "by_position": _by_position(own, plain),
        "by_prompt": by_prompt(measured.prompts, own, plain),
    }


def _identity(contender: Contender, own: Tally) -> dict[str, Any]:
    spec, drafter = contender.spec, contender.drafter
    assert spec is not None
    options = asdict(contender.growth)  # pyright: ignore[reportArgumentType] - policies are dataclasses
    asked = options.pop("draft")
    shape = {name: value for name, value in options.items() if value != ()}
    if "tree" in shape:
        del shape["branching"]
    folders = spec.folders
    return {
        "name": contender.name,
        "method": drafter.name,
        "checkpoint": "+".join(map(str, folders)) or None,
        "parameters": sum(stored_values(folder) for folder in folders),
        "growth": spec.growth_name,
        "draft_mode": " and ".join(sorted(own.draft_modes)) or asked,
        "verify_mode": shown(spec.verify),
        "lossless": spec.verify not in LOSSY,
        "shape": shape,
        "depth": contender.growth.depth,
        "nodes": contender.growth.nodes,
    }


def _members(drafter: Drafter, own: Tally) -> list[dict[str, Any]]:
    """Return what each part of a joint drafter cost and was worth; empty for others."""
    if not isinstance(drafter, JointDrafter):
        return []
    return [
        {
            "method": member.name,
            "time_share": account.seconds / own.seconds if own.seconds else None,
            **asdict(account),
        }
        for member, account in zip(drafter.members, own.accounts(), strict=True)
    ]


def _costs(
    measured: Measurement, contender: Contender, own: Tally, plain: Tally
) -> dict[str, float | None]:
    """Return what a round costs and what follows; None where there was no round."""
    tau, round_seconds, plain_seconds = (
        own.acceptance().tau,
        own.round_seconds,
        plain.round_seconds,
    )
    if tau is None or round_seconds is None or plain_seconds is None:
        return dict.fromkeys(("cost_ratio", "break_even_tau", "predicted_speedup"))
    cost, step = _round_cost(measured, own), measured.costs.step
    return {
        "cost_ratio": cost_ratio(cost.draft, contender.growth.depth, step),
        "break_even_tau": break_even_tau(round_seconds, plain_seconds),
        "predicted_speedup": predicted_speedup(tau, cost, _round_cost(measured, plain)),
    }


def _round_cost(measured: Measurement, own: Tally) -> RoundCost:
    """Return a mean round; T(n) was timed apart, so no prediction rests on what it is held to."""
    verify = fmean(measured.costs.of(entry.round.drafted + 1) for entry in own.entries)
    draft, build, commit = (own.phases[p] / own.rounds for p in ("draft", "build", "commit"))
    return RoundCost(draft, build, verify, commit)


def _forecast(measured: Measurement, contender: Contender, own: Tally) -> float | None:
    """Return what survival and stored costs predict; None where they do not cover this.

    Nothing that was timed in this run enters. A growth that weighs every node has no fixed shape.
    """
    table, growth, found = measured.stored, contender.growth, own.acceptance()
    if table is None or found.tau is None or isinstance(growth, CostAware):
        return None
    key, width = cost_key(contender.drafter, growth, measured.settings.warp), growth.expanded
    load = Load(measured.settings.rows, measured.context)
    if not table.covers(key, width, load.rows):
        return None
    shape = Shape(growth.depth, found.drafted / found.rounds, width)
    return forecast(table, key, shape, 1 + sum(found.survival_by_depth), load)


def _by_category(measured: Measurement, own: Tally, plain: Tally) -> dict[str, Any]:
    members: dict[str, set[int]] = {}
    for number, prompt in enumerate(measured.prompts):
        members.setdefault(prompt.category, set()).add(number)
    return {name: _category(own, plain, prompts) for name, prompts in members.items()}


def _category(own: Tally, plain: Tally, prompts: set[int]) -> dict[str, Any]:
    return {
        "prompts": len(prompts),
        **_part(own, plain, lambda entry: entry.prompt in prompts),
        "looped_share": own.looped_share(prompts),
    }


def _by_position(own: Tally, plain: Tally) -> dict[str, Any]:
    """Return the figures of rounds whose root lies from each start up to the next."""
    ends = (*POSITIONS[1:], math.inf)
    found: dict[str, Any] = {}
    for start, end in zip(POSITIONS, ends, strict=True):
        part = _part(own, plain, lambda e, a=start, b=end: a <= e.round.position < b)
        if part["rounds"]:
            found[str(start)] = part
    return found


def _part(own: Tally, plain: Tally, inside: Keep) -> dict[str, Any]:
    """Return what the rounds inside say, of a drafter and of plain decoding."""
    found, gain = own.acceptance(inside), own.speedup(plain, inside)
    return {
        "rounds": found.rounds,
        "tokens": found.tokens,
        "tau": found.tau,
        "alpha": found.alpha,
        "speedup": gain.value,
        "speedup_interval": gain.interval,
    }


def _peer(measured: Measurement, peer: Peer, plain: Tally) -> dict[str, Any]:
    """Return what another library's decoding does, and what ours does over it."""
    numbers = range(len(measured.ids))
    rows = measured.settings.rows
    batches = [numbers[start : start + rows] for start in range(0, len(numbers), rows)]
    decode = _decoding(peer, batches)
    whole = [
        _sum(Work(len(o.ids), o.total_seconds) for n in batch for o in peer.outputs[n])
        for batch in batches
    ]
    alone = next((one for one in measured.peers if one.name == peer.plain), peer)
    found = {
        "name": peer.name,
        "tokens_per_second": rate(decode).value,
        "tokens_per_second_with_prefill": rate(whole).value,
        "none_over_it": _pair(speedup(plain.work(), decode)),
        "none_over_it_with_prefill": _pair(speedup(plain.work(prefill=True), whole)),
        "over_its_plain": None,
        "identical": None,
    }
    if alone is not peer:
        found["over_its_plain"] = _pair(speedup(decode, _decoding(alone, batches)))
    if measured.settings.warp.greedy:
        same = [plain.outputs(n)[0] == peer.outputs[n][0].ids for n in numbers]
        found["identical"] = sum(same)
    return found


def _decoding(peer: Peer, batches: Iterable[Sequence[int]]) -> list[Work]:
    return [
        _sum(Work(o.decoded, o.seconds) for n in batch for o in peer.outputs[n])
        for batch in batches
    ]


def _sum(parts: Iterable[Work]) -> Work:
    both = list(parts)
    return Work(sum(w.amount for w in both), sum(w.cost for w in both))


def _pair(estimate: Estimate) -> dict[str, Any]:
    return {"value": estimate.value, "interval": estimate.interval}


def _plain_check(measured: Measurement) -> dict[str, Any]:
    """Return at which share of 1 / T(1) plain decoding ran, medians on both sides.

    It fails where the whole interval is below what is required: noise alone fails nothing. Nor does
    what only tries whether everything runs: a few rounds are not judged.
    """
    rounds = [s for one in measured.baseline.passes for s in one.full_rounds]
    share = ratio_of_medians(measured.costs.times[1], rounds)
    most = share.value if share.interval is None else share.interval[1]
    large = parameters(measured.target) >= JUDGED_PARAMETERS
    judged = large and len(rounds) >= JUDGED_ROUNDS
    return {
        "share": share.value,
        "interval": share.interval,
        "required": PLAIN_SHARE,
        "judged": judged,
        "passed": most is not None and (not judged or most >= PLAIN_SHARE),
    }


def _failures(
    measured: Measurement, check: dict[str, Any], drafters: Sequence[dict[str, Any]]
) -> list[str]:
    """Return one line for everything that makes the figures unfit for use."""
    lines = []
    if check["share"] is None:
        lines.append("no prompt was answered by more than one token: nothing was measured")
    elif not check["passed"]:
        lines.append(
            f"plain decoding ran at {check['share']:.2f} of 1/T(1), {PLAIN_SHARE} is the least: "
            "every speed-up would be flattered; run again on a quiet machine"
        )
    # in low precision a forward over many rows is not bit-equal to one over a single row
    if measured.target.dtype == torch.float32:
        lines += [
            f"{one['name']}: {one['different']} of {len(measured.ids)} greedy outputs differ from "
            f"plain decoding's by more than rounding (largest gap {one['largest_gap']})"
            for one in drafters
            if one["different"]
        ]
    return lines
