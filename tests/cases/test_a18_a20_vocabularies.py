"""A18: a drafter of another vocabulary. A19: more draft ids than the data holds. A20: their map."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from drafters.base import NeuralDrafter
from drafters.checkpoint import load_drafter, save_drafter
from drafters.errors import UserError
from drafters.growth import Chain
from drafters.registry import build_drafter, joined, methods
from drafters.target import Target
from drafters.vocab import DraftVocabulary
from inference import Sampling, generate
from inference.generate import Generation
from tests.folders import save_tiny_target, tiny_tokenizer
from tests.tiny import prompts_of, tiny_model, tiny_target
from training.lesson_settings import DataSettings
from training.options import EvaluateSettings, TrainSettings
from training.parts import prepare

OPTIONS: dict[str, dict[str, object]] = {
    "eagle": {"taps": [0, 1]},
    "peagle": {"taps": [0, 1]},
    "dflash": {"taps": [0, 1]},
    "dflash2": {"taps": [0, 1], "selector_rank": 8},
    "dspark": {"taps": [0, 1]},
    "mtp": {"modules": 2},
    "standalone": {"num_layers": 2},
}
NEURAL = sorted(name for name, kind in methods().items() if issubclass(kind, NeuralDrafter))


def drafter_of(name: str, target: Target, **options: object) -> NeuralDrafter:
    drafter = build_drafter(name, {**OPTIONS.get(name, {}), **options}, target.shape)
    assert isinstance(drafter, NeuralDrafter)
    return drafter.eval()


def test_a18_a_drafter_of_another_target_names_both(tmp_path: Path) -> None:
    ours, other = tiny_target(num_hidden_layers=2), tiny_target(num_hidden_layers=2, vocab_size=160)
    folder = save_drafter(drafter_of("medusa", ours), tmp_path / "d", ours)
    with pytest.raises(UserError, match="its vocab_size is 128, tiny-llama has 160"):
        load_drafter(folder, other)


@pytest.mark.parametrize(
    ("field", "sizes"),
    [
        ("vocab_size", {"vocab_size": 160}),
        ("hidden_size", {"hidden_size": 32, "intermediate_size": 64}),
        ("num_layers", {"num_hidden_layers": 2}),
    ],
)
@pytest.mark.parametrize("name", [*NEURAL, "hybrid"])
def test_a18_weights_for_another_shape_are_not_run(
    name: str, field: str, sizes: dict[str, int]
) -> None:
    """A drafter that was loaded without its target: kernels would read what is not theirs."""
    ours, other = tiny_target(num_hidden_layers=3), tiny_target(**{"num_hidden_layers": 3, **sizes})
    alone = drafter_of("medusa" if name == "hybrid" else name, ours)
    drafter = alone if name != "hybrid" else joined([alone, build_drafter("ngram", {}, ours.shape)])
    with pytest.raises(UserError, match=f"was made for a target whose {field} is"):
        generate(other, drafter, prompts_of(5), growth=Chain(1), max_new_tokens=4)
    (output,) = generate(ours, drafter, prompts_of(5), growth=Chain(1), max_new_tokens=4)
    assert len(output.ids) == 4


def test_a18_swapped_strings_make_another_target(tmp_path: Path) -> None:
    """Sizes and weights agree; two strings do not."""
    model = tiny_model(vocab_size=265, num_hidden_layers=2)
    ours = Target(model, tiny_tokenizer(), name="ours")
    folder = save_drafter(drafter_of("medusa", ours), tmp_path / "d", ours)
    swapped = json.loads(tiny_tokenizer().backend_tokenizer.to_str())
    vocabulary = swapped["model"]["vocab"]
    first, second = (next(k for k, v in vocabulary.items() if v == i) for i in (70, 81))
    vocabulary[first], vocabulary[second] = 81, 70
    swapped["model"]["merges"] = []
    save_tiny_target(tmp_path / "other", num_hidden_layers=2)
    (tmp_path / "other" / "tokenizer.json").write_text(json.dumps(swapped))
    theirs = Target(model, AutoTokenizer.from_pretrained(tmp_path / "other"), name="theirs")
    with pytest.raises(UserError, match="tokenizer"):
        load_drafter(folder, theirs)


@pytest.mark.slow
@pytest.mark.parametrize(("asked", "kept"), [(32000, None), (64, 64), (3, 3)])
def test_a19_a_map_is_filled_up_with_unused_ids(
    tmp_path: Path, asked: int, kept: int | None
) -> None:
    folder = save_tiny_target(tmp_path / "target", num_hidden_layers=2)
    chats = [("Hi", "Hello!"), ("2+2?", "4"), ("Bye", "Bye!")]
    rows = [
        {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]}
        for q, a in chats
    ]
    file = tmp_path / "chats.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows))
    settings = TrainSettings(
        target=str(folder),
        output=str(tmp_path / "out"),
        data=DataSettings(path=str(file)),
        drafter={"draft_vocab_size": asked},
        evaluate=EvaluateSettings(times=0),
    )
    ids = prepare("medusa", settings).objective.drafter.ids
    if kept is None:  # more than the target has: all of them, and no map
        assert ids is None
        return
    assert ids is not None
    assert len(ids) == len(set(ids.tolist())) == kept
    assert 0 <= int(ids.min()) <= int(ids.max()) < 265
    assert 2 in ids  # the end of an answer


@pytest.mark.parametrize("name", NEURAL)
def test_a20_the_map_lies_with_the_weights(name: str, tmp_path: Path) -> None:
    target = tiny_target(num_hidden_layers=3)
    drafter = drafter_of(name, target, draft_vocab_size=32)
    ids = torch.arange(96, 128)
    for module in drafter.modules():
        if isinstance(module, DraftVocabulary):
            module.keep(ids)
    folder = save_drafter(drafter, tmp_path / "d", target)
    loaded = load_drafter(folder, target)
    seen: list[list[list[int]]] = []
    for one in (drafter, loaded):
        run = Generation(target, one, prompts_of(5), growth=Chain(2), sampling=Sampling(8))
        trees = [commit.tree for _, commit in run if commit.tree is not None]
        seen.append([tree.token_list[1:] for tree in trees])
    assert seen[0] == seen[1]
    drafted = [token for tree in seen[0] for token in tree]
    assert drafted
    assert set(drafted) <= set(ids.tolist())
    assert isinstance(loaded, NeuralDrafter)
    assert loaded.ids is not None
    assert loaded.ids.tolist() == ids.tolist()
    tensors = load_file(folder / "model.safetensors")
    kept = {key: value for key, value in tensors.items() if not key.endswith("vocabulary.ids")}
    assert len(kept) < len(tensors)
    save_file(kept, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"missing tensors \[.*vocabulary.ids"):
        load_drafter(folder, target)
