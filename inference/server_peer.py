"""A peer that is a server, such as vLLM, SGLang or llama.cpp: asked as users ask it, part by part.

How it is started (threads, dtype, speculation) is its owner's business. All settings of sampling
are sent; ids are not asked for where they cost the server work, so texts are encoded again then.
"""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from drafters.errors import UserError
from drafters.sampling import Warp
from drafters.target import Target
from inference.endpoint import Endpoint, asking, choice_of, drawing, ids_of
from inference.peer import Peer, PeerOutput, refuse_rules


@dataclass(frozen=True)
class _Answer:
    """One streamed answer: its ids or its text, and when how many tokens had come."""

    ids: list[int]
    text: str
    arrivals: list[tuple[float, int]]


@dataclass(kw_only=True)
class ServerPeer(Peer):
    """A model that a server serves.

    Args:
        endpoint: the server.
        model: as the server calls it.
    """

    endpoint: Endpoint
    model: str

    @classmethod
    def at(cls, name: str, url: str) -> "ServerPeer":
        """Ask a server what it serves.

        Raises:
            UserError: if it is not reached, or serves nothing.
        """
        endpoint = Endpoint(url, given=f"peer {name}")
        served = endpoint.models()
        if not served:
            raise UserError(f"{endpoint.url} serves no model: start it with the target")
        return cls(name, endpoint=endpoint, model=str(served[0]["id"]))

    def check_rows(self, rows: int) -> None:
        """Take any number of rows."""

    def decode(
        self, target: Target, prompts: Sequence[Sequence[int]], most: int, warp: Warp, seed: int
    ) -> list[PeerOutput]:
        """Answer prompts together; see Peer."""
        bodies = [self._body(target, prompt, most, warp, seed) for prompt in prompts]
        start = time.perf_counter()
        with ThreadPoolExecutor(len(bodies)) as pool:
            answers = list(pool.map(self._answer, bodies))
        # all have begun by then: what comes later is decoding, whosever the prefill was
        begun = max(answer.arrivals[0][0] for answer in answers)
        ended = max(answer.arrivals[-1][0] for answer in answers)
        rows = len(answers)
        return [
            PeerOutput(
                answer.ids or target.tokenizer(answer.text, add_special_tokens=False)["input_ids"],
                sum(count for moment, count in answer.arrivals if moment > begun),
                (ended - begun) / rows,
                (ended - start) / rows,
            )
            for answer in answers
        ]

    def _body(
        self, target: Target, prompt: Sequence[int], most: int, warp: Warp, seed: int
    ) -> dict[str, Any]:
        refuse_rules(warp)
        return {
            **asking(self.model, prompt, most),
            **drawing(warp, target.eos_ids),
            "seed": seed,
            "cache_prompt": False,
        }

    def _answer(self, body: dict[str, Any]) -> _Answer:
        ids: list[int] = []
        text, arrivals = "", list[tuple[float, int]]()
        for part in self.endpoint.stream(body):
            if not part.get("choices"):
                continue  # counts at the end
            choice, moment = choice_of(part), time.perf_counter()
            new, said = ids_of(choice) or [], str(choice.get("text", ""))
            if new or said:
                ids, text = ids + new, text + said
                arrivals.append((moment, len(new) or 1))
        if not arrivals:
            raise UserError(f"{self.endpoint.url} answered nothing to a prompt")
        return _Answer(ids, text, arrivals)
