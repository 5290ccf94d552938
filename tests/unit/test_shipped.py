"""The multi-token-prediction modules in a target's own folder, in every known layout."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafters.checkpoint import load_drafter, save_drafter
from drafters.errors import UserError
from drafters.growth import Chain
from drafters.methods.mtp import MtpDrafter
from drafters.methods.none import NoDrafter
from drafters.target import Target
from inference import generate
from inference.spec import Spec
from tests.folders import save_tiny_target
from tests.tiny import prompts_of, tiny_target

SIZES = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64}
FAMILIES = {"deepseek": "llama", "mimo": "qwen2", "qwen": "qwen3"}
# theirs, by ours; a decoder layer's names are those of the target's own layers
NAMES = {
    "deepseek": {
        "embedding_norm": "model.layers.{n}.enorm",
        "hidden_norm": "model.layers.{n}.hnorm",
        "project": "model.layers.{n}.eh_proj",
        "norm": "model.layers.{n}.shared_head.norm",
        "": "model.layers.{n}.",
    },
    "mimo": {
        "embedding_norm": "model.mtp_layers.{j}.token_layernorm",
        "hidden_norm": "model.mtp_layers.{j}.hidden_layernorm",
        "project": "model.mtp_layers.{j}.input_proj",
        "norm": "model.mtp_layers.{j}.final_layernorm",
        "": "model.mtp_layers.{j}.",
    },
    "qwen": {
        "embedding_norm": "mtp.pre_fc_norm_embedding",
        "hidden_norm": "mtp.pre_fc_norm_hidden",
        "project": "mtp.fc",
        "norm": "mtp.norm",
        "": "mtp.layers.0.",
    },
}


def made(target: Target, layout: str, modules: int) -> MtpDrafter:
    """Make random modules of the kind that the layout's target has."""
    torch.manual_seed(11)
    options = {
        "modules": modules,
        "unroll": modules,
        "draft_vocab_size": 0,
        "norm_output": layout != "deepseek",
        "qk_norm": layout == "qwen",
        "attention_bias": layout == "mimo",
        "init": "shipped",
    }
    drafter = MtpDrafter.build(options, target.shape)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.3)
    return drafter.eval()


def written(drafter: MtpDrafter, layout: str, target: Target) -> dict[str, Tensor]:
    """Write modules as the layout has them, the target's embedding and head beside them."""
    names, found = NAMES[layout], {}
    for j, step in enumerate(drafter.continuations()):
        for name, place in step.places().items():
            tensor = place.detach().clone()
            if name == "project.weight" and layout == "mimo":
                tensor = tensor.roll(32, -1)  # [hidden; embedding]
            if "norm" in name and layout == "qwen":
                tensor -= 1
            own = name.removesuffix(".weight")
            theirs = f"{names[own]}.weight" if own in names else names[""] + name
            found[theirs.format(j=j, n=2 + j)] = tensor
        if layout == "deepseek":
            every = torch.arange(target.shape.vocab_size)
            copies = {
                "embed_tokens": target.embed(every),
                "shared_head.head": target.head_rows(every),
            }
            found |= {f"model.layers.{2 + j}.{k}.weight": v.clone() for k, v in copies.items()}
    return found


def ship(folder: Path, layout: str, modules: int = 1) -> MtpDrafter:
    """Save a target with modules of its own and return what they are."""
    save_tiny_target(folder, FAMILIES[layout], **SIZES)
    target = Target.load(folder)
    drafter = made(target, layout, modules)
    tensors = load_file(folder / "model.safetensors")
    tensors |= written(drafter, layout, target)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return drafter


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "modules"), [("deepseek", 1), ("deepseek", 2), ("mimo", 3), ("qwen", 1)]
)
def test_a_target_drafts_with_what_it_ships(layout: str, modules: int, tmp_path: Path) -> None:
    expected = ship(tmp_path / "t", layout, modules)
    target = Target.load(tmp_path / "t")
    spec = Spec.parse("mtp:growth=chain,gamma=3")
    drafter = spec.load(target)
    assert isinstance(drafter, MtpDrafter)
    assert drafter.options() == expected.options()
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(drafter.state_dict()[name], tensor, atol=1e-6, rtol=0)
    with pytest.raises(UserError, match="has no option 'modules'"):
        Spec.parse("mtp:modules=2").load(target)
    prompts = prompts_of(6, 2)
    plain, drafted = (
        generate(target, d, prompts, growth=Chain(3), max_new_tokens=8)
        for d in (NoDrafter(), drafter)
    )
    assert [o.ids for o in plain] == [o.ids for o in drafted]
    again = load_drafter(save_drafter(drafter, tmp_path / "d", target), target)
    assert isinstance(again, MtpDrafter)
    assert again.options() == drafter.options()


def test_shards_are_read_by_their_index(tmp_path: Path) -> None:
    expected = ship(tmp_path, "mimo", 2)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    places = {name: f"part-{number % 2}.safetensors" for number, name in enumerate(tensors)}
    for file in set(places.values()):
        held = {name: t for name, t in tensors.items() if places[name] == file}
        save_file(held, tmp_path / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": places}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    drafter = load_drafter("mtp", Target.load(tmp_path))
    assert isinstance(drafter, MtpDrafter)
    for name, tensor in expected.state_dict().items():
        assert torch.equal(drafter.state_dict()[name], tensor)


def test_an_index_stays_in_the_folder(tmp_path: Path) -> None:
    ship(tmp_path, "mimo")
    target = Target.load(tmp_path)
    index = {"weight_map": {"model.mtp_layers.0.input_proj.weight": "../outside.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match="which is not a file in the folder"):
        load_drafter("mtp", target)


def test_training_starts_from_what_is_shipped(tmp_path: Path) -> None:
    """With a reduced vocabulary too: head and embedding are the target's, only ids are chosen."""
    expected = ship(tmp_path, "deepseek")
    target = Target.load(tmp_path)
    drafter = MtpDrafter.build({"init": "shipped", "draft_vocab_size": 40}, target.shape)
    drafter.init_from(target)
    for name, tensor in expected.named_parameters():
        assert torch.equal(drafter.get_parameter(name), tensor)
    with pytest.raises(UserError, match=r"ships 1 MTP modules: give drafter\.modules=1 or less"):
        MtpDrafter.build({"init": "shipped", "modules": 2}, target.shape).init_from(target)
    other = {"init": "shipped", "norm_output": True}
    with pytest.raises(UserError, match=r"feed on raw states: give drafter\.norm_output=false"):
        MtpDrafter.build(other, target.shape).init_from(target)
    other = {"init": "shipped", "qk_norm": True}
    with pytest.raises(UserError, match=r"qk_norm=True .* see self_attn\.k_norm\.weight"):
        MtpDrafter.build(other, target.shape).init_from(target)


@pytest.mark.parametrize(
    ("name", "shape", "told"),
    [
        ("mlp.experts.0.up_proj.weight", (4, 32), "see mlp.experts.0.up_proj.weight"),
        ("self_attn.kv_a_proj_with_mqa.weight", (4, 32), "see self_attn.kv_a_proj_with_mqa"),
        ("self_attn.q_proj.weight", (128, 32), "see self_attn.q_proj.weight"),
    ],
)
def test_layers_of_another_kind_are_refused_whole(
    name: str, shape: tuple[int, int], told: str, tmp_path: Path
) -> None:
    """Experts, latent attention and gated queries have no place here; nothing is left out."""
    ship(tmp_path, "deepseek")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[f"model.layers.2.{name}"] = torch.zeros(shape)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=f"do not fit this family's layers.*{told}"):
        load_drafter("mtp", Target.load(tmp_path))


def test_a_target_without_any_is_told_so(tmp_path: Path) -> None:
    target = Target.load(save_tiny_target(tmp_path, **SIZES))
    with pytest.raises(UserError, match="ships no MTP modules in a known layout"):
        load_drafter("mtp", target)
    with pytest.raises(UserError, match="its weights lie in no known folder"):
        load_drafter("mtp", tiny_target(**SIZES))
    with pytest.raises(UserError, match=r"not a drafter without weights; target .* ships none"):
        load_drafter("medusa", target)
