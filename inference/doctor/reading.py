"""Links between what training reads and what the weights were trained to read."""

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from drafters.base import Batch, Features, NeuralDrafter
from inference.doctor.finding import Finding
from inference.doctor.patient import Patient, Predicted, Text, predict
from inference.doctor.readings import FEWEST, Score, best, doubt, others, scores, stated

_FIXES = {
    "taps": "set the drafter's layers to these and measure again: layers are counted from 0 and "
    "their raw outputs are read, which is hidden_states[layer + 1] and never the last entry",
    "shift": "train again: the token after a feature's own stands beside it, and what is predicted "
    "is the token after that; labels and their mask are gathered by position",
}


def features(patient: Patient) -> Finding:
    """Compare what the engine hands over with what training reads and what the model itself has."""
    link, drafter = "features", patient.drafter
    assert drafter is not None
    wanted = drafter.features
    if not wanted.layers and not wanted.last:
        return Finding(link, "skipped", "this drafter reads no states of the target's")
    for text in patient.texts:
        batch = patient.batch(text.ids, text.prompt, wanted)
        for what, served, taught in (
            ("tapped layers", text.taps, batch.taps),
            ("last state", text.last, batch.last),
        ):
            if served is None or taught is None:
                continue
            error = _largest(served, taught[0, : len(served)], batch.last.shape[-1])
            if not error <= 100 * patient.tolerance:
                return _misread(
                    f"the {what} that the engine hands over differ from training's by {error:.2g} "
                    "of their size"
                )
    said = _against_model(patient, wanted)
    if said is not None:
        return _misread(said)
    return Finding(link, "ok", f"layers {list(wanted.layers)}: engine, training and model agree")


def _misread(said: str) -> Finding:
    fix = "this is a defect of the engine's, not of the drafter: report it with this output"
    return Finding("features", "broken", said, fix)


def _against_model(patient: Patient, wanted: Features) -> str | None:
    """Say which layer is not the model's own raw output."""
    text, target = patient.texts[0], patient.target
    batch = patient.batch(text.ids, text.prompt, wanted)
    if batch.taps is None:
        return None
    with torch.inference_mode():
        out = target.model(batch.ids, output_hidden_states=True, use_cache=False)
    states = out.hidden_states
    taps = batch.taps.chunk(len(wanted.layers), -1)
    for layer, tap in zip(wanted.layers, taps, strict=True):
        top = layer == target.shape.num_layers - 1
        error = _error(tap[0], states[layer + 1][0])
        if top and error <= patient.tolerance:
            return f"layer {layer} is read after the final norm: hidden_states[-1] is not raw"
        if not top and not error <= 100 * patient.tolerance:
            return f"the output of layer {layer} differs from hidden_states[{layer + 1}]"
    return None


def mask(patient: Patient) -> Finding:
    """Look for predictions that see later tokens, or another text in the same row."""
    link, drafter = "mask", patient.neural
    if drafter is None:
        return Finding(link, "skipped", "nothing is predicted in training")
    fix = (
        "mend the attention mask of training and train again: what it learned from tokens that "
        "decoding does not have is lost there"
    )
    for text in patient.texts:
        seen = _sees_later(patient, drafter, text)
        if seen is not None:
            return Finding(link, "broken", seen, fix)
    if len(patient.texts) > 1 and _sees_neighbour(patient, drafter, *patient.texts[:2]):
        said = "a text's predictions change with the text before it in the same row"
        return Finding(link, "broken", said, fix)
    return Finding(link, "ok", "no prediction sees a later token or another text")


def _sees_later(patient: Patient, drafter: NeuralDrafter, text: Text) -> str | None:
    """Change the second half of the answer; no prediction of the law after an earlier token may."""
    cut = (text.prompt + len(text.ids)) // 2
    changed = text.ids.clone()
    changed[cut + 1 :] = (changed[cut + 1 :] + 1) % patient.target.shape.vocab_size
    pair = [
        predict(drafter, patient.batch(ids, text.prompt, drafter.features), patient.target)
        for ids in (text.ids, changed)
    ]
    for before, after in zip(*pair, strict=True):
        early = [t for t in before.rows if t <= cut and t in after.rows]
        place = _first_change(before, after, early, patient.tolerance)
        if place is not None:
            return (
                f"depth {before.depth}: the guess of token {place + 1} changes with tokens from "
                f"{cut + 1} on, which decoding does not have yet"
            )
    return None


def _first_change(
    one: Predicted, other: Predicted, places: list[int], tolerance: float, offset: int = 0
) -> int | None:
    for place in places:
        a, b = one.at(place), other.at(place + offset)
        assert a is not None
        assert b is not None
        if not float((a - b).abs().max()) <= 10 * tolerance * max(1.0, float(a.abs().max())):
            return place
    return None


def _sees_neighbour(patient: Patient, drafter: NeuralDrafter, first: Text, second: Text) -> bool:
    """Lay two texts into one row; the second's predictions must be those it has alone."""
    alone = patient.batch(second.ids, second.prompt, drafter.features)
    ids = torch.cat((first.ids, second.ids))[None].to(alone.ids.device)
    place = torch.arange(ids.shape[1], device=ids.device)[None]
    inside = place >= len(first.ids)
    document, position = inside.long(), place - len(first.ids) * inside
    taps, last = patient.target.forward_batch(ids, document, position, drafter.features)
    answered = position >= torch.where(inside, second.prompt, first.prompt)
    both = Batch(ids, answered, document, position, taps, last)
    offset = len(first.ids)
    for one, two in zip(
        predict(drafter, alone, patient.target), predict(drafter, both, patient.target), strict=True
    ):
        shared = [t for t in one.rows if t + offset in two.rows]
        if _first_change(one, two, shared, patient.tolerance, offset) is not None:
            return True
    return False


def numbering(patient: Patient) -> Iterator[Finding]:
    """Ask which way of reading the texts the weights fit best: links `taps` and `shift`."""
    drafter = patient.neural
    if drafter is None:
        yield from (_skipped(link, "it has no weights of ours") for link in ("taps", "shift"))
        return
    start = stated(drafter.features)
    alternatives = others(drafter.features, patient.target.shape.num_layers)
    found = scores(patient, [start, *alternatives])
    prompts = len(found[0].likelihood)
    if prompts < FEWEST:
        said = f"{prompts} answers are long enough: give {FEWEST} prompts or more"
        yield from (_skipped(link, said) for link in ("taps", "shift"))
        return
    recorded = (patient.trained.get("metrics") or {}).get("agreement/1")
    winner = best(found, recorded)
    for link in ("taps", "shift"):
        yield _judged(link, found, winner)


def _judged(link: str, found: list[Score], winner: tuple[Score, float] | None) -> Finding:
    start = found[0]
    tried = [score for score in found[1:] if score.reading.link == link]
    figures = {
        score.reading.name: {
            "agreement": score.mean_agreement,
            "log_probability": score.mean_likelihood,
        }
        for score in [start, *tried]
    }
    if not tried:
        return _skipped(link, "it reads no states of the target's")
    rest = max(tried, key=lambda score: score.mean_agreement)
    said = (
        f"agreement {start.mean_agreement:.3f} as stated, {rest.mean_agreement:.3f} under the best "
        f"of {len(tried)} other readings, over {len(start.agreement)} prompts{doubt(start, rest)}"
    )
    status: Literal["ok", "note"] = "ok"
    if winner is not None:
        score, p = winner
        evidence = (
            f"{score.reading.name}: agreement {score.mean_agreement:.3f} against "
            f"{start.mean_agreement:.3f} as stated (p = {p:.1g}, {len(found) - 1} readings tried)"
        )
        if score.reading.link == link:
            where = f" {list(score.reading.layers)}" if link == "taps" else ""
            return Finding(link, "broken", f"{evidence}{where}", _FIXES[link], figures)
        if not score.reading.link and link == "taps":
            status, said = "note", f"{evidence}: it learned little of the others yet"
    return Finding(link, status, said, figures=figures)


def _skipped(link: str, said: str) -> Finding:
    return Finding(link, "skipped", said)


def _largest(served: Tensor, wanted: Tensor, width: int) -> float:
    """Return the error of the layer that differs most; states [m, layers * width]."""
    if served.shape != wanted.shape:
        return torch.inf
    pairs = zip(served.split(width, -1), wanted.split(width, -1), strict=True)
    return max(_error(a, b) for a, b in pairs)


def _error(served: Tensor, wanted: Tensor) -> float:
    """Return the median error relative to the median size."""
    size = wanted.float().abs().median().clamp_min(1e-12)
    return float((served.float() - wanted.float()).abs().median() / size)
