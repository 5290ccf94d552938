"""llama.cpp: folders become GGUF by its own converter, its server decodes and counts.

It says how many drafted tokens were accepted, not at which position.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from drafters.errors import UserError
from inference.served.job import Job, Served

_TYPES = {"float32": "f32", "bfloat16": "bf16"}
# its default cache is float16 and its fused attention sums in it, which no float32 job means
_CACHE = {"float32": ["-ctk", "f32", "-ctv", "f32", "-fa", "off"], "bfloat16": []}
_DRAFT_CACHE = {"float32": ["-ctkd", "f32", "-ctvd", "f32"], "bfloat16": []}
_START_SECONDS, _ANSWER_SECONDS = 120, 600


def program(root: Path) -> Path:
    """Return the server.

    Raises:
        UserError: if llama.cpp is not built here.
    """
    server = root / "llama.cpp" / "llama.cpp" / "build" / "bin" / "llama-server"
    if not server.exists():
        raise UserError(f"llama.cpp is not in {root}: run `make engines`")
    return server


def run(root: Path, job: Job) -> Served:
    """Decode a job.

    Raises:
        UserError: if llama.cpp is not built here, its converter refuses a folder or its server
            does not start.
    """
    server = program(root)
    place = server.parents[2]
    with tempfile.TemporaryDirectory() as work:
        target = _converted(place, job.target, None, Path(work) / "target.gguf", job.dtype)
        command = [str(server), "-m", str(target), "-t", str(job.threads), "-np", "1"]
        longest = max(map(len, job.prompts)) + job.max_new_tokens + job.gamma + 8
        command += ["-c", str(longest), "--no-warmup", *_CACHE[job.dtype]]
        if job.drafter is not None:
            out = Path(work) / "drafter.gguf"
            drafter = _converted(place, job.drafter, job.target, out, job.dtype)
            command += ["-md", str(drafter), "--spec-type", job.method]
            command += ["--spec-draft-n-max", str(job.gamma), *_DRAFT_CACHE[job.dtype]]
        with _serving(command) as address:
            _ask(address, job.prompts[0], 8)
            start = time.perf_counter()
            answers = [_ask(address, prompt, job.max_new_tokens) for prompt in job.prompts]
            seconds = time.perf_counter() - start
    counts = [answer["timings"] for answer in answers]
    return Served(
        version=_version(server),
        outputs=[answer["tokens"] for answer in answers],
        seconds=seconds,
        drafted=sum(count.get("draft_n", 0) for count in counts),
        accepted=sum(count.get("draft_n_accepted", 0) for count in counts),
    )


def _converted(place: Path, folder: Path, target: Path | None, out: Path, dtype: str) -> Path:
    """Write a folder as GGUF by llama.cpp's own converter."""
    command = [_python(place), str(place / "convert_hf_to_gguf.py"), str(folder)]
    command += ["--outtype", _TYPES[dtype], "--outfile", str(out)]
    if target is not None:
        command += ["--target-model-dir", str(target)]
    environment = os.environ | {"PYTHONPATH": str(place / "gguf-py"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode or not out.exists():
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise UserError(f"llama.cpp cannot convert {folder}: {(lines or ['no word'])[-1][:400]}")
    return out


def _python(place: Path) -> str:
    """Return an interpreter with what the converter imports: vLLM's environment has all of it."""
    beside = place.parents[1] / "vllm" / "bin" / "python"
    return str(beside) if beside.exists() else sys.executable


@contextmanager
def _serving(command: list[str]) -> Iterator[str]:
    """Run the server until the block ends; yields its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile("w+") as log:
        child = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            for _ in range(_START_SECONDS * 4):
                if child.poll() is not None or _healthy(address):
                    break
                time.sleep(0.25)
            if child.poll() is not None or not _healthy(address):
                log.seek(0)
                lines = [line.strip() for line in log if "error" in line.lower() or "fail" in line]
                raise UserError(f"llama.cpp did not start: {(lines or ['no word'])[0][:400]}")
            yield address
        finally:
            child.terminate()
            child.wait(timeout=30)


def _healthy(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=2) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


def _ask(address: str, prompt: list[int], count: int) -> dict[str, Any]:
    body = {
        "prompt": prompt,
        "n_predict": count,
        "temperature": 0.0,
        "top_k": 1,
        "return_tokens": True,
        "cache_prompt": False,
    }
    request = urllib.request.Request(
        f"{address}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=_ANSWER_SECONDS) as answer:
        return json.loads(answer.read())


def _version(server: Path) -> str:
    done = subprocess.run([str(server), "--version"], capture_output=True, text=True, check=False)
    lines = (done.stdout + done.stderr).splitlines()
    return "llama.cpp " + next((x.split(":", 1)[1].strip() for x in lines if "version" in x), "?")
