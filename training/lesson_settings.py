"""The sections of a training run's settings that say what is learned from."""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from drafters.errors import UserError
from drafters.sampling import check_temperature
from training.ranges import at_least, one_of


@dataclass
class DataSettings:
    """What is learned from.

    Args:
        path: chats as Parquet, Arrow, JSON or JSONL, a folder of such files, or hub:OWNER/NAME.
        split: part of a data set of the hub.
        max_length: tokens of a chat; what is beyond is cut off.
        held_out: share of chats, by a hash of their ids, that is only measured on.
        tokens: learn from the first chats up to so many tokens; null: from all.
        drop_cut: leave out chats whose last answer was ended by a length limit.
        unstable: error or drop, for chats whose answers the template does not render as given.
        template_options: passed to the chat template; empty: as stored with the chats, which is
            what it must equal if it is given.
        pack: lay several chats into one row of max_length, each reading itself alone.
        batch_tokens: tokens of one batch, padding included.
    """

    path: str = MISSING
    split: str = "train"
    max_length: int = 1024
    held_out: float = 0.05
    tokens: int | None = None
    drop_cut: bool = False
    unstable: str = "error"
    template_options: dict[str, Any] = field(default_factory=dict)
    pack: bool = False
    batch_tokens: int = 1024

    def __post_init__(self) -> None:
        """Check the ranges."""
        at_least(2, "data.max_length", self.max_length)
        at_least(1, "data.batch_tokens", self.batch_tokens)
        if self.tokens is not None:
            at_least(1, "data.tokens", self.tokens)
        if not 0 < self.held_out < 1:
            raise UserError(f"data.held_out is {self.held_out}: give a share between 0 and 1")
        one_of("data.unstable", self.unstable, ("error", "drop"))


@dataclass
class FeatureSettings:
    """How the target's states are kept.

    Args:
        keep: memory keeps them for later epochs, none computes or reads them every time, auto keeps
            them if they fit in a quarter of the free memory.
        dtype: what they are rounded to, float32 or bfloat16; auto: bfloat16 with a store, float32
            without.
        store: folder that keeps them over epochs and runs (training/feature_store.py): what is in
            it is read, what is not is added; empty: none.
        engine: vllm lets that engine hold the target and make what is not kept; of the target only
            embedding and head are then in this process. Empty: the target makes them here.
        engine_options: arguments of the engine's own, such as {tensor_parallel_size: 4}.
        offload_folder: with an engine, what spread.offload_folder is with spread.device_map: takes
            a copy of the target's layers, of which this process then has none in memory, where they
            cannot be read as they are stored (mixtures).
    """

    keep: str = "auto"
    dtype: str = "auto"
    store: str = ""
    engine: str = ""
    engine_options: dict[str, Any] = field(default_factory=dict)
    offload_folder: str = ""

    def __post_init__(self) -> None:
        """Check the names."""
        one_of("features.keep", self.keep, ("auto", "memory", "none"))
        one_of("features.dtype", self.dtype, ("auto", "float32", "bfloat16"))
        if self.engine:
            one_of("features.engine", self.engine, ("vllm",))
        for name in ("engine_options", "offload_folder"):
            if getattr(self, name) and not self.engine:
                raise UserError(f"features.{name} belongs to features.engine: give vllm there")

    @property
    def stored_dtype(self) -> str:
        """Return float32 or bfloat16."""
        if self.dtype != "auto":
            return self.dtype
        return "bfloat16" if self.store else "float32"


@dataclass
class OnPolicySettings:
    """What a drafter that reads nothing of the target's writes itself, to be taught on.

    Args:
        share: of the batches whose answers the drafter writes anew.
        tokens: of such an answer at most.
        temperature: it is drawn at.
    """

    share: float = 0.0
    tokens: int = 64
    temperature: float = 1.0

    def __post_init__(self) -> None:
        """Check the ranges."""
        if not 0 <= self.share <= 1:
            raise UserError(f"on_policy.share is {self.share}: give a share from 0 to 1")
        check_temperature("on_policy.temperature", self.temperature, greedy=False)
        at_least(1, "on_policy.tokens", self.tokens)
