"""Acceptance: what a drafter is worth on held-out prompts, measured by the real engine."""

from collections.abc import Callable, Sequence

from drafters.base import NeuralDrafter
from drafters.errors import UserError
from drafters.growth import Growth
from drafters.target import Target
from inference import Output, generate
from inference.modes import LOSSY, shown
from inference.spec import Spec
from inference.stats import Acceptance, Round, Work, acceptance, rate
from training.examples import Example
from training.options import EvaluateSettings


def growth_of(shape: str) -> Growth:
    """Make the growth that evaluations draft with.

    Raises:
        UserError: as `spec_of`.
    """
    return spec_of(shape).growth


def spec_of(shape: str) -> Spec:
    """Read what evaluations draft and how it is judged: the part of a spec after its colon.

    Raises:
        UserError: on an unknown name or option, or a lossy verifier.
    """
    spec = Spec.parse(f"evaluate.shape:{shape}")
    if spec.options:
        raise UserError(f"evaluate.shape {shape!r} has an unknown part: {', '.join(spec.options)}")
    if spec.verify in LOSSY:
        raise UserError(
            f"evaluate.shape {shape!r} is judged by {shown(spec.verify)}: leave verify out, such a "
            "tau measures no drafter"
        )
    return spec


def prompts_of(
    examples: Sequence[Example], settings: EvaluateSettings, room: int
) -> list[list[int]]:
    """Return the first held-out prompts that leave room for an answer in `room` tokens."""
    prompts = [example.prompt for example in examples]
    fitting = [p for p in prompts if 0 < len(p) <= room - settings.new_tokens]
    return fitting[: settings.prompts]


def measure(
    target: Target,
    drafter: NeuralDrafter,
    prompts: Sequence[Sequence[int]],
    settings: EvaluateSettings,
    seed: int,
    see: Callable[[Output], None] = lambda _: None,
) -> dict[str, float]:
    """Decode the prompts at every temperature and count; `see` gets every output.

    Returns:
        Metrics by name (tracking.py).
    """
    spec = spec_of(settings.shape)
    rounds: list[Round] = []
    taus: dict[str, float] = {}
    for temperature in settings.temperatures:
        outputs = generate(
            target,
            drafter,
            prompts,
            growth=spec.growth,
            verify=spec.verify,
            max_new_tokens=settings.new_tokens,
            temperature=temperature,
            seed=seed,
        )
        of_prompts = [_rounds(output) for output in outputs]
        rounds += [one for of_prompt in of_prompts for one in of_prompt]
        taus |= _tau(f"tau/{temperature:g}", of_prompts)
        for output in outputs:
            see(output)
    return by_name(acceptance(rounds)) | taus


def by_name(found: Acceptance) -> dict[str, float]:
    """Return tau, and alpha and survival by depth, by name."""
    metrics = {"tau": found.tau or 0.0}
    for name, shares in (("alpha", found.alpha_by_depth), ("survival", found.survival_by_depth)):
        metrics |= {f"{name}/{depth}": share for depth, share in enumerate(shares, start=1)}
    return metrics


def _tau(name: str, of_prompts: Sequence[Sequence[Round]]) -> dict[str, float]:
    """Return tau at one temperature, and the ends of its interval over prompts if it has one."""
    found = rate([Work(sum(r.emitted for r in one), len(one)) for one in of_prompts])
    if found.value is None:
        return {}
    metrics = {name: found.value}
    if found.interval is not None:
        metrics[f"{name}/low"], metrics[f"{name}/high"] = found.interval
    return metrics


def _rounds(output: Output) -> list[Round]:
    """Return an output's rounds. All emit one token more than they accept, save a last one cut."""
    counts = zip(output.accepted, output.attempted, output.drafted, strict=True)
    left = len(output.ids) - 1
    rounds: list[Round] = []
    for accepted, attempted, drafted in counts:
        emitted = min(left, accepted + 1)
        rounds.append(Round(accepted, attempted, drafted, emitted))
        left -= emitted
    return rounds
