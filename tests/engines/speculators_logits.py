"""Runs in the engines' interpreter, never in ours: the speculators library's forward on an export.

python speculators_logits.py FOLDER INPUT.safetensors OUTPUT.safetensors
INPUT holds ids [1, T], last [1, T, D], taps [1, T, K D] for drafters that tap, anchor [1] for block
drafters, the target's embedding and head for MTP; OUTPUT the logits of every depth.
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
    run = {"eagle3": _eagle3, "peagle": _peagle, "mtp": _mtp}.get(kind, _block)
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
    besides = (
        {"embed_tokens.weight", "lm_head.weight"} if model_class.__name__ == "MTPDraftModel" else ()
    )
    missing = [name for name in found.missing_keys if name not in besides]
    assert all(name.startswith("verifier_") for name in missing), missing
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


def _peagle(_, folder, inputs):
    from speculators.models.peagle import core
    from speculators.models.peagle.config import PEagleSpeculatorConfig

    model = _loaded(core.PEagleDraftModel, PEagleSpeculatorConfig, folder, "eager")
    depths = model.config.speculators_config.proposal_methods[0].speculative_tokens
    ids = inputs["ids"][:, 1:]
    length, said = ids.shape[1], []
    anchors, depth = torch.arange(length).repeat(depths), torch.arange(depths)
    fits = anchors + depth.repeat_interleave(length) < length
    lines = anchors[fits], depth.repeat_interleave(length)[fits]
    core.generate_cod_sample_indices = lambda **_: lines

    def keep(logits, **_):
        said.append(logits[0])
        return torch.zeros(()), {}

    core.compute_metrics = keep
    taps = inputs["taps"][:, :-1]
    model(
        hidden_states=taps,
        input_ids=ids,
        document_ids=torch.zeros_like(ids),
        verifier_last_hidden_states=torch.zeros(1, length, model.hidden_size),
        num_depths=depths,
    )
    whole = torch.zeros(depths * length, said[0].shape[-1])
    whole[fits] = said[0]
    return whole.view(depths, length, -1)


def _mtp(_, folder, inputs):
    from speculators.models.mtp.config import MTPSpeculatorConfig
    from speculators.models.mtp.core import MTPDraftModel

    model = _loaded(MTPDraftModel, MTPSpeculatorConfig, folder, "eager")
    model.embed_tokens.weight.data.copy_(inputs["embedding"])
    model.lm_head.weight.data.copy_(inputs["head"])
    logits, *_ = model(input_ids=inputs["ids"], hidden_states=inputs["last"])
    return torch.stack([step[0] for step in logits])


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
