"""ChatSettings: how chats are drawn and which of them are kept."""

from dataclasses import asdict, dataclass, field
from typing import Any

from drafters.errors import UserError
from drafters.sampling import Warp, check_seed

MOST_TURNS = 32  # each has its own random numbers


@dataclass(frozen=True)
class ChatSettings:
    """How chats are made.

    Args:
        seed: of everything random.
        temperatures: of the answers; chat i takes number i modulo their count.
        top_k, top_p, min_p: of the answers, where the temperature is not 0.
        max_new_tokens: of an answer.
        user_temperature, user_top_p, user_min_p: of messages that the target writes as the user.
        user_tokens: of such a message; longer ones are dropped.
        turns: of a self-chat.
        max_looped: largest share of an answer's tokens inside repeated 4-grams.
        template_options: passed to the chat template.
    """

    seed: int = 0
    temperatures: tuple[float, ...] = (0.0, 0.7)
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_new_tokens: int = 256
    user_temperature: float = 1.0
    user_top_p: float = 1.0
    user_min_p: float = 0.0
    user_tokens: int = 96
    turns: int = 1
    max_looped: float = 0.5
    template_options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the ranges."""
        check_seed(self.seed)
        if not self.temperatures:
            raise UserError("no temperatures were given: give such as 0,0.7")
        for temperature in self.temperatures:
            self.warp(temperature)
        if self.user_temperature <= 0:
            raise UserError(
                f"the user's temperature is {self.user_temperature}: give more than 0, messages "
                "are always sampled"
            )
        self.user_warp()
        for name in ("max_new_tokens", "user_tokens", "turns"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}: give 1 or more")
        if self.turns > MOST_TURNS:
            raise UserError(f"turns is {self.turns}: give at most {MOST_TURNS}")
        if not 0 < self.max_looped <= 1:
            raise UserError(f"max_looped is {self.max_looped}: give a share in (0, 1]; 1 is off")

    def warp(self, temperature: float) -> Warp:
        """Return how answers are drawn at one temperature."""
        if temperature == 0:
            return Warp()
        return Warp(temperature, self.top_k, self.top_p, self.min_p)

    def user_warp(self) -> Warp:
        """Return how messages are drawn that the target writes as the user."""
        return Warp(self.user_temperature, top_p=self.user_top_p, min_p=self.user_min_p)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self) | {"temperatures": list(self.temperatures)}
