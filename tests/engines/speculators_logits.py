"""Runs in the engines' interpreter, never in ours: the speculators library's forward on an export.

python speculators_logits.py FOLDER INPUT.safetensors OUTPUT.safetensors
INPUT holds taps [1, T, K D], ids [1, T] and, for block drafters, anchor [1]; OUTPUT the logits of
every depth.
"""

# speculators lies in another environment: nothing here can be checked against its types
# pyright: basic, reportMissingImports=false

import json
import os
import sys
from pathlib import Path

os.environ["TORCHDYNAMO_DISABLE"] = "1"

import torch
from safetensors.torch import load_file, save_file


def main() -> None:
    """Load the folder, run it once, keep what its head said."""
    folder, given, out = map(Path, sys.argv[1:])
    kind = json.loads((folder / "config.json").read_text())["speculators_model_type"]
    inputs = load_file(given)
    run = _eagle3 if kind == "eagle3" else _block
    with torch.no_grad():
        save_file({"logits": run(kind, folder, inputs).contiguous()}, out)


def _loaded(model_class, config_class, folder, attention):
    config = config_class.from_pretrained(folder)
    if attention:
        config.transformer_layer_config._attn_implementation = attention
    model = model_class(config).float().eval()
    tensors = {
        name: t if t.dtype in (torch.int64, torch.bool) else t.float()
        for name, t in load_file(folder / "model.safetensors").items()
    }
    found = model.load_state_dict(tensors, strict=False)
    assert not found.unexpected_keys, found.unexpected_keys
    assert all(name.startswith("verifier_") for name in found.missing_keys), found.missing_keys
    return model


def _eagle3(_, folder, inputs):
    from speculators.models.eagle3.config import Eagle3SpeculatorConfig
    from speculators.models.eagle3.core import Eagle3DraftModel

    model = _loaded(Eagle3DraftModel, Eagle3SpeculatorConfig, folder, None)
    said = []
    model.lm_head.register_forward_hook(lambda *call: said.append(call[2][0]))
    ids = inputs["ids"][:, 1:]  # the library's data puts every token beside the state before it
    model(
        hidden_states=inputs["taps"][:, :-1],
        input_ids=ids,
        document_ids=torch.zeros_like(ids),
        ttt_steps=3,
    )
    return torch.stack(said)


def _block(kind, folder, inputs):
    if kind == "dflash":
        from speculators.models.dflash import core
        from speculators.models.dflash.config import DFlashSpeculatorConfig as Config

        model_class = core.DFlashDraftModel
    else:
        from speculators.models.dspark import core
        from speculators.models.dspark.config import DSparkSpeculatorConfig as Config

        model_class = core.DSparkDraftModel
    model = _loaded(model_class, Config, folder, "eager")
    said = []

    def keep(logits, *_, **__):
        said.append(logits[0])
        return torch.zeros(()), {}

    core.compute_metrics = keep
    ids = inputs["ids"]
    mask = torch.zeros_like(ids)
    mask[0, int(inputs["anchor"])] = 1
    model(
        hidden_states=inputs["taps"],
        input_ids=ids,
        loss_mask=mask,
        verifier_last_hidden_states=torch.zeros(1, ids.shape[1], inputs["taps"].shape[-1] // 2),
        document_ids=torch.zeros_like(ids),
        max_anchors=1,
    )
    return said[0]


if __name__ == "__main__":
    main()
