"""Foreign folders that must not be read: each is refused in one line that says why."""

import contextlib
import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafters.checkpoint import load_drafter
from drafters.errors import UserError
from drafters.formats.convert import export_drafter, import_drafter, read_ours
from drafters.formats.dialect import check_options
from drafters.formats.foreign import Foreign
from drafters.formats.registry import claiming, listing, reader, writer
from drafters.target import Target
from tests.foreign import (
    LLAMA,
    WIDE,
    change,
    config_of,
    ids_of,
    retensor,
    saved,
    small_target,
    under,
    write,
)

pytestmark = pytest.mark.slow

KEYS = {
    "fc.weight": [16, 48],
    "norm.weight": [16],
    "lm_head.weight": [16, 16],
    **under("midlayer", WIDE),
}
CONFIG = {**LLAMA, "draft_vocab_size": 16}
KEPT = tuple(range(1, 64, 4))
RUN = tuple(range(8, 24))


@pytest.fixture(scope="module")
def target() -> Target:
    return small_target()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "theirs", CONFIG, KEYS, **ids_of(*RUN))


def nan(folder: Path) -> Path:
    return retensor(folder, norm__weight=torch.full((16,), float("nan")))


ABSOLUTE = torch.tensor(KEPT)
IDS = "eagle_aux_hidden_state_layer_ids"
WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "no d2t": (lambda f: retensor(f, d2t=None), "16 of the target's 64 ids and d2t is missing"),
    "absolute ids": (lambda f: retensor(f, d2t=torch.tensor(RUN)), "absolute ids, not offsets"),
    "absolute ids, no mask": (
        lambda f: retensor(f, d2t=ABSOLUTE, t2d=None),
        "absolute ids, not offsets",
    ),
    "ids out of range": (
        lambda f: retensor(f, d2t=torch.full((16,), 50), t2d=None),
        "within 0 to 63; it runs from 50 to 65",
    ),
    "negative ids": (lambda f: retensor(f, d2t=torch.full((16,), -1), t2d=None), "from -1 to 14"),
    "ids twice": (
        lambda f: retensor(f, d2t=torch.tensor([8, *[7] * 15]), t2d=None),
        "ascending, unique",
    ),
    "tables that differ": (
        lambda f: retensor(f, d2t=torch.full((16,), 9)),
        "d2t and t2d do not keep the same",
    ),
    "d2t of another length": (lambda f: retensor(f, d2t=torch.zeros(3).long()), r"d2t is \[3\]"),
    "d2t of floats": (lambda f: retensor(f, d2t=torch.zeros(16)), "not whole numbers"),
    "an unused tensor": (
        lambda f: retensor(f, fc__bias=torch.zeros(16)),
        r"unused tensors \['fc.bias'\]",
    ),
    "a missing tensor": (lambda f: retensor(f, norm__weight=None), r"missing .*\['norm.weight'\]"),
    "another width of fc": (
        lambda f: retensor(f, fc__weight=torch.zeros(16, 32)),
        r"fc.weight reads 32 numbers, and 3 layers of 16",
    ),
    "another size": (lambda f: change(f, intermediate_size=48), r"asks for \[16, 48\]"),
    "huge sizes": (lambda f: change(f, intermediate_size=1 << 40), "intermediate_size is 1099"),
    "large sizes": (lambda f: change(f, intermediate_size=1 << 23), r"asks for \[16, 8388608\]"),
    "layers without tensors": (lambda f: change(f, num_hidden_layers=10**9), "num_hidden_layers"),
    "layers that are no number": (lambda f: change(f, num_hidden_layers="1"), "num_hidden_layers"),
    "another target": (lambda f: change(f, hidden_size=32), "hidden_size is 32, tiny-llama has 16"),
    "another vocabulary": (lambda f: change(f, vocab_size=65), "vocab_size is 65, tiny-llama has"),
    "another head": (lambda f: change(f, draft_vocab_size=8), "is 8, lm_head.weight has 16 rows"),
    "tied": (lambda f: change(f, tie_word_embeddings=True), "tie_word_embeddings is true"),
    "a norm that is not known": (lambda f: change(f, norm_before_fc=True), "norm_before_fc is tru"),
    "a flag that is none": (lambda f: change(f, norm_output="yes"), "norm_output is yes"),
    "two lists": (
        lambda f: change(f, **{IDS: [1, 3, 4], "eagle_config": {IDS: [1, 3, 4]}}),
        "lists name different layers",
    ),
    "taps beyond the target": (lambda f: change(f, **{IDS: [2, 4, 12]}), "ascending, from 0 to 7"),
    "a list that is none": (lambda f: change(f, **{IDS: "2,4"}), "give a list of layers"),
    "another act": (lambda f: change(f, hidden_act="gelu"), "hidden_act is 'gelu'"),
    "another model": (lambda f: change(f, model_type="gpt2"), "model_type is 'gpt2'"),
    "a rope that is not known": (
        lambda f: change(f, rope_scaling={"rope_type": "dynamic", "factor": 2.0}),
        "rope type is 'dynamic'",
    ),
    "NaN": (nan, "norm.weight holds NaN"),
    "another kind": (lambda f: change(f, speculators_model_type="xpress"), "kind: xpress"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_file_is_refused(what: str, folder: Path, target: Target, tmp_path: Path) -> None:
    spoil, message = WRONG[what]
    spoil(folder)
    with pytest.raises(UserError, match=message):
        import_drafter(folder, tmp_path / "ours", target)
    assert not (tmp_path / "ours").exists()


ODD: list[object] = [None, "x", -1, 0, float("nan"), 1 << 40, [], {}, [1], {"a": 1}, 1.5, True]
SPECULATORS = {
    "speculators_model_type": "eagle3",
    "norm_before_residual": False,
    "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
    "speculators_config": {"proposal_methods": [{"speculative_tokens": 3}]},
    "transformer_layer_config": LLAMA,
}


def read_or_refuse(config: dict[str, object], folder: Path, target: Target) -> None:
    """Anything but an answer or a UserError fails the test."""
    (folder / "config.json").write_text(json.dumps(config))
    foreign = Foreign.read(folder)
    with contextlib.suppress(UserError):
        dialect = reader(foreign)
        assert dialect.read is not None
        dialect.read(foreign, target)


@pytest.mark.parametrize("key", [*CONFIG, IDS, "eagle_config", "rope_scaling", "architectures"])
def test_any_value_is_read_or_refused(key: str, folder: Path, target: Target) -> None:
    for value in ODD:
        read_or_refuse({**CONFIG, key: value}, folder, target)


@pytest.mark.parametrize("key", SPECULATORS)
def test_any_value_of_a_nested_config(key: str, target: Target, tmp_path: Path) -> None:
    folder = saved(target, tmp_path / "d", "eagle", draft_vocab_size=16)
    export_drafter(folder, "speculators", tmp_path / "out", target)
    read_or_refuse(SPECULATORS, tmp_path / "out", target)
    for value in ODD:
        read_or_refuse({**SPECULATORS, key: value}, tmp_path / "out", target)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear"},
        {"rope_type": "llama3", "factor": 8.0},
        {"rope_type": "yarn", "factor": "x"},
        {"type": "mrope"},
        {"rope_type": 3},
        {"rope_theta": "x"},
    ],
)
def test_any_rope_is_read_or_refused(rope: object, folder: Path, target: Target) -> None:
    read_or_refuse({**CONFIG, "rope_scaling": rope}, folder, target)
    read_or_refuse({**CONFIG, "rope_parameters": rope}, folder, target)


@pytest.mark.parametrize("name", KEYS)
def test_any_shape_is_refused(name: str, folder: Path, target: Target, tmp_path: Path) -> None:
    for shape in ([], [0], [1, 2, 3]):
        retensor(folder, **{name.replace(".", "__"): torch.zeros(shape)})
        with pytest.raises(UserError):
            import_drafter(folder, tmp_path / "ours", target)


def test_the_file_as_it_was_is_read(folder: Path, target: Target, tmp_path: Path) -> None:
    assert import_drafter(folder, tmp_path / "ours", target) == ()


def test_an_absent_residual_flag_is_refused_where_readers_disagree(
    target: Target, tmp_path: Path
) -> None:
    folder = saved(target, tmp_path / "d", "eagle", draft_vocab_size=16)
    export_drafter(folder, "speculators", tmp_path / "out", target)
    change(tmp_path / "out", norm_before_residual=None)
    with pytest.raises(UserError, match="norm_before_residual is absent, and its readers disagree"):
        import_drafter(tmp_path / "out", tmp_path / "back", target)


def test_an_embedding_of_its_own_is_a_loss(folder: Path, target: Target, tmp_path: Path) -> None:
    embedding = target.embed(torch.arange(64))
    retensor(folder, embed_tokens__weight=embedding)
    assert import_drafter(folder, tmp_path / "same", target) == ()
    retensor(folder, embed_tokens__weight=embedding + 1)
    with pytest.raises(UserError, match=r"not the target's own .* --allow-loss"):
        import_drafter(folder, tmp_path / "ours", target)
    assert len(import_drafter(folder, tmp_path / "ours", target, allow_loss=True)) == 1


def test_pickles_are_not_opened(folder: Path, target: Target, tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, tuple[object, ...]]:
            return (tmp_path.joinpath("ran").touch, ())

    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Trap()))
    with pytest.raises(UserError, match=r"pytorch_model.bin is a pickle.*docs/formats.md"):
        import_drafter(folder, tmp_path / "ours", target)
    assert not (tmp_path / "ran").exists()


def test_a_drafter_of_ours_needs_no_import(target: Target, tmp_path: Path) -> None:
    folder = saved(target, tmp_path / "d", "eagle", draft_vocab_size=16)
    with pytest.raises(UserError, match="a drafter of ours already"):
        import_drafter(folder, tmp_path / "ours", target)


def test_an_empty_list_of_layers_is_none(folder: Path, target: Target, tmp_path: Path) -> None:
    """ModelOpt writes one where the layers are the usual ones."""
    change(folder, eagle_config={IDS: [], "use_aux_hidden_state": True})
    import_drafter(folder, tmp_path / "ours", target)
    assert config_of(tmp_path / "ours")["options"]["taps"] == [1, 3, 4]


@pytest.mark.parametrize("name", ["../outside.safetensors", "/outside.safetensors", "x.bin", 3])
def test_an_index_stays_inside_the_folder(
    name: object, folder: Path, target: Target, tmp_path: Path
) -> None:
    (folder / "model.safetensors").rename(tmp_path / "outside.safetensors")
    table = {"weight_map": {"norm.weight": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(table))
    with pytest.raises(UserError, match="only safetensors files inside the folder"):
        import_drafter(folder, tmp_path / "ours", target)


def test_shards_are_read(folder: Path, target: Target, tmp_path: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    places = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(names)}
    for file in set(places.values()):
        save_file({n: tensors[n] for n in names if places[n] == file}, folder / file)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    assert import_drafter(folder, tmp_path / "ours", target) == ()


@pytest.mark.parametrize("text", ["", "[]", "{" * 10])
def test_a_config_that_is_none(text: str, folder: Path, target: Target, tmp_path: Path) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(UserError, match=r"config.json (cannot be read|holds no object)"):
        import_drafter(folder, tmp_path / "ours", target)


@pytest.mark.parametrize("size", [0, 5, 200])
def test_a_truncated_file(size: int, folder: Path, target: Target, tmp_path: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(UserError, match="only whole safetensors are read"):
        import_drafter(folder, tmp_path / "ours", target)


def test_a_format_is_recognised_or_refused(folder: Path, target: Target, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"not in the format medusa; .* it is safeai"):
        import_drafter(folder, tmp_path / "ours", target, "medusa")
    with pytest.raises(UserError, match=r"no format 'vlm' is read here \(did you mean vllm"):
        import_drafter(folder, tmp_path / "ours", target, "vlm")


def test_no_two_formats_of_different_names_claim_a_foreign_file(folder: Path) -> None:
    names = {d.name for d in claiming(Foreign.read(folder))}
    assert names == {"safeai", "vllm", "sglang"}  # three users of one dialect
    assert reader(Foreign.read(folder)).name == "safeai"


def test_a_foreign_folder_is_no_drafter_of_ours(
    folder: Path, target: Target, tmp_path: Path
) -> None:
    """Its config says llama: a loader of causal LMs would make random weights of it."""
    with pytest.raises(UserError, match="format safeai or vllm or sglang: convert it"):
        load_drafter(folder, target)
    with pytest.raises(UserError, match="not a drafter that was trained here"):
        export_drafter(folder, "vllm", tmp_path / "out")


def test_nothing_is_overwritten(folder: Path, target: Target, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="exists already"):
        import_drafter(folder, folder, target)
    assert "draft_vocab_size" in config_of(folder)


def test_nan_is_not_written(target: Target, tmp_path: Path) -> None:
    folder = saved(target, tmp_path / "d", "eagle", draft_vocab_size=16)
    nan(folder)
    with pytest.raises(UserError, match=r"norm\.weight holds NaN"):
        export_drafter(folder, "vllm", tmp_path / "out")


def test_a_format_of_another_family(target: Target, tmp_path: Path) -> None:
    folder = saved(target, tmp_path / "d", "eagle", draft_vocab_size=16)
    with pytest.raises(UserError, match="medusa-vllm holds no eagle drafters: give --to safeai, "):
        export_drafter(folder, "medusa-vllm", tmp_path / "out")


def test_an_option_that_a_format_never_heard_of(target: Target, tmp_path: Path) -> None:
    """A family may gain options, and what such a drafter computes is in no file of others."""
    ours = read_ours(saved(target, tmp_path / "d", "eagle", draft_vocab_size=16), target)
    dialect = writer("vllm", "eagle")
    check_options(ours, dialect)
    check_options(replace(ours, options={**ours.options, "new": False}), dialect)
    with pytest.raises(UserError, match="the format vllm has no place for new = 3 of this eagle"):
        check_options(replace(ours, options={**ours.options, "new": 3}), dialect)


def test_the_list_has_a_line_a_format_and_family() -> None:
    lines = [line.split() for line in listing()]
    assert ["vllm", "to,", "from", "eagle"] in lines
    assert ["transformers", "to", "standalone"] in lines
    assert len({(line[0], line[-1]) for line in lines}) == len(lines)
