"""Which engine serves which family: the format that it reads and what it calls the method."""

from typing import NamedTuple

from drafters.errors import UserError


class Serving(NamedTuple):
    """How an engine takes a family.

    Args:
        format: that the engine reads.
        method: the engine's name of it.
    """

    format: str
    method: str


SERVED: dict[tuple[str, str], Serving] = {
    ("vllm", "eagle"): Serving("vllm", "eagle3"),
    ("vllm", "eagle1"): Serving("vllm", "eagle"),
    ("vllm", "medusa"): Serving("medusa-vllm", "medusa"),
    ("vllm", "standalone"): Serving("vllm", "draft_model"),
    ("vllm", "dflash"): Serving("vllm", "dflash"),
    ("vllm", "dspark"): Serving("vllm", "dspark"),
    ("llama.cpp", "eagle"): Serving("vllm", "draft-eagle3"),
    ("llama.cpp", "standalone"): Serving("transformers", "draft-simple"),
    ("llama.cpp", "dflash"): Serving("zlab", "draft-dflash"),
    ("llama.cpp", "dspark"): Serving("deepspec", "draft-dspark"),
}


def serving(engine: str, family: str) -> Serving:
    """Return how an engine serves a family.

    Raises:
        UserError: if it does not, or no format of ours carries the family there.
    """
    if (engine, family) not in SERVED:
        known = ", ".join(sorted(name for place, name in SERVED if place == engine))
        raise UserError(f"{engine} serves no {family} drafters of ours: give one of {known}")
    return SERVED[engine, family]
