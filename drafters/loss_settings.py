"""LossSettings: what a drafter is trained on, checked before anything is computed."""

from dataclasses import dataclass, field, replace

from drafters.errors import UserError

LAW_TERMS = ("kl", "reverse_kl", "js", "tv", "lk", "lk_hybrid", "ce")  # of the drafter's law
OTHER_TERMS = ("feature", "confidence")  # of what a drafter predicts beside its law
VOCABULARY_LOSSES = ("renormalise", "mask", "full")
DEPTH_WEIGHTS = ("decay", "normalised", "dpace")
DENOMINATORS = ("weight", "predictions", "tokens")


@dataclass
class LossSettings:
    """What a drafter is trained on.

    Args:
        kind: kl, reverse_kl, js, tv, lk, lk_hybrid against the target's law, or ce against
            the token of the text.
        mix: weights of several of them by name, such as {tv: 0.9, ce: 0.1}, in place of kind; with
            feature (smooth L1 between a drafter's hidden state and the target's) and confidence
            (BCE of a drafter's confidence against alpha) where a drafter predicts these.
        then: a kind that takes over from kind and mix at then_from, a share of the run.
        then_from: see then.
        hard: share of a cross entropy against the target's most likely token, 0 to 1.
        temperature: of the target's law; the drafter's law is always that of its plain logits.
        eta: of lk_hybrid.
        depth_weights: decay weighs depth d by decay ** (d - 1); normalised does so with weights
            that sum to 1 (FastMTP); dpace by what the depth adds to the expected accepted length.
        decay: see depth_weights.
        smoothing: of dpace: c becomes (1 - smoothing) c + smoothing.
        denominator: what a sum of losses is divided by: weight, the sum of its weights;
            predictions, their number; tokens, all of the batch, padding and prompts included.
        vocabulary_loss: with a reduced vocabulary, renormalise the target's law on it; or mask
            positions whose most likely token is outside, and renormalise; or full: weigh each
            position by the law's mass inside. tv and lk never renormalise.
        chunk: positions whose laws exist at the same time.
        keep_logits_mb: logits up to this size are kept for the backward pass; beyond it every
            chunk is computed again there.
    """

    kind: str = "kl"
    mix: dict[str, float] = field(default_factory=dict[str, float])
    then: str = ""
    then_from: float = 0.5
    hard: float = 0.0
    temperature: float = 1.0
    eta: float = 3.0
    depth_weights: str = "decay"
    decay: float = 0.8
    smoothing: float = 0.5
    denominator: str = "weight"
    vocabulary_loss: str = "renormalise"
    chunk: int = 512
    keep_logits_mb: int = 1024

    def __post_init__(self) -> None:
        """Check names and ranges."""
        _one_of("kind", self.kind, LAW_TERMS)
        if self.then:
            _one_of("then", self.then, LAW_TERMS)
        for name, weight in self.mix.items():
            _one_of("mix", name, (*LAW_TERMS, *OTHER_TERMS))
            if weight <= 0:
                raise UserError(f"loss.mix gives {name} the weight {weight}: give more than 0")
        _one_of("depth_weights", self.depth_weights, DEPTH_WEIGHTS)
        _one_of("denominator", self.denominator, DENOMINATORS)
        _one_of("vocabulary_loss", self.vocabulary_loss, VOCABULARY_LOSSES)
        for name in ("hard", "then_from", "smoothing"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"loss.{name} is {getattr(self, name)}: give a share from 0 to 1")
        if self.temperature <= 0:
            raise UserError(
                f"loss.temperature is {self.temperature}: give more than 0 (for greedy serving "
                "set loss.hard)"
            )
        if self.decay <= 0 or self.eta <= 0:
            raise UserError(f"loss.decay {self.decay} and loss.eta {self.eta}: give more than 0")
        if self.chunk < 1:
            raise UserError(f"loss.chunk is {self.chunk}: give 1 or more")

    @property
    def terms(self) -> dict[str, float]:
        """Return the weights of all losses by name."""
        return dict(self.mix) or {self.kind: 1.0}

    @property
    def law_terms(self) -> dict[str, float]:
        """Return the weights of those that are taken of the drafter's law."""
        return {name: weight for name, weight in self.terms.items() if name in LAW_TERMS}

    def at(self, progress: float) -> "LossSettings":
        """Return the settings that hold at a share of the run."""
        if not self.then or progress < self.then_from:
            return self
        return replace(self, kind=self.then, mix={}, then="")


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UserError(f"loss.{name} is {value!r}: give {', '.join(allowed)}")
