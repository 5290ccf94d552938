"""TargetShape: the numbers of a target that a drafter is built from, saved with every drafter."""

from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from drafters.errors import UserError

_INNER = ("intermediate_size", "ffn_dim", "n_inner")  # how families call the width of their MLP


@dataclass(frozen=True)
class TargetShape:
    """Sizes of a target.

    Args:
        vocab_size: rows of its embedding (not the tokenizer's length).
        max_positions: of a context. With longrope the shorter, original length: beyond it every
            position turns otherwise, those in the cache too.
        rope: the config's rope_parameters (rope_type, rope_theta, ...).
        norm_epsilon: of its norms.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    norm_epsilon: float = 1e-5
    rope: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, config: Any, vocab_size: int) -> "TargetShape":
        """Read the sizes from a Hugging Face text config.

        Raises:
            UserError: if it says nothing about the length of a context.
        """
        values = config.to_dict()
        heads = config.num_attention_heads
        hidden = config.hidden_size
        rope = values.get("rope_parameters") or {"rope_type": "default", "rope_theta": 10000.0}
        epsilon = values.get("rms_norm_eps", values.get("layer_norm_epsilon", 1e-5))
        return cls(
            hidden_size=hidden,
            intermediate_size=next(filter(None, map(values.get, _INNER)), 4 * hidden),
            num_layers=config.num_hidden_layers,
            num_heads=heads,
            num_kv_heads=values.get("num_key_value_heads") or heads,
            head_dim=values.get("head_dim") or hidden // heads,
            vocab_size=vocab_size,
            max_positions=_max_positions(config, rope),
            norm_epsilon=epsilon,
            rope=rope,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)

    @property
    def default_taps(self) -> tuple[int, int, int]:
        """Return the usual low, middle and high layer, as outputs of 0-based layers.

        Raises:
            UserError: if the target is too shallow for three distinct ones.
        """
        count = self.num_layers
        if count < 7:
            raise UserError(
                f"the default taps need a target of 7 layers or more, this one has {count}: "
                f"name the layers yourself, distinct ids from 0 to {count - 1}"
            )
        return usual_taps(count)

    def taps(self, given: tuple[int, ...] | None) -> tuple[int, ...]:
        """Return the layers that a drafter reads: those given, or the usual ones.

        Raises:
            UserError: if they are not distinct, ascending and of this target.
        """
        if given is None:
            return self.default_taps
        ascending = all(a < b for a, b in pairwise(given))
        if not given or not ascending or given[0] < 0 or given[-1] >= self.num_layers:
            raise UserError(
                f"taps are {list(given)}: give one or more distinct layers, ascending, from 0 to "
                f"{self.num_layers - 1}"
            )
        return given


def usual_taps(num_layers: int) -> tuple[int, int, int]:
    """Return a low, a middle and a high layer, as EAGLE-3 taps them."""
    return (1, num_layers // 2 - 1, num_layers - 4)


def _max_positions(config: Any, rope: dict[str, Any]) -> int:
    longest = getattr(config, "max_position_embeddings", None)
    if longest is None:
        raise UserError(
            f"target of type {config.model_type}: its config names no max_position_embeddings, so "
            "nobody knows how long a context it reads; give a model of a family that does"
        )
    if rope.get("rope_type") != "longrope":
        return longest
    original = rope.get("original_max_position_embeddings")
    return min(longest, original or config.to_dict()["original_max_position_embeddings"])
