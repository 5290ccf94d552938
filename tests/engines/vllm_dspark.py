"""Runs in vLLM's interpreter, never in ours: its DSpark model reads a folder by its own loader.

python vllm_dspark.py TARGET FOLDER INPUT.safetensors OUTPUT.safetensors
INPUT holds states [n, D] and previous [n] ids of the target; OUTPUT logits [n, K] and confidences
[n] of slots with such states behind these ids, and the target's ids [K] of the K drafted.
"""

# vLLM lies in another environment: nothing here can be checked against its types
# pyright: basic, reportMissingImports=false

import sys
from importlib import import_module

import torch
from safetensors.torch import load_file, save_file


def main() -> None:
    """Load the folder as vLLM's V2 runner would, which a CPU has not."""
    target, folder, given, out = sys.argv[1:]
    config, parallel = import_module("vllm.config"), import_module("vllm.distributed")
    config.VllmConfig._get_v1_model_runner_unsupported_features = lambda _: []
    arguments = import_module("vllm.engine.arg_utils").EngineArgs(
        model=target,
        dtype="float32",
        max_model_len=128,
        enforce_eager=True,
        speculative_config={"method": "dspark", "model": folder, "num_speculative_tokens": 3},
    )
    settings = arguments.create_engine_config()
    import_module("vllm.v1.worker.cpu_model_runner")._set_torch_accelerator_to_noop()
    get_model = import_module("vllm.model_executor.model_loader").get_model
    inputs = load_file(given)
    with config.set_current_vllm_config(settings), torch.no_grad():
        parallel.init_distributed_environment(1, 0, f"file://{out}.group", 0, backend="gloo")
        parallel.initialize_model_parallel(1)
        drafter = settings.speculative_config.draft_model_config
        model = get_model(vllm_config=settings, model_config=drafter)
        embedded = model.markov_embed(inputs["previous"])
        logits = model.compute_draft_logits(inputs["states"]) + model.markov_bias(embedded)
        said = {
            "logits": logits,
            "confidences": model.compute_confidence(inputs["states"], embedded),
            "ids": model.map_draft_to_target(torch.arange(logits.shape[-1])),
        }
    save_file({name: tensor.contiguous() for name, tensor in said.items()}, out)


if __name__ == "__main__":
    main()
