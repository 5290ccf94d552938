"""Peers: Hugging Face's own generate, and servers, by the names that people give them."""

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
from inference.peer import Peer, PeerOutput, refuse_rules
from inference.server_peer import ServerPeer

LOOKUP_TOKENS = 10  # what transformers' documentation drafts from the prompt


def parse_peer(text: str, dtype: torch.dtype) -> Peer:
    """Read a peer's name: hf, hf-lookup, hf-assistant=FOLDER or NAME=http://HOST:PORT.

    Args:
        text: as given.
        dtype: that an assistant is loaded in.

    Raises:
        UserError: if there is no such peer, no model in the folder or no server.
    """
    name, _, place = text.partition("=")
    if place.startswith(("http://", "https://")) and name:
        return ServerPeer.at(name, place)
    if text == "hf":
        return GeneratePeer(text)
    if text == "hf-lookup":
        return GeneratePeer(text, options={"prompt_lookup_num_tokens": LOOKUP_TOKENS})
    if name != "hf-assistant" or not place:
        raise UserError(
            f"peer is {text!r}: give hf, hf-lookup, hf-assistant=FOLDER, or NAME=http://HOST:PORT "
            "of a server"
        )
    model = load_model(place, "assistant", dtype)
    return GeneratePeer(text, options={"assistant_model": model})


@dataclass
class GeneratePeer(Peer):
    """One way to call generate.

    Args:
        options: for generate; with any it speculates.
    """

    options: dict[str, Any] = field(default_factory=dict[str, Any])

    def check_rows(self, rows: int) -> None:
        """Refuse several rows where it speculates; see Peer."""
        if rows > 1 and self.options:
            raise UserError(
                f"peer {self.name} answers one prompt at a time and rows is {rows}: give 1, or "
                "the peer hf"
            )

    def decode(
        self, target: Target, prompts: Sequence[Sequence[int]], most: int, warp: Warp, seed: int
    ) -> list[PeerOutput]:
        """Answer prompts together; see Peer."""
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
    refuse_rules(warp)
    if warp.greedy:
        return {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}
    return {
        "do_sample": True,
        "temperature": warp.temperature,
        "top_k": warp.top_k,
        "top_p": warp.top_p,
        "min_p": warp.min_p or None,
    }
