"""Endpoint: a server that speaks OpenAI's completions API, such as vLLM, SGLang or llama.cpp.

It is asked only because its address was given. The key goes into one header and nowhere else: into
no message, no file, and to no other address, because redirects are not followed.
"""

import json
import threading
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from queue import SimpleQueue
from typing import Any, cast
from urllib.parse import urlsplit

import httpx

from drafters.errors import UserError
from drafters.sampling import Warp

_PASSING = {408, 429, 500, 502, 503, 504}  # what a busy or restarting server answers
_TRIES = 7  # a minute of waiting in all
_FIRST_WAIT, _LONGEST_WAIT = 1.0, 30.0  # seconds; doubled from try to try
_ASK_SECONDS, _ANSWER_SECONDS = 20, 3600

Answer = dict[str, Any]


class Endpoint:
    """A server.

    Args:
        url: such as http://127.0.0.1:8000; /v1 is added where it has no path.
        key: shown to the server; None: nothing is.
        wait: seconds before the second try.
        given: what the address was given as, for messages.

    Raises:
        UserError: if the address is none, or has a login in it.
    """

    def __init__(
        self,
        url: str,
        key: str | None = None,
        *,
        wait: float = _FIRST_WAIT,
        given: str = "--endpoint",
    ) -> None:
        """Take the address apart."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(f"{given} is {url!r}: give an address such as http://127.0.0.1:8000")
        if parts.username or parts.password or parts.query or parts.fragment:
            raise UserError(
                f"{given} on {parts.hostname} has more in it than host and path, which would be "
                "stored: make_chats.py takes a key with --key-from"
            )
        self.url = url.rstrip("/") + ("" if parts.path.strip("/") else "/v1")
        self.retries = 0
        self._wait = wait
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        # as many connections as requests are in flight, each closed behind its answer
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._client = httpx.Client(headers=headers, limits=limits, follow_redirects=False)

    def models(self) -> list[Mapping[str, Any]]:
        """Return what it serves, as it describes it; asked once, without a second try.

        Raises:
            UserError: if it cannot be reached, refuses, or is something else.
        """
        try:
            found = self._ask("models", None, _ASK_SECONDS).get("data")
        except _PassingError as error:
            raise UserError(f"{self.url} is not reached: {error}; is the server up?") from error
        if not isinstance(found, list) or not all(isinstance(m, dict) and "id" in m for m in found):
            raise UserError(f"{self.url} lists no models: give an OpenAI-compatible server")
        return cast("list[Mapping[str, Any]]", found)

    def complete(self, body: Mapping[str, Any]) -> Answer:
        """Return the answer to one request for a completion; tried again after a while.

        Raises:
            UserError: if the server refuses it, or is gone for longer.
        """
        reason = ""
        for count in range(_TRIES):
            if count:
                self.retries += 1
                time.sleep(min(_LONGEST_WAIT, self._wait * 2.0 ** (count - 1)))
            try:
                return self._ask("completions", body, _ANSWER_SECONDS)
            except _PassingError as error:
                reason = str(error)
        raise UserError(
            f"{self.url} gave no answer in {_TRIES} tries: {reason}; the same command goes on "
            "where this one stopped"
        )

    def stream(self, body: Mapping[str, Any]) -> Iterator[Answer]:
        """Yield the parts of one answer as they come; asked once, without a second try.

        Raises:
            UserError: if the server refuses it, or breaks off.
        """
        place, asked = f"{self.url}/completions", {**body, "stream": True}
        try:
            with self._client.stream("POST", place, json=asked, timeout=_ANSWER_SECONDS) as answer:
                if not answer.is_success:
                    answer.read()
                    raise UserError(self._refusal(answer.status_code, _said(answer)))
                for line in answer.iter_lines():
                    name, _, data = line.partition(":")
                    if name == "data" and data.strip() != "[DONE]":
                        yield cast("Answer", json.loads(data))
        except (httpx.HTTPError, ValueError) as error:
            reason = str(error) or type(error).__name__
            raise UserError(f"{self.url} broke off an answer: {reason}") from error

    def complete_all(
        self, bodies: Sequence[Mapping[str, Any]], in_flight: int
    ) -> Iterator[tuple[int, Answer]]:
        """Yield the number and the answer of every request as they come.

        Args:
            bodies: of the requests.
            in_flight: how many the server has at a time.

        Raises:
            UserError: as `complete`, of the first one that fails.
        """
        todo = deque(enumerate(bodies))
        done: SimpleQueue[tuple[int, Answer | BaseException]] = SimpleQueue()

        def work() -> None:
            while todo:
                try:
                    number, body = todo.popleft()
                except IndexError:  # another thread was faster
                    return
                try:
                    done.put((number, self.complete(body)))
                except BaseException as error:  # raised where the answers are read
                    done.put((number, error))

        # daemons: an interrupted run does not wait for answers that nobody will read
        for _ in range(min(in_flight, len(bodies))):
            threading.Thread(target=work, daemon=True).start()
        try:
            for _ in bodies:
                number, answer = done.get()
                if isinstance(answer, BaseException):
                    raise answer
                yield number, answer
        finally:
            todo.clear()

    def _ask(self, path: str, body: Mapping[str, Any] | None, seconds: float) -> Answer:
        """Send one request.

        Raises:
            UserError: if the server refuses it.
            _PassingError: if it may answer later.
        """
        method = "GET" if body is None else "POST"
        try:
            answer = self._client.request(method, f"{self.url}/{path}", json=body, timeout=seconds)
        except httpx.HTTPError as error:
            raise _PassingError(str(error) or type(error).__name__) from error
        if not answer.is_success:
            if answer.status_code in _PASSING:
                raise _PassingError(_said(answer))
            raise UserError(self._refusal(answer.status_code, _said(answer)))
        found = _values(answer)
        if not isinstance(found, dict):
            raise UserError(f"{self.url}/{path} answers no JSON: give an OpenAI-compatible server")
        return cast("Answer", found)

    def _refusal(self, code: int, said: str) -> str:
        if code in (401, 403):
            what = "refuses the key" if "Authorization" in self._client.headers else "wants a key"
            return (
                f"{self.url} {what} ({code}): name the environment variable that holds it with "
                "--key-from"
            )
        if code == 404:
            return f"{self.url} has no such place (404): give an OpenAI-compatible server"
        hint = "; lower --max-new-tokens or shorten the prompts" if "context" in said else ""
        return f"{self.url} refuses a request: {said}{hint}"


def asking(model: str, prompt: Sequence[int], count: int) -> Answer:
    """Return a request for so many greedy tokens behind a prompt, ids in the answer."""
    return {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": count,
        "temperature": 0.0,
        "repetition_penalty": 1.0,
        "skip_special_tokens": False,
        "return_token_ids": True,
    }


def drawing(warp: Warp, eos_ids: Collection[int]) -> Answer:
    """Return how a request says that it is drawn and ends: nothing is left to the server."""
    return {
        "temperature": warp.temperature,
        "top_k": warp.top_k or -1,
        "top_p": warp.top_p,
        "min_p": warp.min_p,
        "stop_token_ids": sorted(eos_ids),
    }


def choice_of(answer: Answer) -> dict[str, Any]:
    """Return what was completed, of an answer or a part of one.

    Raises:
        UserError: if nothing was.
    """
    choices = answer.get("choices")
    first: Any = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(first, dict):
        raise UserError(f"the server answers without a choice: {str(answer)[:200]}")
    return cast("dict[str, Any]", first)


def ids_of(choice: Mapping[str, Any]) -> list[int] | None:
    """Return the ids that were sampled, if they are there."""
    ids = choice.get("token_ids")
    if isinstance(ids, list):
        return cast("list[int]", ids)
    logprobs = choice.get("logprobs")
    content = cast("dict[str, Any]", logprobs).get("content") if logprobs else None
    if isinstance(content, list) and all("id" in token for token in cast("list[Any]", content)):
        return [token["id"] for token in cast("list[dict[str, Any]]", content)]
    return None


def usage_of(answer: Answer, name: str) -> int | None:
    """Return a number of tokens that the server counted, if it says so."""
    usage = answer.get("usage")
    return cast("dict[str, Any]", usage).get(name) if isinstance(usage, dict) else None


class _PassingError(Exception):
    """What may be gone on the next try."""


def _values(answer: httpx.Response) -> object:
    """Return what the server's JSON says, None if it is none."""
    try:
        return answer.json()
    except ValueError:
        return None


def _said(answer: httpx.Response) -> str:
    """Return an error's code and the server's words in one line."""
    found, text = _values(answer), answer.text
    if isinstance(found, dict):
        inner = cast("Answer", found).get("error", cast("Answer", found))
        text = str(cast("Answer", inner).get("message", text) if isinstance(inner, dict) else inner)
    return f"{answer.status_code} {' '.join(text.split())[:300]}".strip()
