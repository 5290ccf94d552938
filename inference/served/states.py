"""States of texts from vLLM, which holds the target in processes of its own."""

import json
import subprocess
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from safetensors.torch import load_file
from torch import Tensor

from drafters.errors import UserError
from inference.served import vllm

_WORKER = Path(__file__).with_name("vllm_states.py")
_END_SECONDS = 60


class StateServer:
    """vLLM with a target, from now until `close` or the end of this process.

    Args:
        root: folder that the engines were built in.
        target: folder in Hugging Face format.
        dtype: that it computes in, float32 or bfloat16.
        longest: tokens of a text.
        tokens: of all texts of a request; they go through in one forward.
        threads: of the CPU.
        options: further arguments of vLLM's LLM, such as tensor_parallel_size.

    Raises:
        UserError: if vLLM is not built here, or does not start; says what it printed.
    """

    def __init__(
        self,
        root: Path,
        target: Path,
        dtype: str,
        *,
        longest: int,
        tokens: int,
        threads: int,
        options: Mapping[str, Any],
    ) -> None:
        """Start it; takes the time in which the weights are read."""
        python = vllm.program(root)
        self._place = tempfile.TemporaryDirectory()
        self._log = (Path(self._place.name) / "log").open("w+")
        own = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": str(threads)}
        own["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        self._child = subprocess.Popen(
            [str(python), str(_WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=vllm.environment(root, threads) | own,
            cwd=self._place.name,
        )
        self.close = weakref.finalize(self, _end, self._child, self._log, self._place)
        settings = {
            "model": str(target),
            "dtype": dtype,
            "max_model_len": longest + 1,  # a text counts as a prompt, to be answered by a token
            "max_num_batched_tokens": max(tokens, longest + 1),
            "max_num_seqs": min(tokens, 256),
            "enforce_eager": True,
            "enable_prefix_caching": False,
            "enable_chunked_prefill": False,
            "skip_tokenizer_init": True,
            "seed": 0,
        }
        self.version: str = self._ask(settings | dict(options))["version"]

    def states(
        self, texts: Sequence[Sequence[int]], layers: Sequence[int]
    ) -> list[tuple[Tensor | None, Tensor]]:
        """Return what the target makes of texts.

        Args:
            texts: ids, at least one each.
            layers: whose outputs are taken, ascending.

        Returns:
            For each text taps [n, K * D] (None without layers) and the last states [n, D].

        Raises:
            UserError: if vLLM cannot; says what it printed.
        """
        file = Path(self._place.name) / "states.safetensors"
        self._ask({"prompts": [*map(list, texts)], "layers": list(layers), "file": str(file)})
        found = load_file(file)
        file.unlink()
        lengths = [len(text) for text in texts]
        taps, last = (found[name].split(lengths) for name in ("taps", "last"))
        return [(t.flatten(1) if layers else None, x) for t, x in zip(taps, last, strict=True)]

    def _ask(self, line: Mapping[str, Any]) -> dict[str, Any]:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        try:
            self._child.stdin.write(json.dumps(line) + "\n")
            self._child.stdin.flush()
        except BrokenPipeError:
            answer = ""
        else:
            answer = self._child.stdout.readline()
        if not answer:
            self._child.wait(_END_SECONDS)
            self._log.seek(0)
            raise UserError(f"vLLM gives no states: {vllm.reason(self._log.read())}")
        return json.loads(answer)


def _end(child: subprocess.Popen[str], log: IO[str], place: tempfile.TemporaryDirectory) -> None:
    """End vLLM by the end of its input."""
    with child:
        try:
            child.communicate(timeout=_END_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
        except BrokenPipeError:
            pass
    log.close()
    place.cleanup()
