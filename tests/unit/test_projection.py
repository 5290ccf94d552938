"""Plans on paper: public sizes of known targets, hand-worked sums, and runs that were made."""

import json
from pathlib import Path
from typing import Any

import pytest
from accelerate.commands.config.config_args import load_config_from_file

from drafters.base import NeuralDrafter
from drafters.errors import UserError
from drafters.registry import method, methods
from drafters.settings import configs_dir
from drafters.shape import TargetShape
from training.accelerators import Accelerator, accelerator
from training.achieved import Achieved, achieved, compared
from training.paper_target import PaperTarget, paper_target
from training.projection import Project, Utilisation, project
from training.workload import Workload, workload

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
SMALL = TargetShape(64, 128, 8, 4, 2, 16, 256, 512, rope=ROPE)
NEURAL = sorted(name for name, kind in methods().items() if issubclass(kind, NeuralDrafter))


@pytest.mark.parametrize(
    ("name", "whole", "active"),
    [
        ("llama-3.1-8b", 8_030_261_248, 8_030_261_248),
        ("llama-3.1-70b", 70_553_706_496, 70_553_706_496),
        ("qwen3-235b-a22b", 235_093_634_560, 22_190_763_520),
    ],
)
def test_known_targets_have_their_published_sizes(name: str, whole: int, active: int) -> None:
    found = paper_target(name)
    assert (found.parameters, found.active + 2 * found.table) == (whole, active)
    assert found.read(1) == found.active + found.table


def test_any_config_is_a_target(tmp_path: Path) -> None:
    config = {
        "model_type": "llama",
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 10,
        "rms_norm_eps": 1e-05,
        "tie_word_embeddings": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    for given in (tmp_path, tmp_path / "config.json"):
        found = paper_target(str(given))
        # a layer: four maps of 8 x 8, three of 8 x 16, two norms; one norm behind all
        assert (found.body, found.table) == (2 * (4 * 64 + 3 * 128 + 16) + 8, 80)
        assert found.parameters == found.body + found.table


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no config file targets/nowhere.yaml; .*llama-3.1-8b"),
        ("{", "cannot be read"),
        ("{}", "names no model_type"),
        ('{"model_type": "lama"}', "lama"),
        ('{"model_type": "llama", "rms_norm_eps": "small"}', "rms_norm_eps"),
    ],
)
def test_what_is_no_target_is_refused(tmp_path: Path, text: str | None, message: str) -> None:
    name = "nowhere"
    if text is not None:
        (tmp_path / "config.json").write_text(text)
        name = str(tmp_path)
    with pytest.raises(UserError, match=message):
        paper_target(name)


def test_medusa_by_hand() -> None:
    """Two blocks D x D with a bias and one head of K ids; 254 and 253 of 256 positions teach."""
    found = workload("medusa", {"heads": 2, "draft_vocab_size": 32}, SMALL)
    assert found.parameters == 2 * (64 * 64 + 64) + 64 * 32
    assert found.forward_flops == 2 * (64 * 64 + 64 * 32) * (254 + 253) / 256
    assert found.training_flops == 3 * found.forward_flops
    assert (found.taps, found.vocabulary, found.teacher_flops) == (0, 32, 2 * 64 * 256)


@pytest.mark.parametrize("name", NEURAL)
def test_every_family_says_what_a_token_costs(name: str) -> None:
    narrow, wide = (workload(name, {}, shape) for shape in (SMALL, _wider(SMALL)))
    assert 0 < narrow.forward_flops < wide.forward_flops
    assert narrow.parameters < wide.parameters
    assert narrow.kept_bytes < wide.kept_bytes
    assert workload(name, {}, SMALL, supervised=0.25).forward_flops <= narrow.forward_flops


def test_a_head_that_is_the_targets_is_counted() -> None:
    own, shared = (workload("eagle", {"head": head}, SMALL) for head in ("own", "target"))
    assert own.forward_flops == shared.forward_flops
    assert own.parameters == shared.parameters + 64 * 256


def _wider(shape: TargetShape) -> TargetShape:
    return TargetShape(**{**shape.to_dict(), "hidden_size": 128, "intermediate_size": 256})


def test_a_family_without_weights_is_not_trained() -> None:
    with pytest.raises(UserError, match="ngram has no weights to train: give dflash"):
        workload("ngram", {}, SMALL)


def test_the_paper_of_a_family_is_its_name_too() -> None:
    assert method("eagle3") is method("eagle")
    assert "eagle3" not in methods()


WORK = Workload(1000, 3, 32, forward_flops=2000.0, teacher_flops=500.0, kept_bytes=10.0)
TARGET = PaperTarget("paper", SMALL, parameters=40_000, body=7232, table=16_384)


def test_a_project_adds_up() -> None:
    device = Accelerator(memory=1e6, flops=1e6, bandwidth=1e5)
    plan = Project(TARGET, WORK, device, 2, 36_000, 2.0, 100, 50, 0.5, rows=4, chunk=10)
    found = project(plan, Utilisation(0.5, 0.5, 0.25))
    assert found["disk"]["gb_a_million_tokens"] == pytest.approx((4 * 64 * 2 + 8) / 1e3)
    memory = found["memory"]
    assert memory["drafter"] == 16 * 1000
    assert memory["states_of_a_batch"] == 100 * 4 * 64 * 4
    assert memory["kept_for_backward"] == 1000
    assert memory["with_target"] - memory["target_spread"] == 40_000  # half of 2 bytes each
    hours = found["hours"]
    assert hours["features"] == pytest.approx(36_000 * (2 * 7232 + 500) / 1e6 / 3600)
    assert hours["training"] == pytest.approx(36_000 * 2 * 6000 / 0.5e6 / 3600)
    # both devices hold a copy; four rows read its values and half a chat of cache each
    cache = 2 * 8 * 2 * 16 * 2 * 25
    speed = 4 / ((2 * (7232 + 16_384) + 4 * cache) / 0.5e5)
    assert hours["answers"] == pytest.approx(18_000 / 2 / speed / 3600)
    assert found["fits"]["copies_of_the_target"] == 2
    small = Project(TARGET, WORK, Accelerator(3e4, 1e6, 1e5), 2, 36_000)
    assert project(small)["hours"]["answers"] is None
    assert not project(small)["fits"]["with_target"]


def test_an_unknown_gpu_is_named() -> None:
    with pytest.raises(UserError, match="gpu is 'h1000': give rtx4090"):
        accelerator("h1000")


def test_one_run_predicts_the_others() -> None:
    """At 6000 operations a token the first makes 10 a second: 60 000 a second is the rate."""
    other = Workload(1000, 3, 32, forward_flops=1000.0, teacher_flops=0.0, kept_bytes=1.0)
    first = Achieved("a", WORK, TARGET, alone=10.0, first=3.0)
    second = Achieved("b", other, TARGET, alone=25.0, first=None)
    lines = compared([first, second])
    assert [(line["run"], line["predicted"]) for line in lines] == [
        ("a", pytest.approx(60_000 / (6000 + 2 * 7232 + 500))),
        ("b", 20.0),
    ]
    assert lines[1]["off"] == pytest.approx(-0.2)


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"settings\.yaml"):
        achieved(tmp_path)


def test_a_run_that_ended_in_its_first_pass_says_so(tmp_path: Path) -> None:
    line = {"tokens_per_second": 9.0, "epoch": 0.68}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line))
    (tmp_path / "settings.yaml").write_text("target: t\noutput: o\ndata: {path: d}\n")
    with pytest.raises(UserError, match=r"\(it made 0.68\): give a run that went over its chats"):
        achieved(tmp_path)


@pytest.mark.parametrize(
    "path", sorted(configs_dir().glob("accelerate/*.yaml")), ids=lambda p: p.stem
)
def test_accelerate_reads_its_configs(path: Path) -> None:
    config: Any = load_config_from_file(str(path))
    digits = [c for c in path.stem if c.isdigit()]
    assert config.num_processes == (int(digits[0]) if digits else 1 + path.stem.startswith("cpus"))
    assert (config.fsdp_config != {}) == path.stem.endswith("fsdp")
