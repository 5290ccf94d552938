"""A hub on this machine: as much of the Hugging Face hub's interface as publishing and loading use.

Repositories live in memory; whoever writes, or reads what is private, must show the token.
"""

import base64
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import unquote, urlsplit

from tests.loopback import listening

TOKEN = "hf_only_for_tests"


@dataclass
class Repository:
    """Files of the only revision."""

    private: bool
    files: dict[str, bytes] = field(default_factory=dict)

    @property
    def sha(self) -> str:
        digest = hashlib.sha1(repr(sorted(self.files.items())).encode())
        return digest.hexdigest()


@dataclass
class FakeHub:
    """What the server holds, and what it was asked: method, path, whether the token was shown."""

    address: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    asked: list[tuple[str, str, bool]] = field(default_factory=list)


class Handler(BaseHTTPRequestHandler):
    """Answer for one hub, given by a subclass."""

    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *given: Any) -> None:
        return

    def do_GET(self) -> None:
        self._route()

    def do_HEAD(self) -> None:
        self._route()

    def do_POST(self) -> None:
        self._route()

    def _route(self) -> None:
        path = unquote(urlsplit(self.path).path)
        shown = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        self.hub.asked.append((self.command, path, shown))
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.command == "POST":
            if path == "/api/validate-yaml":
                self._json({"errors": [], "warnings": []})
            elif not shown:
                self._json({"error": "Invalid credentials"}, 401)
            else:
                self._post(path, body)
            return
        parts = path.strip("/").split("/")
        name = "/".join(parts[2:4]) if parts[0] == "api" else "/".join(parts[:2])
        found = self.hub.repositories.get(name)
        if found is None or (found.private and not shown):
            self._json({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})
        elif parts[0] == "api":
            self._describe(name, found, parts[4:])
        else:
            self._file(found, "/".join(parts[4:]))

    def _post(self, path: str, body: bytes) -> None:
        parts = path.strip("/").split("/")
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            made = name not in self.hub.repositories
            # "private" up to version 1 of the client, "visibility" since
            private = bool(asked.get("private")) or asked.get("visibility") == "private"
            self.hub.repositories.setdefault(name, Repository(private))
            self._json({"url": f"{self.hub.address}/{name}"}, 200 if made else 409)
            return
        found = self.hub.repositories["/".join(parts[2:4])]
        if parts[4] == "preupload":
            files = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                for file in json.loads(body)["files"]
            ]
            self._json({"files": files})
            return
        for line in body.splitlines():
            entry = json.loads(line)
            if entry["key"] == "file":
                value = entry["value"]
                found.files[value["path"]] = base64.b64decode(value["content"])
        url = f"{self.hub.address}/{'/'.join(parts[2:4])}/commit/{found.sha}"
        self._json({"commitUrl": url, "commitOid": found.sha, "success": True})

    def _describe(self, name: str, found: Repository, rest: list[str]) -> None:
        if rest[:1] == ["tree"]:
            self._json(
                [
                    {"type": "file", "path": path, "size": len(data), "oid": _oid(data)}
                    for path, data in found.files.items()
                ]
            )
            return
        siblings = [{"rfilename": path} for path in found.files]
        about = {"_id": "1", "id": name, "modelId": name, "sha": found.sha, "tags": []}
        self._json({**about, "private": found.private, "siblings": siblings})

    def _file(self, found: Repository, path: str) -> None:
        data = found.files.get(path)
        if data is None:
            self._json({"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound"})
            return
        self._send(data, 200, {"ETag": f'"{_oid(data)}"', "X-Repo-Commit": found.sha})

    def _json(self, value: object, code: int = 200, headers: dict[str, str] | None = None) -> None:
        kind = {"Content-Type": "application/json"}
        self._send(json.dumps(value).encode(), code, kind | (headers or {}))

    def _send(self, data: bytes, code: int, headers: dict[str, str]) -> None:
        self.send_response(code)
        for key, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


def _oid(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """Serve an empty hub on the loopback address while the block runs."""
    hub = FakeHub()
    handler = type("HubHandler", (Handler,), {"hub": hub})
    with listening(handler) as hub.address:
        yield hub
