"""Real servers of the engines, on the loopback address, for as long as a block runs."""

import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from drafters.cache_root import cache_root
from drafters.errors import UserError
from inference.endpoint import Endpoint
from inference.served import llama_cpp, vllm
from tests.folders import save_tiny_target

ROOT = cache_root() / "engines"
_START_SECONDS = 420  # this machine is slow when it is busy


def folder_for_vllm(place: Path) -> Path:
    """Save a random target with heads as wide as vLLM's kernels take them."""
    sizes = {"num_hidden_layers": 8, "hidden_size": 128, "initializer_range": 0.1}
    return save_tiny_target(place, head_dim=32, **sizes)


@contextmanager
def vllm_server(target: Path, work: Path, *options: str) -> Iterator[str]:
    """Serve a target in float32 by vLLM's CPU build; yields the address."""
    port = _free_port()
    # `vllm serve` asks for the version of a distribution that the CPU build goes by another name
    command = [str(ROOT / "vllm/bin/python"), "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(target), "--served-model-name", "served", "--dtype", "float32"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    command += ["--max-model-len", "1024", "--max-num-seqs", "8", "--enforce-eager", *options]
    with (work / "vllm.log").open("w+") as log:
        child = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=vllm.environment(ROOT, 1) | {"VLLM_CPU_OMP_THREADS_BIND": "nobind"},
            cwd=work,
        )
        try:
            address = f"http://127.0.0.1:{port}"
            _wait(child, address, work / "vllm.log")
            yield address
        finally:
            child.terminate()
            child.wait(timeout=60)


@contextmanager
def llama_server(target: Path, work: Path) -> Iterator[str]:
    """Serve a target in float32 by llama.cpp; yields the address."""
    place = ROOT / "llama.cpp/llama.cpp"
    model = llama_cpp._converted(place, target, None, work / "target.gguf", "float32")
    command = [str(place / "build/bin/llama-server"), "-m", str(model), "-t", "1", "-np", "4"]
    command += ["-c", "4096", "--no-warmup", "--alias", "served"]
    command += ["-ctk", "f32", "-ctv", "f32", "-fa", "off"]  # its cache holds float16 otherwise
    with llama_cpp._serving(command) as address:
        yield address


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _wait(child: subprocess.Popen[bytes], address: str, log: Path) -> None:
    """Wait until the server lists its models."""
    end = time.monotonic() + _START_SECONDS
    while time.monotonic() < end:
        assert child.poll() is None, log.read_text()[-3000:]
        try:
            Endpoint(address).models()
        except UserError:
            time.sleep(1)
        else:
            return
    raise AssertionError(f"it did not start: {log.read_text()[-3000:]}")
