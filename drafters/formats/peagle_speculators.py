"""P-EAGLE as the speculators library writes it and vLLM reads it.

EAGLE-3's file with two vectors more: `mask_hidden` stands for an unknown state, the row of
`mask_token_id` in the file's embedding for an unknown token. Absent, norm_before_residual is false
for all readers. Source: speculators' peagle and vLLM's update_peagle.
"""

from dataclasses import replace

from drafters.errors import UserError
from drafters.formats import eagle3_speculators
from drafters.formats.dialect import Dialect, Ours, Theirs, needed
from drafters.formats.eagle3 import EMBEDDING, OPTIONS
from drafters.formats.foreign import Foreign
from drafters.formats.stand_in import embedding_with, read_stand_in, stand_in
from drafters.target import Target

FAMILY = KIND = "peagle"
_STATE, _TOKEN, _THEIRS = "unknown_taps", "unknown_token", "mask_hidden"


def _write(ours: Ours, target: Target | None) -> Theirs:
    target = needed(target, "the embedding")
    eagle = {name: t for name, t in ours.tensors.items() if name not in (_STATE, _TOKEN)}
    theirs = eagle3_speculators.write(replace(ours, tensors=eagle), target)
    place = stand_in(ours.ids, ours.shape.vocab_size)
    tensors = theirs.tensors | {
        _THEIRS: ours.tensors[_STATE].view(1, 1, -1).clone(),
        EMBEDDING: embedding_with(ours.tensors[_TOKEN], place, target, ours.dtype),
    }
    config = theirs.config | {
        "architectures": ["PEagleSpeculator"],
        "speculators_model_type": KIND,
        "speculators_version": "0.9.0",
        "speculators_config": theirs.config["speculators_config"] | {"algorithm": KIND},
        "embed_requires_grad": True,
        "mask_token_id": place,
    }
    return replace(theirs, config=config, tensors=tensors)


def _claims(foreign: Foreign) -> bool:
    return foreign.config.get("speculators_model_type") == KIND


def _read(foreign: Foreign, target: Target) -> Ours:
    ours = eagle3_speculators.read_nested(
        foreign, target, residual_absent=False, besides=(_THEIRS, EMBEDDING)
    )
    wanted = (1, 1, ours.tensors["fusion.weight"].shape[1])
    if foreign.shape(_THEIRS) != wanted:
        raise UserError(
            f"{foreign.folder}: {_THEIRS} is {list(foreign.shape(_THEIRS))}, not {list(wanted)}"
        )
    token, lost = read_stand_in(foreign, foreign.config.get("mask_token_id"), target)
    state = foreign.load([_THEIRS])[_THEIRS].flatten()
    tensors = {**ours.tensors, _STATE: state, _TOKEN: token}
    return replace(ours, family=FAMILY, tensors=tensors, lost=ours.lost + lost)


_OPTIONS = OPTIONS | {"keep", "keep_least"}
DIALECTS = (
    Dialect("speculators", FAMILY, _OPTIONS, _write, _read, _claims),
    Dialect("vllm", FAMILY, _OPTIONS, _write),
)
