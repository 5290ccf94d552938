"""Endpoint: a server that speaks OpenAI's completions API, such as vLLM, SGLang or llama.cpp.

It is asked only because its address was given. The key goes into one header and nowhere else: into
no message, no file, and to no other address, because redirects are not followed.
"""

import json
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from http.client import HTTPException
from queue import SimpleQueue
from typing import Any, cast
from urllib.parse import urlsplit

from drafters.errors import UserError

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

    Raises:
        UserError: if the address is none, or has a login in it.
    """

    def __init__(self, url: str, key: str | None = None, *, wait: float = _FIRST_WAIT) -> None:
        """Take the address apart."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(f"--endpoint is {url!r}: give an address such as http://127.0.0.1:8000")
        if parts.username or parts.password or parts.query or parts.fragment:
            raise UserError(
                f"--endpoint on {parts.hostname} has more in it than host and path, which would be "
                "stored: give a key with --key-from"
            )
        self.url = url.rstrip("/") + ("" if parts.path.strip("/") else "/v1")
        self.retries = 0
        self._wait = wait
        self._headers = {"Content-Type": "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        self._opener = urllib.request.build_opener(_Stay)

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
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}/{path}", data, self._headers)
        try:
            with self._opener.open(request, timeout=seconds) as answer:
                text = answer.read()
        except urllib.error.HTTPError as error:
            said = _said(error)
            if error.code in _PASSING:
                raise _PassingError(said) from error
            raise UserError(self._refusal(error.code, said)) from error
        except (urllib.error.URLError, HTTPException, OSError) as error:
            raise _PassingError(
                str(getattr(error, "reason", error)) or type(error).__name__
            ) from error
        try:
            found = json.loads(text)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise UserError(f"{self.url}/{path} answers no JSON: give an OpenAI-compatible server")
        return cast("Answer", found)

    def _refusal(self, code: int, said: str) -> str:
        if code in (401, 403):
            what = "refuses the key" if "Authorization" in self._headers else "wants a key"
            return (
                f"{self.url} {what} ({code}): name the environment variable that holds it with "
                "--key-from"
            )
        if code == 404:
            return f"{self.url} has no such place (404): give an OpenAI-compatible server"
        hint = "; lower --max-new-tokens or shorten the prompts" if "context" in said else ""
        return f"{self.url} refuses a request: {said}{hint}"


class _PassingError(Exception):
    """What may be gone on the next try."""


class _Stay(urllib.request.HTTPRedirectHandler):
    """Follow nothing: the key is for one address."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        """Leave a redirect as the error that it is here."""
        return


def _said(error: urllib.error.HTTPError) -> str:
    """Return an error's code and the server's words in one line."""
    try:
        text = error.read(4096).decode(errors="replace")
    except OSError:
        text = ""
    try:
        found = json.loads(text)
        inner = found.get("error", found)
        text = str(inner.get("message", text) if isinstance(inner, dict) else inner)
    except (ValueError, AttributeError):
        pass
    return f"{error.code} {' '.join(text.split())[:300]}".strip()
