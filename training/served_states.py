"""ServedStates: a target's states from an engine that holds it, checked before the first is used.

This process then holds of the target what is read in every step, embedding and head; its layers
stay on the disk and run once, over a few tokens, to say what the engine's states have to be.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from drafters.base import Features
from drafters.errors import UserError
from drafters.target import Target
from training.batches import Document
from training.examples import Example
from training.states import States, with_summary

_CHECKED_TOKENS = 24
# of a middle token's state, beside the same layer's here: the engine rounds at other places
_TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.1}


class StateEngine(Protocol):
    """What holds a target and runs texts through it."""

    @property
    def version(self) -> str:
        """Return its name and version."""
        ...

    def states(
        self, texts: Sequence[Sequence[int]], layers: Sequence[int]
    ) -> list[tuple[Tensor | None, Tensor]]:
        """Return taps [n, K * D], None without layers, and last states [n, D] of each text."""
        ...


class ServedStates:
    """States of documents from an engine.

    Args:
        start: starts the engine; called when the first states are asked for.
        target: the same one, of which embedding and head are here.
        layers: whose outputs are taken.
        dtype: that states are rounded to.
        chunk: positions whose logits exist at the same time.
    """

    def __init__(
        self,
        start: Callable[[], StateEngine],
        target: Target,
        layers: tuple[int, ...],
        dtype: torch.dtype,
        chunk: int,
    ) -> None:
        """Keep the parts."""
        self._start = start
        self.target, self.layers, self.dtype, self.chunk = target, layers, dtype, chunk
        self._engine: StateEngine | None = None

    def of(self, documents: Sequence[Document]) -> list[States]:
        """Return the states of documents.

        Raises:
            UserError: if the engine cannot be had, or its states are not those of this target.
        """
        if self._engine is None:
            engine = self._start()
            check(engine, self.target, self.layers)
            self._engine = engine
        # what stands behind the last label is never read; no text is empty
        texts = [chat.ids[: max(1, chat.needed)].tolist() for chat in documents]
        return [
            with_summary(
                Example("", chat.ids, chat.label_mask),
                None if taps is None else taps.to(self.target.device, self.dtype),
                last.to(self.target.device, self.dtype),
                self.target,
                self.chunk,
            )
            for chat, (taps, last) in zip(
                documents, self._engine.states(texts, self.layers), strict=True
            )
        ]


def check(engine: StateEngine, target: Target, layers: tuple[int, ...]) -> None:
    """Compare an engine's states with their definition: raw outputs of layers, last ones normed.

    Args:
        engine: whose states.
        target: the model itself.
        layers: as they are read.

    Raises:
        UserError: names the state that is another one, and which one it is.
    """
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(target.shape.vocab_size, (_CHECKED_TOKENS,), generator=generator)
    ((taps, last),) = engine.states([ids.tolist()], layers)
    known = _definitions(target, ids)
    parts = () if taps is None else taps.chunk(len(layers), -1)
    found = {_layer(k): part for k, part in zip(layers, parts, strict=True)} | {_LAST: last}
    for name, states in found.items():
        errors = {other: _error(states, truth) for other, truth in known.items()}
        nearest = min(errors, key=lambda other: errors[other])
        if nearest != name and errors[nearest] < errors[name] / 2:
            raise UserError(
                f"{engine.version} gives for {name} of {target.name} what is {nearest} here: it "
                "counts layers otherwise than is known of it, so its states cannot be used"
            )
        if not errors[name] <= _TOLERANCES[target.dtype]:
            raise UserError(
                f"{engine.version} gives for {name} of {target.name} what differs by "
                f"{errors[name]:.2g} of its size from the model's own: give it the same weights "
                "and dtype (target, target_dtype)"
            )


_LAST = "the last state"


def _layer(index: int) -> str:
    return f"the output of layer {index}"


def _definitions(target: Target, ids: Tensor) -> dict[str, Tensor]:
    """Return all states of a text by name."""
    row = ids[None].to(target.device)
    every = tuple(range(target.shape.num_layers))
    document, position = torch.zeros_like(row), torch.arange(len(ids), device=row.device)[None]
    taps, last = target.forward_batch(row, document, position, Features(every, last=True))
    assert taps is not None
    outputs = dict(zip(map(_layer, every), taps[0].chunk(len(every), -1), strict=True))
    return {"the embedding": target.embed(row[0]), **outputs, _LAST: last[0]}


def _error(states: Tensor, truth: Tensor) -> float:
    """Return the difference of a middle token's states, relative to their size.

    The first token's are left out: in many models they are so large that all layers look alike.
    """
    theirs, ours = (x[1:].float().cpu() for x in (states, truth))
    return float(((theirs - ours).norm(dim=-1) / ours.norm(dim=-1)).median())
