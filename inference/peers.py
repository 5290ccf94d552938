"""Peers: Hugging Face's own generate, timed in the same turns as our decoding.

A drafter's speed-up is one over our own plain decoding. What plain decoding is worth beside the
library that people come from is a figure of its own: the two are never multiplied.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import StoppingCriteria

from drafters.errors import UserError
from drafters.loading import load_model
from drafters.sampling import Warp
from drafters.target import Target

LOOKUP_TOKENS = 10  # what transformers' documentation drafts from the prompt


@dataclass(frozen=True)
class PeerOutput:
    """What one prompt got; prompts that were answered together share the time evenly.

    Args:
        ids: new tokens.
        decoded: how many of them came after the first step, which holds the prefill.
        seconds: of those.
        total_seconds: the prefill included.
    """

    ids: list[int]
    decoded: int
    seconds: float
    total_seconds: float


@dataclass
class Peer:
    """One way to call generate, and what it did.

    Args:
        name: "hf", "hf-lookup" or "hf-assistant=FOLDER".
        options: for generate.
        outputs: by prompt, one a repeat.
    """

    name: str
    options: dict[str, Any]
    outputs: dict[int, list[PeerOutput]] = field(default_factory=dict[int, list[PeerOutput]])

    @classmethod
    def parse(cls, text: str, dtype: torch.dtype) -> "Peer":
        """Read a peer's name; an assistant is loaded in this dtype.

        Raises:
            UserError: if there is no such peer, or no model in the folder.
        """
        kind, _, folder = text.partition("=")
        if text == "hf":
            return cls(text, {})
        if text == "hf-lookup":
            return cls(text, {"prompt_lookup_num_tokens": LOOKUP_TOKENS})
        if kind != "hf-assistant" or not folder:
            raise UserError(f"peer is {text!r}: give hf, hf-lookup or hf-assistant=FOLDER")
        model = load_model(folder, "assistant", dtype)
        return cls(text, {"assistant_model": model})

    def check_rows(self, rows: int) -> None:
        """Raise UserError if so many prompts cannot be answered together."""
        if rows > 1 and self.options:
            raise UserError(
                f"peer {self.name} answers one prompt at a time and rows is {rows}: give 1, or "
                "the peer hf"
            )

    def decode(
        self, target: Target, prompts: Sequence[Sequence[int]], most: int, warp: Warp, seed: int
    ) -> list[PeerOutput]:
        """Answer prompts together, with at most so many new tokens each."""
        ids, mask = _left_padded(prompts)
        clock = _Clock()
        torch.manual_seed(seed)
        start = time.perf_counter()
        found = target.model.generate(
            ids.to(target.device),
            attention_mask=mask.to(target.device),
            max_new_tokens=most,
            pad_token_id=next(iter(sorted(target.eos_ids)), 0),
            stopping_criteria=[clock],
            **_drawn(warp),
            **self.options,
        )
        total = time.perf_counter() - start
        first_length, first_time = clock.first
        rows = len(prompts)
        outputs: list[PeerOutput] = []
        for new in found[:, ids.shape[1] :].tolist():
            ends = (place for place, token in enumerate(new, 1) if token in target.eos_ids)
            kept = new[: next(ends, len(new))]
            decoded = ids.shape[1] + len(kept) - first_length
            outputs.append(
                PeerOutput(kept, decoded, (clock.last - first_time) / rows, total / rows)
            )
        return outputs

    def take(self, prompts: Sequence[int], outputs: Sequence[PeerOutput]) -> None:
        """Keep what prompts got."""
        for prompt, output in zip(prompts, outputs, strict=True):
            self.outputs.setdefault(prompt, []).append(output)


def _left_padded(prompts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and attention mask [R, T] of prompts that end together."""
    longest = max(len(prompt) for prompt in prompts)
    ids = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids), torch.tensor(mask)


class _Clock(StoppingCriteria):
    """Notes when tokens come; stops nothing."""

    def __init__(self) -> None:
        self.first = (0, 0.0)
        self.last = 0.0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:
        self.last = time.perf_counter()
        if not self.first[0]:
            self.first = (input_ids.shape[1], self.last)
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def _drawn(warp: Warp) -> dict[str, Any]:
    """Return how generate draws what this warp draws.

    Raises:
        UserError: if the warp has rules, which peers are not measured with.
    """
    if warp.rules is not None:
        raise UserError("peers are measured without penalties, biases or constraints: drop either")
    if warp.greedy:
        return {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}
    return {
        "do_sample": True,
        "temperature": warp.temperature,
        "top_k": warp.top_k,
        "top_p": warp.top_p,
        "min_p": warp.min_p or None,
    }
