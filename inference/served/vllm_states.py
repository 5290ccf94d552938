"""Runs in vLLM's interpreter, never in ours: prompts come in, the target's states go out.

python vllm_states.py < LINES > ANSWERS

The first line holds the arguments of vLLM's LLM, every other one a request: prompts, layers and a
file. Each is answered by a line, a request once the file holds `last` [N, D] and `taps` [N, K, D]
of all its prompts' tokens in order. What vLLM prints goes to stderr.

States are those that vLLM hands to its own drafters: the model's output, which its head reads, and
the outputs of layers by the interface that it has for EAGLE-3. A hook on the model takes them; the
prompts of a request are told apart by their positions and found by their ids.
"""

# vLLM lies in another environment: nothing here can be checked against its types
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false

import json
import os
import sys
from importlib import import_module
from itertools import pairwise

import torch
from safetensors.torch import save_file


def main() -> None:
    """Answer until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    vllm = import_module("vllm")  # of the environment that this runs in
    engine = vllm.LLM(**json.loads(sys.stdin.readline()))
    _say(answers, {"version": f"vLLM {vllm.__version__}"})
    once = vllm.SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
    for line in sys.stdin:
        asked = json.loads(line)
        prompts = asked["prompts"]
        engine.collective_rpc(watch, args=(asked["layers"],))
        engine.generate([{"prompt_token_ids": p} for p in prompts], once, use_tqdm=False)
        engine.collective_rpc(write, args=(prompts, asked["file"]))
        _say(answers, {"file": asked["file"]})


def watch(worker, layers):
    """Keep the states of every forward from now on, those of these layers among them."""
    model = worker.get_model()
    if hasattr(model, "set_aux_hidden_state_layers"):
        # there 0 is the embedding and k the output of the k-th layer
        model.set_aux_hidden_state_layers(tuple(layer + 1 for layer in layers))
    elif layers:
        kind = type(model).__name__
        raise ValueError(f"its {kind} gives no outputs of layers, only the last state")
    if not hasattr(model, "states_seen"):
        # all devices of a target come to the same states: one keeps and writes them
        model.states_seen = None if worker.rank else []
        model.register_forward_hook(_keep, with_kwargs=True)


def write(worker, prompts, file):
    """Write what was seen of these prompts."""
    if worker.rank:
        return
    model = worker.get_model()
    seen, model.states_seen = model.states_seen, []
    found = {}
    for ids, positions, states in seen:
        starts = (positions == 0).nonzero()[:, 0].tolist()
        for start, end in pairwise([*starts, len(ids)]):
            found[tuple(ids[start:end].tolist())] = states[start:end]
    if missing := [prompt for prompt in prompts if tuple(prompt) not in found]:
        raise ValueError(f"{len(missing)} of {len(prompts)} prompts went through it in pieces")
    states = torch.cat([found[tuple(prompt)] for prompt in prompts])
    parts = {"last": states[:, 0], "taps": states[:, 1:]}
    save_file({name: part.contiguous() for name, part in parts.items()}, file)


def _keep(model, _, given, out):
    """Keep copies; the engine goes on with the last state alone, as without a drafter."""
    last, taps = out if isinstance(out, tuple) else (out, [])
    if model.states_seen is None:
        return last
    ids = given["input_ids"].to("cpu", copy=True)
    positions = given["positions"].reshape(-1, len(ids))[0].to("cpu", copy=True)
    model.states_seen.append((ids, positions, torch.stack([last, *taps], 1).cpu()))
    return last


def _say(answers, value):
    answers.write(json.dumps(value) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
