"""Links between training's predictions and the real decoder, on the text that it decoded."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from drafters.base import NeuralDrafter
from inference.compare import compare
from inference.doctor.finding import Finding
from inference.doctor.patient import Patient, Predicted, Text, predict, token_of
from inference.doctor.readings import Reading, States, others, stated

_EXCUSED = 0.01  # share of guesses that rounding may turn where no near-tie explains it


@dataclass(frozen=True)
class Guess:
    """One drafted token beside what training predicts there.

    Args:
        round: of its text, from 0.
        depth: from 1.
        equal: whether the two are the same, near-ties excused.
        right: whether training's own is the text's next token.
        accepted: whether the drafted one is.
    """

    round: int
    depth: int
    equal: bool
    right: bool
    accepted: bool


def coverage(patient: Patient) -> Finding:
    """Count how much of the answers the kept ids can say: a ceiling on acceptance."""
    link, drafter = "coverage", patient.neural
    if drafter is None or drafter.ids is None:
        return Finding(link, "ok", "every token can be drafted")
    kept = set(drafter.ids.tolist())
    said = [token for text in patient.texts for token in text.output.ids]
    share = sum(token in kept for token in said) / len(said)
    known = (patient.trained.get("metrics") or {}).get("agreement/1")
    figures = {"coverage": share, "tokens": len(said)}
    text = f"{share:.1%} of {len(said)} answer tokens are among the kept ids: alpha is at most that"
    if known is not None and share < known - 0.1:
        return Finding(
            link,
            "broken",
            f"{text}; in training it agreed on {known:.1%}, so these are not its ids or not its "
            "kind of text",
            "publish it again from the run that trained it, or train on what is served",
            figures,
        )
    return Finding(link, "ok" if share > 0.9 else "note", text, figures=figures)


def decoding(patient: Patient) -> Iterator[Finding]:
    """Compare every drafted token with training's prediction for the same text and place.

    Yields `cache` and `decoding`, or the one link that explains why they differ.
    """
    link, drafter = "decoding", patient.neural
    accepted = _acceptance(patient)
    if drafter is None:
        yield Finding("cache", "skipped", "nothing is predicted in training")
        yield Finding(link, "ok", f"tau {accepted['tau']:.2f}", figures=accepted)
        return
    taught = [_taught(patient, drafter, text) for text in patient.texts]
    pairs = list(zip(patient.texts, taught, strict=True))
    guesses = [guess for pair in pairs for guess in _guesses(patient, drafter, *pair)]
    if not guesses:
        said = "no answer is long enough to draft in"
        yield Finding("cache", "skipped", said)
        yield Finding(link, "skipped", said, figures=accepted)
        return
    first = [guess for guess in guesses if guess.depth == 1]
    figures = accepted | {
        "compared": len(guesses),
        "different": sum(not guess.equal for guess in guesses),
        "teacher_forced_agreement": _share([guess.right for guess in first]),
        "step_0_acceptance": _share([guess.accepted for guess in first]),
        "simulated_tau": _simulated_tau(patient, drafter, pairs),
        "trained": dict(patient.trained.get("metrics") or {}),
    }
    said = (
        f"{figures['different']} of {len(guesses)} drafted tokens differ from training's; step 0: "
        f"{figures['step_0_acceptance']:.3f} accepted, {figures['teacher_forced_agreement']:.3f} "
        f"agree in training's forward; tau {accepted['tau']:.2f}, simulated "
        f"{_number(figures['simulated_tau'])}"
    )
    excused = _EXCUSED if patient.tolerance < 0.01 else 5 * _EXCUSED
    if figures["different"] > excused * len(guesses):
        yield _blamed(patient, drafter, guesses, said, figures)
        return
    later = sum(guess.round > 0 for guess in guesses)
    yield Finding("cache", "ok", f"{later} guesses after a first round equal a fresh start's")
    yield Finding(link, "ok", said, figures=figures)


def _blamed(
    patient: Patient,
    drafter: NeuralDrafter,
    guesses: Sequence[Guess],
    said: str,
    figures: dict[str, Any],
) -> Finding:
    """Say why decoding guesses otherwise than training: a shift, stale state, or something else."""
    reading = _explains(patient, drafter)
    if reading is not None:
        return Finding(
            "shift",
            "broken",
            f"the session reads {reading.name} than training ({said})",
            "pair every feature with the token after its own in the session's `final`, as "
            "`predict` does",
            figures,
        )
    fresh = [guess.equal for guess in guesses if guess.round == 0]
    later = [guess.equal for guess in guesses if guess.round > 0]
    if fresh and later and _share(fresh) > 0.9 > _share(later):
        return Finding(
            "cache",
            "broken",
            f"right after a prefill {_share(fresh):.0%} are equal, later {_share(later):.0%}: the "
            f"session goes on from its own guesses ({said})",
            "in `observe` drop what was guessed and encode what was accepted with true features",
            figures,
        )
    fix = "make `predict` and the session run the same maps at the same positions"
    return Finding("decoding", "broken", said, fix, figures)


def _explains(patient: Patient, drafter: NeuralDrafter) -> Reading | None:
    """Return the shifted reading under which training would guess what the session guessed."""
    wanted = [
        reading
        for reading in others(drafter.features, patient.target.shape.num_layers)
        if reading.link == "shift" and not reading.labels
    ]
    readings = [stated(drafter.features), *wanted]
    equal = [0] * len(readings)
    total = 0
    for text in patient.texts:
        states = States(patient, text, readings)
        total += len(text.proposals)
        for number, reading in enumerate(readings):
            found = _depths(predict(drafter, states.read(reading), patient.target))
            for proposal in text.proposals:
                logits = found[1].at(proposal.root)
                if logits is not None and proposal.tokens:
                    equal[number] += token_of(drafter, logits) == proposal.tokens[0]
    winner = max(range(len(readings)), key=lambda number: equal[number])
    return readings[winner] if winner and equal[winner] > 0.9 * total > equal[0] else None


def _taught(patient: Patient, drafter: NeuralDrafter, text: Text) -> dict[int, Predicted]:
    """Return training's predictions over a text, by depth."""
    batch = patient.batch(text.ids, text.prompt, drafter.features)
    return _depths(predict(drafter, batch, patient.target))


def _guesses(
    patient: Patient, drafter: NeuralDrafter, text: Text, found: Mapping[int, Predicted]
) -> Iterator[Guess]:
    """Yield the drafted tokens whose elders were right, so that training saw the same text."""
    ids = text.ids.tolist()
    for number, proposal in enumerate(text.proposals):
        for depth, token in enumerate(proposal.tokens, start=1):
            place = proposal.root + depth - 1
            logits = _at(found, depth, place)
            if place + 1 >= len(ids):
                break
            if logits is not None:
                best = token_of(drafter, logits)
                ranked = logits.topk(min(2, len(logits))).values
                tie = patient.tolerance * max(1.0, float(logits.abs().max()))
                near = float(ranked[0] - ranked[-1]) <= tie
                right = best == ids[place + 1]
                yield Guess(number, depth, best == token or near, right, token == ids[place + 1])
            if token != ids[place + 1]:
                break


def _simulated_tau(
    patient: Patient, drafter: NeuralDrafter, pairs: Sequence[tuple[Text, Mapping[int, Predicted]]]
) -> float | None:
    """Walk the texts with training's predictions in place of the session's."""
    tokens = rounds = 0
    for text, found in pairs:
        ids, end = text.ids.tolist(), len(text.ids) - 1
        root = text.prompt
        tokens += end - root
        while root < end:
            accepted = 0
            # the engine cuts drafts to what may still be emitted beside the target's own token
            for place in range(root, min(root + patient.depth, end - 1)):
                logits = _at(found, place - root + 1, place)
                if logits is None:
                    return None
                if token_of(drafter, logits) != ids[place + 1]:
                    break
                accepted += 1
            root += accepted + 1
            rounds += 1
    return tokens / rounds if rounds else None


def _depths(predictions: Sequence[Predicted]) -> dict[int, Predicted]:
    return {predicted.depth: predicted for predicted in predictions}


def _at(found: Mapping[int, Predicted], depth: int, place: int) -> Tensor | None:
    """Return the logits of a depth; of a drafter trained on one depth, which serves all, that."""
    return found[depth if len(found) > 1 else 1].at(place)


def lossless(patient: Patient) -> Finding:
    """Compare the greedy answers with plain decoding's."""
    link = "losslessness"
    ties = 0
    for number, text in enumerate(patient.texts):
        found = compare(patient.target, patient.prompts[number], text.output.ids, list(text.plain))
        if found is not None and not found.near_tie:
            said = f"prompt {number + 1}: token {found.index + 1} of the answer differs from plain"
            gap = (
                "" if found.gap is None else f" decoding's (their logits differ by {found.gap:.3g})"
            )
            fix = "this is a defect of the engine's, not of the drafter: report it with this output"
            return Finding(link, "broken", said + gap, fix)
        ties += found is not None
    said = f"{len(patient.texts)} greedy answers equal plain decoding's"
    return Finding(link, "ok", said + (f", {ties} of them up to a near-tie" if ties else ""))


def _acceptance(patient: Patient) -> dict[str, Any]:
    outputs = [text.output for text in patient.texts]
    rounds = sum(output.rounds for output in outputs)
    attempted = sum(sum(output.attempted) for output in outputs)
    emitted = sum(len(output.ids) - 1 for output in outputs)
    accepted = sum(sum(output.accepted) for output in outputs)
    return {
        "tau": emitted / rounds if rounds else 0.0,
        "alpha": accepted / attempted if attempted else None,
        "gamma": patient.depth,
        "rounds": rounds,
    }


def _share(values: Sequence[bool]) -> float:
    return sum(values) / len(values) if values else 0.0


def _number(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float) else "-"
