"""The multi-token-prediction layers that some targets ship inside their own checkpoints.

Three layouts are known: DeepSeek-V3's, MiMo's and Qwen3-Next's. They differ in names, in the order
of the halves that the projection reads, in which state is fed on and in how a norm is written; what
is returned here is one form of all. Embedding and head are the target's, copies of them are passed
over. Source: the layouts as vLLM's deepseek_mtp, mimo_mtp and qwen3_next_mtp read them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from drafters.errors import UserError
from drafters.untrusted import INDEX, read_index

_SINGLE = "model.safetensors"
_SHARED = ("embed_tokens.weight", "shared_head.head.weight")


@dataclass(frozen=True)
class Layout:
    """How one family of targets writes its layers.

    Args:
        prefix: of the tensors around the decoder layer; {j} is the module, {n} the module counted
            on after the target's decoder layers.
        layer: prefix of the decoder layer, under names as the target's own layers have.
        names: of the tensors around it, by ours.
        hidden_first: whether the projection reads [hidden; embedding].
        norm_output: whether the normed state is fed on to the next step instead of the raw one.
        centred_norms: whether a norm's weight is written as its difference from one.
    """

    prefix: str
    layer: str
    names: Mapping[str, str]
    hidden_first: bool = False
    norm_output: bool = False
    centred_norms: bool = False


LAYOUTS = (
    Layout(
        "model.layers.{n}.",
        "model.layers.{n}.",
        {
            "embedding_norm": "enorm",
            "hidden_norm": "hnorm",
            "project": "eh_proj",
            "norm": "shared_head.norm",
        },
    ),
    Layout(
        "model.mtp_layers.{j}.",
        "model.mtp_layers.{j}.",
        {
            "embedding_norm": "token_layernorm",
            "hidden_norm": "hidden_layernorm",
            "project": "input_proj",
            "norm": "final_layernorm",
        },
        hidden_first=True,
        norm_output=True,
    ),
    Layout(
        "mtp.",
        "mtp.layers.{j}.",
        {
            "embedding_norm": "pre_fc_norm_embedding",
            "hidden_norm": "pre_fc_norm_hidden",
            "project": "fc",
            "norm": "norm",
        },
        norm_output=True,
        centred_norms=True,
    ),
)


@dataclass(frozen=True)
class Shipped:
    """The layers that a target ships, in our form.

    Args:
        modules: of each, tensors by name: embedding_norm.weight, hidden_norm.weight, norm.weight,
            project.weight [D, 2 D] over [embedding; hidden], and a decoder layer's as the target's
            own are called (self_attn.q_proj.weight, ...).
        norm_output: whether the normed state is fed on to the next step.
    """

    modules: list[dict[str, Tensor]]
    norm_output: bool


def read_shipped(folder: str | Path, num_layers: int) -> Shipped | None:
    """Read the layers of a target's folder.

    Args:
        folder: with model.safetensors, or its shards and their index.
        num_layers: decoder layers of the target.

    Returns:
        None if it ships none in a known layout.

    Raises:
        UserError: if the folder's weights cannot be read.
    """
    where = _places(Path(folder))
    for layout in LAYOUTS:
        modules: list[dict[str, Tensor]] = []
        while names := _names(layout, len(modules), num_layers, where):
            modules.append(_converted(layout, _read(names, where)))
        if modules:
            return Shipped(modules, layout.norm_output)
    return None


def _places(folder: Path) -> dict[str, Path]:
    """Return the file of every tensor."""
    if (folder / INDEX).is_file():
        return read_index(folder)
    try:
        with safe_open(folder / _SINGLE, "pt") as file:
            return dict.fromkeys(file.keys(), folder / _SINGLE)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"target {folder}: its weights cannot be read ({error}); give a folder with {_SINGLE} "
            f"or {INDEX}"
        ) from error


def _names(
    layout: Layout, module: int, num_layers: int, where: Mapping[str, Path]
) -> dict[str, str]:
    """Return the tensors of one module, our name by theirs; empty if there is no such module."""
    number = {"j": module, "n": num_layers + module}
    prefix, layer = layout.prefix.format(**number), layout.layer.format(**number)
    around = {f"{prefix}{theirs}.weight": f"{own}.weight" for own, theirs in layout.names.items()}
    inside = {
        name: name.removeprefix(layer)
        for name in where
        if name.startswith(layer) and name not in around and not name.endswith(_SHARED)
    }
    if not inside or not any(name in where for name in around):
        return {}
    return {name: own for name, own in {**around, **inside}.items() if name in where}


def _read(names: Mapping[str, str], where: Mapping[str, Path]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for path in sorted({where[name] for name in names}):
        with safe_open(path, "pt") as file:
            held = {name: own for name, own in names.items() if where[name] == path}
            tensors |= {own: file.get_tensor(name) for name, own in held.items()}
    return tensors


def _converted(layout: Layout, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    if layout.hidden_first and "project.weight" in tensors:
        hidden, embedding = tensors["project.weight"].chunk(2, -1)
        tensors["project.weight"] = torch.cat((embedding, hidden), -1)
    if layout.centred_norms:
        norms = [name for name in tensors if "norm" in name]
        tensors |= {name: tensors[name].float() + 1 for name in norms}
    return tensors
