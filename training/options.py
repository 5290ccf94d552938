"""The settings of a training run: one dataclass a section, filled by drafters/settings.py.

Defaults suit the embedded target on two CPU cores; configs/drafters/*.yaml say what differs for a
family. Ranges are checked here, so that a mistake is found before any model is loaded.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from omegaconf import MISSING

from drafters.errors import UserError
from drafters.losses import LossSettings
from drafters.sampling import check_seed, check_temperature
from training.lesson_settings import DataSettings, FeatureSettings, OnPolicySettings
from training.ranges import at_least, check_threads, one_of
from training.target_settings import AdapterSettings, SpreadSettings

SCHEMA_VERSION = 1
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass
class OptimSettings:
    """The optimizer (AdamW) and how gradients reach it.

    Args:
        lr: peak learning rate of matrices and vectors.
        lr_scale: factors for parameters whose name starts with a key, such as {head: 0.3}; 0
            freezes them.
        betas, eps, weight_decay: AdamW's; vectors are not decayed.
        clip: largest norm of the gradient; 0 does not clip.
        accumulate: batches a step and process.
        normalise: global divides a step's summed loss by its summed weight over all batches and
            processes; local gives every batch the same say.
        lora_rank: train adapters of this rank beside every linear map, by peft, and nothing else;
            what is published has them merged; 0: train all weights.
        lora_alpha: an adapter's update is scaled by it over the rank.
    """

    lr: float = 1e-3
    lr_scale: dict[str, float] = field(default_factory=dict)
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip: float = 1.0
    accumulate: int = 1
    normalise: str = "global"
    lora_rank: int = 0
    lora_alpha: int = 16

    def __post_init__(self) -> None:
        """Check the ranges."""
        if self.lr <= 0:
            raise UserError(f"optim.lr is {self.lr}: give more than 0")
        if any(scale < 0 for scale in self.lr_scale.values()):
            raise UserError(f"optim.lr_scale is {self.lr_scale}: give factors of 0 or more")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise UserError(f"optim.betas is {self.betas}: give two numbers in [0, 1)")
        if self.clip < 0 or self.weight_decay < 0:
            raise UserError("optim.clip and optim.weight_decay: give 0 or more")
        at_least(1, "optim.accumulate", self.accumulate)
        at_least(0, "optim.lora_rank", self.lora_rank)
        at_least(1, "optim.lora_alpha", self.lora_alpha)
        one_of("optim.normalise", self.normalise, ("global", "local"))


@dataclass
class ScheduleSettings:
    """How long training takes and how the learning rate moves.

    Whichever of epochs, steps and time_budget ends first ends the run.

    Args:
        epochs: passes over the data; null: no limit.
        steps: optimizer steps; null: no limit.
        time_budget: wall clock of the training loop, evaluations included, such as 90s, 12m, 2h.
        kind: cosine, linear or constant after the warm-up.
        warmup: share of the run in which the rate rises from 0.
        floor: share of the peak that is left at the end.
    """

    epochs: float | None = 4.0
    steps: int | None = None
    time_budget: str | None = None
    kind: str = "cosine"
    warmup: float = 0.05
    floor: float = 0.0

    def __post_init__(self) -> None:
        """Check the ranges."""
        if self.epochs is None and self.steps is None and self.time_budget is None:
            raise UserError("give one of schedule.epochs, schedule.steps, schedule.time_budget")
        if self.epochs is not None and self.epochs <= 0:
            raise UserError(f"schedule.epochs is {self.epochs}: give more than 0")
        if self.steps is not None:
            at_least(1, "schedule.steps", self.steps)
        if self.time_budget is not None:
            seconds(self.time_budget)
        one_of("schedule.kind", self.kind, ("cosine", "linear", "constant"))
        if not 0 <= self.warmup < 1 or not 0 <= self.floor <= 1:
            raise UserError("schedule.warmup and schedule.floor: give shares from 0 to 1")


@dataclass
class EvaluateSettings:
    """What is measured on held-out chats, and when.

    Args:
        times: evaluations in a run, evenly spread, the last one at its end; 0: none.
        tokens: held-out tokens that loss, agreement and overlap are taken over.
        prompts: held-out prompts that the engine decodes for tau and alpha; 0: none.
        new_tokens: decoded a prompt.
        temperatures: at which they are decoded; tau is taken over all.
        shape: what is drafted and how it is judged, as in a benchmark's spec: growth=chain,gamma=4;
            a lossy verifier is refused.
    """

    times: int = 3
    tokens: int = 4096
    prompts: int = 16
    new_tokens: int = 48
    temperatures: list[float] = field(default_factory=lambda: [0.0])
    shape: str = "growth=chain,gamma=4"

    def __post_init__(self) -> None:
        """Check the ranges."""
        at_least(0, "evaluate.times", self.times)
        at_least(1, "evaluate.tokens", self.tokens)
        at_least(0, "evaluate.prompts", self.prompts)
        at_least(2, "evaluate.new_tokens", self.new_tokens)
        if not self.temperatures:
            raise UserError("evaluate.temperatures: give at least one, 0 (greedy) or more")
        for temperature in self.temperatures:
            check_temperature("evaluate.temperatures", temperature)


@dataclass
class TrackingSettings:
    """Where metrics go.

    Args:
        trackers: any of jsonl, tensorboard, wandb (offline unless logged in).
        project: their name for this kind of run.
        every: optimizer steps between two lines of the training loss.
        benchmark: prompt set that the best drafter is measured on at the end, beside plain decoding
            (evaluate.prompts of them, in evaluate.shape); its table is logged. Empty: none.
    """

    trackers: list[str] = field(default_factory=lambda: ["jsonl"])
    project: str = "drafters"
    every: int = 10
    benchmark: str = ""

    def __post_init__(self) -> None:
        """Check the names."""
        for tracker in self.trackers:
            one_of("tracking.trackers", tracker, ("jsonl", "tensorboard", "wandb"))
        at_least(1, "tracking.every", self.every)


@dataclass
class TrainSettings:
    """A training run.

    Args:
        schema_version: of these settings; a file of another version is refused.
        target: folder or hub id of the frozen target.
        output: folder for best/ and last/ (drafters), state.safetensors (to resume), metrics.
        drafter: options of the drafter family.
        warm_start: folder of a drafter to start from: its vocabulary, and the weights that fit.
        resume: go on from the state in `output` if there is one.
        save_times: states written in a run, evenly spread, beside those at evaluations.
        seed: of the weights' start, the data order and decoding.
        precision: "no" (float32) or bf16 (mixed; parameters stay float32).
        target_dtype: float32 or bfloat16.
        publish_dtype: bfloat16 or float32: what is measured and published, of float32 masters.
        threads: CPU threads a process; 0: the machine's cores over the processes on it.
    """

    schema_version: int = SCHEMA_VERSION
    target: str = MISSING
    output: str = MISSING
    drafter: dict[str, Any] = field(default_factory=dict)
    data: DataSettings = field(default_factory=DataSettings)
    features: FeatureSettings = field(default_factory=FeatureSettings)
    loss: LossSettings = field(default_factory=LossSettings)
    on_policy: OnPolicySettings = field(default_factory=OnPolicySettings)
    optim: OptimSettings = field(default_factory=OptimSettings)
    adapter: AdapterSettings = field(default_factory=AdapterSettings)
    spread: SpreadSettings = field(default_factory=SpreadSettings)
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)
    evaluate: EvaluateSettings = field(default_factory=EvaluateSettings)
    tracking: TrackingSettings = field(default_factory=TrackingSettings)
    warm_start: str = ""
    resume: bool = False
    save_times: int = 10
    seed: int = 0
    precision: str = "no"
    target_dtype: str = "float32"
    publish_dtype: str = "bfloat16"
    threads: int = 0

    def __post_init__(self) -> None:
        """Check the ranges."""
        if self.schema_version != SCHEMA_VERSION:
            raise UserError(
                f"schema_version is {self.schema_version}, this code reads {SCHEMA_VERSION}: "
                "rewrite the file by --help, or use the version of the code that wrote it"
            )
        one_of("precision", self.precision, ("no", "bf16"))
        for name in ("target_dtype", "publish_dtype"):
            one_of(name, getattr(self, name), ("float32", "bfloat16"))
        if self.adapter.rank and self.optim.lora_rank:
            raise UserError(
                "adapter.rank (of the target) and optim.lora_rank (of the drafter): give one"
            )
        if self.spread.device_map:
            why = "and spread.device_map is given too: leave one of the two out,"
            self.refuse(["features.engine"], f"{why} that engine holds the layers itself")
            self.refuse(["adapter.rank"], f"{why} an adapter learns beside layers on one device")
        at_least(0, "save_times", self.save_times)
        if self.threads:
            check_threads("threads", self.threads)
        check_seed(self.seed)

    def refuse(self, names: Sequence[str], why: str) -> None:
        """Refuse what a run cannot have.

        Args:
            names: of settings, as section.key.
            why: what is said of the first that is given, and what to do.

        Raises:
            UserError: if one of them is given.
        """
        for name in names:
            given = attrgetter(name)(self)
            if given:
                raise UserError(f"{name} is {given}, {why}")


def seconds(text: str) -> float:
    """Return a duration such as 90s, 12m or 1.5h in seconds.

    Raises:
        UserError: if it is not one.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text.strip())
    if match is None or float(match[1]) == 0:
        raise UserError(f"schedule.time_budget is {text!r}: give a duration such as 90s, 12m or 2h")
    return float(match[1]) * _SECONDS[match[2]]
