"""A server on this machine that speaks as much of OpenAI's completions as writing chats uses.

A real small target answers, so what comes back is what it would have written here.
"""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

from drafters.sampling import RowRandom, Warp
from drafters.target import Target
from inference.engine import Request
from inference.stop import Stop
from tests.loopback import listening
from training.sampler import EngineSampler, Law

Fault = Callable[[int], tuple[int, dict[str, Any]] | None]
"""Told the number of a request for a completion; an error of the server, or None."""


@dataclass
class FakeServer:
    """What the server answers with, and what it was asked.

    Args:
        target: decodes.
        ids: where ids are returned: token_ids, logprobs or nowhere.
        key: that must be shown; "" for none.
        limit: what it says a context may have; None: it does not say.
        fault: errors on purpose.
        change: made to a choice before it is sent.
    """

    target: Target
    ids: str = "token_ids"
    key: str = ""
    limit: int | None = None
    fault: Fault = lambda _: None
    change: Callable[[dict[str, Any]], None] = lambda _: None
    address: str = ""
    asked: list[dict[str, Any]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def complete(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Answer one request."""
        with self.lock:
            self.asked.append(body)
            wrong = self.fault(len(self.asked))
            return wrong or (200, self._answer(body))

    def _answer(self, body: dict[str, Any]) -> dict[str, Any]:
        stop = Stop(
            frozenset(body.get("stop_token_ids", [])),
            tuple(body.get("stop", ())),
            self.target.tokenizer,
        )
        warp = Warp(body["temperature"])
        request = Request(body["prompt"], body["max_tokens"], RowRandom(body.get("seed", 0)))
        sampler = EngineSampler(self.target, 1)
        (sample,) = sampler.run([request], Law(warp, stop), lambda _: None)
        ids = sample.ids
        said = ids[:-1] if ids[-1] in stop.eos_ids else ids
        choice: dict[str, Any] = {
            "text": self.target.tokenizer.decode(said, skip_special_tokens=False),
            "finish_reason": sample.finish_reason,
            "logprobs": None,
        }
        if self.ids == "token_ids" and body.get("return_token_ids"):
            choice["token_ids"] = ids
        if self.ids == "logprobs" and body.get("logprobs"):
            choice["logprobs"] = {"content": [{"id": token} for token in ids]}
        self.change(choice)
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": len(ids)}
        return {"choices": [choice], "usage": usage}

    def parts(self, answer: dict[str, Any]) -> list[dict[str, Any]]:
        """Return an answer as it is streamed: a token a part, then what was counted."""
        choice = answer["choices"][0]
        ids = choice.get("token_ids")
        if ids is None:
            said = [{"text": letter} for letter in choice["text"]]
        else:
            said = [
                {"text": self.target.tokenizer.decode([token]), "token_ids": [token]}
                for token in ids
            ]
        counted = {"choices": [], "usage": answer["usage"]}
        return [*({"choices": [one]} for one in said), counted]


@contextmanager
def serving(server: FakeServer) -> Iterator[FakeServer]:
    """Run the server on the loopback address while the block runs."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any, **__: Any) -> None:
            return

        def do_GET(self) -> None:
            model: dict[str, Any] = {"id": "served"}
            if server.limit is not None:
                model["max_model_len"] = server.limit
            known = self.path == "/v1/models"
            self._say(200 if known else 404, {"data": [model]} if known else {"detail": "none"})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            code, answer = server.complete(body)
            if body.get("stream") and code == 200:
                self._stream(server.parts(answer))
            else:
                self._say(code, answer)

        def _stream(self, parts: list[dict[str, Any]]) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            for part in parts:
                self.wfile.write(f"data: {json.dumps(part)}\n\n".encode())
                self.wfile.flush()
            self.wfile.write(b"data: [DONE]\n\n")
            self.close_connection = True

        def _say(self, code: int, value: dict[str, Any]) -> None:
            if server.key and self.headers.get("Authorization") != f"Bearer {server.key}":
                code, value = 401, {"error": "Unauthorized"}
            if code == 0:  # hangs up
                self.close_connection = True
                return
            data = json.dumps(value).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    with listening(Handler) as server.address:
        yield server
