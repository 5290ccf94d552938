"""Runs in vLLM's interpreter, never in ours: reads a job from stdin, writes what came of it.

python vllm_worker.py ANSWER.json < JOB.json

What was drafted is read where vLLM judges it: a hook on its rejection sampler keeps the drafted
and the emitted ids of every round.
"""

# vLLM lies in another environment: nothing here can be checked against its types
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false

import json
import sys
import time
from importlib import import_module
from pathlib import Path


def main() -> None:
    """Decode a job's prompts one after the other."""
    job = json.load(sys.stdin)
    vllm = import_module("vllm")  # of the environment that this runs in

    settings = {
        "model": job["target"],
        "dtype": job["dtype"],
        "max_model_len": max(map(len, job["prompts"])) + job["max_new_tokens"] + job["gamma"] + 8,
        "max_num_seqs": 1,
        "enforce_eager": True,
        "disable_log_stats": False,
        "enable_prefix_caching": False,
        "seed": 0,
    }
    if job["drafter"]:
        settings["speculative_config"] = {
            "method": job["method"],
            "model": job["drafter"],
            "num_speculative_tokens": job["gamma"],
        }
    engine = vllm.LLM(**settings)
    greedy = vllm.SamplingParams(temperature=0.0, max_tokens=job["max_new_tokens"])
    warm = vllm.SamplingParams(temperature=0.0, max_tokens=8)
    engine.collective_rpc(watch, args=(bool(job["drafter"]),))
    _decode(engine, job["prompts"][0], warm)
    before = _counters(engine)
    start = time.perf_counter()
    found = [_decode(engine, prompt, greedy) for prompt in job["prompts"]]
    seconds = time.perf_counter() - start
    after = _counters(engine)
    answer = {"version": f"vLLM {vllm.__version__}", "seconds": seconds}
    answer["outputs"] = [output for output, _ in found]
    if job["drafter"]:
        answer["by_round"] = [rounds for _, rounds in found]
        for name, key in (("drafts", "rounds"), ("draft_tokens", "drafted")):
            answer[key] = after[name] - before[name]
        answer["accepted"] = after["accepted_tokens"] - before["accepted_tokens"]
        pairs = zip(
            after["accepted_tokens_per_pos"], before["accepted_tokens_per_pos"], strict=True
        )
        answer["accepted_at"] = [a - b for a, b in pairs]
    Path(sys.argv[1]).write_text(json.dumps(answer))


def _decode(engine, prompt, params):
    """Return the output's ids, and drafted and emitted ids by round."""
    engine.collective_rpc(take)
    found = engine.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
    return list(found[0].outputs[0].token_ids), engine.collective_rpc(take)[0]


def watch(worker, drafts):
    """Keep the rounds of the request that runs: there is one at a time."""
    worker.rounds_seen = []

    def keep(_, given, out):
        drafted = given[0].draft_token_ids.tolist()
        if drafted:  # a prefill passes here too
            emitted = [token for token in out.sampled_token_ids[0].tolist() if token >= 0]
            worker.rounds_seen.append([drafted, emitted])

    if drafts:
        worker.model_runner.rejection_sampler.register_forward_hook(keep)


def take(worker):
    """Return what was kept since the last call."""
    seen, worker.rounds_seen = worker.rounds_seen, []
    return seen


def _counters(engine):
    """Return vLLM's counters of speculation by name."""
    found = {}
    for metric in engine.get_metrics():
        name = metric.name.removeprefix("vllm:spec_decode_num_")
        if name != metric.name:
            found[name] = list(metric.values) if hasattr(metric, "values") else metric.value
    return found


if __name__ == "__main__":
    main()
