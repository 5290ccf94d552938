"""The sizes of Llama-like layers, as Hugging Face configs write and omit them."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig

from drafters.errors import UserError
from drafters.layers import Rotary
from drafters.shape import TargetShape

_SIZES = {
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "max_position_embeddings": "max_positions",
}
_READ = (*_SIZES, "rms_norm_eps", "hidden_act", "rope_theta", "rope_scaling", "rope_parameters")
_LARGEST = 1 << 24  # of any size: keeps products of two within int64 and a bad file from our memory


def write_sizes(shape: TargetShape) -> dict[str, Any]:
    """Return the keys of the sizes, rope in the old and the new spelling.

    Engines on transformers 4 read rope_theta and rope_scaling, later ones rope_parameters.
    """
    rope = dict(shape.rope.get("full_attention", shape.rope))
    rope.pop("partial_rotary_factor", None)  # our layers turn heads whole
    scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
    return {
        **{theirs: getattr(shape, ours) for theirs, ours in _SIZES.items()},
        "rms_norm_eps": shape.norm_epsilon,
        "hidden_act": "silu",
        "rope_theta": rope.get("rope_theta", 10000.0),
        "rope_scaling": None if rope.get("rope_type", "default") == "default" else scaling,
        "rope_parameters": rope,
    }


def read_sizes(
    config: Mapping[str, Any], folder: Path, num_layers: int, vocab_size: int
) -> TargetShape:
    """Return the shape that a drafter's layers are built from.

    Args:
        config: of the layers; what it omits is as the class of its model_type has it.
        folder: for messages.
        num_layers: of the target.
        vocab_size: of the target.

    Raises:
        UserError: on a kind of layer or a value that our layers do not have.
    """
    kind = config.get("model_type") or "llama"
    if kind not in ("llama", "qwen2", "qwen3"):
        raise UserError(f"{folder}: model_type is {kind!r}: give layers of llama, qwen2 or qwen3")
    given = {name: config[name] for name in _READ if config.get(name) is not None}
    for name in _SIZES:
        if name in given and not _sensible(given[name]):
            raise UserError(f"{folder}: {name} is {given[name]!r}: give 1 to {_LARGEST}")
    with _readable(folder, "a value in config.json"):
        values = AutoConfig.for_model(kind, **given).to_dict()
    rope = dict(values["rope_parameters"])
    if values["hidden_act"] != "silu":
        raise UserError(f"{folder}: hidden_act is {values['hidden_act']!r}: give silu")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise UserError(f"{folder}: partial_rotary_factor is not 1: heads are turned whole here")
    heads = values["num_attention_heads"]
    sizes: dict[str, Any] = {ours: values.get(theirs) for theirs, ours in _SIZES.items()}
    sizes["head_dim"] = sizes["head_dim"] or values["hidden_size"] // heads
    sizes["num_kv_heads"] = sizes["num_kv_heads"] or heads
    if heads % sizes["num_kv_heads"]:
        raise UserError(f"{folder}: {sizes['num_kv_heads']} key heads do not divide {heads} heads")
    rope.pop("type", None)
    rope.pop("partial_rotary_factor", None)
    shape = TargetShape(
        **sizes,
        num_layers=num_layers,
        vocab_size=vocab_size,
        norm_epsilon=values["rms_norm_eps"],
        rope=rope,
    )
    if not 0 < shape.norm_epsilon < 1:  # JSON knows NaN and infinity
        raise UserError(f"{folder}: rms_norm_eps is {shape.norm_epsilon}: give one from 0 to 1")
    with _readable(folder, f"rope {rope}"):
        Rotary(shape)
    return shape


def flag(config: Mapping[str, Any], name: str, folder: Path, absent: bool | None = False) -> bool:
    """Return a true-or-false key.

    Args:
        config: where it stands.
        name: of the key.
        folder: for messages.
        absent: what its absence means; None: readers disagree, so it must be there.

    Raises:
        UserError: if it is absent and must not be, or something else.
    """
    value = config.get(name, absent)
    if not isinstance(value, bool):
        state = "absent, and its readers disagree on what that means" if value is None else value
        raise UserError(f"{folder}: {name} is {state}: write true or false in config.json")
    return value


@contextmanager
def _readable(folder: Path, what: str) -> Iterator[None]:
    """Turn what transformers raises on odd values into one line."""
    try:
        yield
    except UserError:
        raise
    except (StrictDataclassError, TypeError, ValueError, KeyError, ArithmeticError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{folder}: {what} is not what it must be: {reason}") from error


def _sensible(value: object) -> bool:
    return type(value) is int and 1 <= value <= _LARGEST
