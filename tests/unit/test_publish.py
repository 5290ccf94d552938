"""Publishing: to a folder, to a hub on this machine, and back by load_drafter."""

import ast
import json
import shlex
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub.constants as hub_constants
import pytest
import torch
import yaml
from safetensors.torch import save_file

from drafters.base import NeuralDrafter
from drafters.checkpoint import load_drafter, save_drafter
from drafters.errors import UserError
from drafters.hub import is_hub_id
from drafters.publication import Publication
from drafters.registry import build_drafter
from drafters.stored import CONFIG, WEIGHTS, StoredDrafter
from drafters.target import Target
from inference.doctor import patient_of
from tests.fake_hub import TOKEN, FakeHub, Repository, fake_hub
from tests.folders import save_tiny_target
from tests.scripts import Done, run_script
from tests.tiny import tiny_model
from training.joint import Joint
from training.joint import publish as publish_joint
from training.target_settings import AdapterSettings

pytestmark = pytest.mark.slow

REPO = "someone/tiny-eagle"


@pytest.fixture(scope="module")
def target() -> Target:
    model = tiny_model(num_hidden_layers=3, hidden_size=32, intermediate_size=64)
    return Target(model, name="/home/me/models/tiny")


def training(place: Path) -> dict[str, Any]:
    return {
        "data": {
            "path": str(place / "chats"),
            "max_length": 512,
            "drop_cut": False,
            "held_out": 0.05,
            "template_options": {"enable_thinking": False},
        },
        "chats": "0123456789abcdef",
        "chat_template": "feedbeeffeedbeef",
        "loss": {"mix": {"kl": 1.0}},
        "optim": {"lr": 0.001},
        "seed": 3,
        "target_dtype": "float32",
        "step": 120,
        "metrics": {"agreement/1": 0.512, "tau": 1.83},
    }


@pytest.fixture
def folder(target: Target, tmp_path: Path) -> Path:
    torch.manual_seed(0)
    options = {"draft_vocab_size": 32, "taps": [0, 1, 2]}
    drafter = build_drafter("eagle", options, target.shape)
    assert isinstance(drafter, NeuralDrafter)
    place = tmp_path / "run"
    (place / "chats").mkdir(parents=True)
    manifest = {"command": f"make_chats.py --out {place}/chats", "settings": {"seed": 1}}
    (place / "chats" / "manifest.json").write_text(json.dumps(manifest))
    (place / "settings.yaml").write_text(yaml.safe_dump({"schedule": {"epochs": 4.0}}))
    return save_drafter(drafter, place / "best", target, training(place), torch.bfloat16)


@pytest.fixture
def benchmark(folder: Path) -> Path:
    one = {
        "name": f"{folder}:growth=chain,gamma=3",
        "checkpoint": str(folder),
        "growth": "chain",
        "shape": {"gamma": 3},
        "verify_mode": "lossless",
        "tau": 1.8345,
        "distinct_4": 0.812,
        "looped_share": 0.281,
        "alpha": 0.52,
        "speedup": 1.274,
        "speedup_interval": [1.19, 1.35],
        "identical": 8,
    }
    settings = {
        "prompts_file": "/home/me/mine.jsonl",
        "prompts": 8,
        "dtype": "float32",
        "temperature": 0.0,
        "max_new_tokens": 48,
        "rows": 1,
        "repeats": 3,
    }
    found = {"machine": {"cpu": "a CPU", "cores": 2}, "settings": settings, "drafters": [one]}
    path = folder.parent / "benchmark.json"
    path.write_text(json.dumps(found))
    return path


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    with fake_hub() as server:
        template = server.address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(hub_constants, "ENDPOINT", server.address)
        monkeypatch.setattr(hub_constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(hub_constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(hub_constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(hub_constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield server


def publish(*options: object) -> Done:
    return run_script("publish.py", *map(str, options))


def same(one: Any, other: Any) -> bool:
    pairs = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    return all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)


def test_a_folder_is_published_and_loads(
    folder: Path, benchmark: Path, target: Target, tmp_path: Path
) -> None:
    to = tmp_path / "published"
    done = publish(folder, "--to", to, "--benchmark", benchmark)
    assert (done.returncode, done.stdout.strip()) == (0, str(to)), done.stderr
    files = {"README.md", "benchmark.json", CONFIG, "data_manifest.json", WEIGHTS}
    assert {f.name for f in to.iterdir()} == files
    assert (to / WEIGHTS).read_bytes() == (folder / WEIGHTS).read_bytes()
    assert same(load_drafter(folder, target), load_drafter(to, target))
    everything = "".join(f.read_text() for f in to.iterdir() if f.name != WEIGHTS)
    assert "/home/me" not in everything
    assert str(tmp_path / "run") not in everything
    # nor of what drafted beside it
    measured = json.loads(benchmark.read_text())
    one = measured["drafters"][0]
    one["name"] = f"/home/me/other/best:corpus=/home/me/answers+{one['name']}"
    benchmark.write_text(json.dumps(measured))
    beside = publish(folder, "--to", to, "--benchmark", benchmark, "--dry-run").stdout
    assert "/home/me" not in beside
    assert f"best:corpus=answers+{to}:growth=chain,gamma=3" in beside
    # again: an earlier publication is replaced, anything else is left alone
    assert publish(folder, "--to", to).returncode == 0
    (to / "mine.txt").touch()
    refused = publish(folder, "--to", to)
    assert refused.returncode == 2
    assert "holds other files" in refused.stderr


def test_the_card_says_what_is_known(folder: Path, benchmark: Path) -> None:
    card = Publication.of(folder, REPO, benchmark).texts["README.md"]
    _, front, body = card.split("---\n", 2)
    assert yaml.safe_load(front) == {
        "library_name": "specdrafters",
        "pipeline_tag": "text-generation",
        "tags": ["speculative-decoding", "drafter", "eagle"],
    }
    stored = StoredDrafter.read(folder)
    for said in (
        "| model | tiny |",
        f"`{stored.made_for.weights}`",
        "layers 0, 1, 2, counted from 0",
        "entries 1, 2, 3, before any final norm",
        "It can say 32 of the target's 128 ids",
        "stored as bfloat16",
        "chats: `chats`, digest `0123456789abcdef` (see `data_manifest.json`",
        "answers cut by a length limit are kept; 5% of the chats were held out",
        "given {'enable_thinking': False}: serve with the same",
        "lr: 0.001",
        "epochs: 4.0",
        "120 optimizer steps. On held-out chats: agreement/1 0.512, tau 1.830.",
        "| chain 3 | lossless | 1.83 | 81% | 28% | 0.52 | 1.27 (1.19-1.35) | 8 of 8 |",
        "--prompts mine.jsonl",
        f"--drafter {REPO}:growth=chain,gamma=3",
        f'load_drafter("{REPO}", target)',
        "## Licence",
    ):
        assert said in body, (said, body)


def test_no_name_writes_the_card(folder: Path) -> None:
    """Names stand in prose, tables, Python and shell; none of them ends what it stands in."""
    config = json.loads((folder / CONFIG).read_text())
    name = 'x"); evil("|<script>alert(1)</script>`\n# Title [a](b)'
    config["target"]["name"] = name
    (folder / CONFIG).write_text(json.dumps(config))
    place = '/tmp/a b/$(touch x)"y'
    card = Publication.of(folder, place).texts["README.md"]
    shown = r'x"); evil("\|&lt;script>alert(1)&lt;/script>\` # Title \[a\](b)'
    assert f"| model | {shown} |" in card
    assert "<script>" not in card
    assert "\n# Title" not in card
    code = card.partition("```python\n")[2].partition("```")[0]
    calls = [n for n in ast.walk(ast.parse(code)) if isinstance(n, ast.Call)]
    given = [ast.literal_eval(c.args[0]) for c in calls if ast.unparse(c.func) == "load_drafter"]
    assert given == [place]
    lines = [line for line in card.splitlines() if "scripts/doctor.py" in line]
    assert [shlex.split(line)[-1] for line in lines] == [place]


def test_what_was_measured_together_is_said_to_be(folder: Path, benchmark: Path) -> None:
    found = json.loads(benchmark.read_text())
    [alone] = found["drafters"]
    joint = {**alone, "name": f"ngram:longest=4+{folder}:growth=chain,gamma=3", "tau": 2.5}
    benchmark.write_text(json.dumps({**found, "drafters": [alone, joint]}))
    body = Publication.of(folder, REPO, benchmark).texts["README.md"]
    assert "| chain 3 | lossless | 1.83 |" in body
    assert "| chain 3, together with ngram | lossless | 2.50 |" in body
    assert f"--drafter ngram:longest=4+{REPO}:growth=chain,gamma=3" in body


def test_a_card_without_a_benchmark_or_a_record_says_so(
    folder: Path, target: Target, tmp_path: Path
) -> None:
    card = Publication.of(folder, REPO).texts["README.md"]
    assert "Not measured yet" in card
    drafter = load_drafter(folder)
    assert isinstance(drafter, NeuralDrafter)
    bare = save_drafter(drafter, tmp_path / "bare", target)
    card = Publication.of(bare, REPO).texts["README.md"]
    assert "Not recorded." in card
    assert "optimizer steps" not in card


def test_a_drafter_is_published_to_the_hub_and_loaded_from_there(
    folder: Path, benchmark: Path, target: Target, hub: FakeHub
) -> None:
    done = publish(folder, "--to", REPO, "--benchmark", benchmark)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"{hub.address}/{REPO}"
    assert hub.repositories[REPO].private
    assert TOKEN not in done.stdout + done.stderr
    names = {"README.md", "benchmark.json", CONFIG, "data_manifest.json", WEIGHTS}
    assert set(hub.repositories[REPO].files) == names
    hub.repositories[REPO].files |= {"evil.bin": b"x", "evil.py": b"x"}
    asked = len(hub.asked)
    loaded = load_drafter(REPO, target)
    assert same(load_drafter(folder, target), loaded)
    assert not any("evil" in path for _, path, _ in hub.asked[asked:])
    assert patient_of(target, f"{REPO}@main", [[1, 2]]).stored is not None
    hub_folder = Path(hub_constants.HF_HUB_CACHE)
    assert not list(hub_folder.rglob("evil*"))


def test_visibility_is_as_it_was_asked_for(folder: Path, hub: FakeHub) -> None:
    hub.repositories[REPO] = Repository(private=False)
    refused = publish(folder, "--to", REPO)
    assert refused.returncode == 2
    assert "is open to all: give --public" in refused.stderr
    assert not hub.repositories[REPO].files
    assert publish(folder, "--to", REPO, "--public").returncode == 0
    assert publish(folder, "--to", "someone/other", "--public").returncode == 0
    assert not hub.repositories["someone/other"].private


def test_a_dry_run_asks_nobody_and_writes_nothing(
    folder: Path, hub: FakeHub, tmp_path: Path
) -> None:
    before = sorted(tmp_path.rglob("*"))
    done = publish(folder, "--to", REPO, "--dry-run")
    assert done.returncode == 0
    assert done.stdout.startswith("---\nlibrary_name")
    assert f"would publish to hub {REPO}, private" in done.stderr
    assert publish(folder, "--to", tmp_path / "x", "--dry-run").returncode == 0
    assert not hub.asked
    assert sorted(tmp_path.rglob("*")) == before


def test_a_wrong_token_is_one_line_without_it(
    folder: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_not_this_one")
    done = publish(folder, "--to", REPO)
    assert done.returncode == 2
    [line] = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "hf auth login" in line
    assert "hf_not_this_one" not in done.stderr
    with pytest.raises(UserError, match="the hub does not give it"):
        load_drafter(REPO)


def test_only_a_hub_id_asks_the_hub(
    hub: FakeHub, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    for spec in ("runs/eagel", "runs/demo/eagle", "/tmp/x/y", "../a", "ngrm"):
        assert not is_hub_id(spec)
        with pytest.raises(UserError):
            load_drafter(spec, target)
    assert not hub.asked
    with pytest.raises(UserError, match="the hub does not give it"):
        load_drafter("nobody/nothing", target)
    assert hub.asked


def test_what_cannot_be_published_is_refused(folder: Path, benchmark: Path, tmp_path: Path) -> None:
    def refused(*options: object) -> str:
        done = publish(*options)
        assert done.returncode == 2
        return done.stderr

    assert "give another folder" in refused(folder, "--to", folder)
    assert "leave it out" in refused(folder, "--to", tmp_path / "x", "--public")
    assert "without a revision" in refused(folder, "--to", f"{REPO}@main")
    assert "holds no config.json" in refused(tmp_path, "--to", tmp_path / "x")
    other = json.loads(benchmark.read_text())
    other["drafters"][0]["checkpoint"] = "runs/other"
    benchmark.write_text(json.dumps(other))
    said = refused(folder, "--to", tmp_path / "x", "--benchmark", benchmark)
    assert "the benchmark measured runs/other, not" in said


def test_offline_a_hub_id_is_one_line(target: Target) -> None:
    with warnings.catch_warnings(), pytest.raises(UserError, match="hub does not give it"):
        load_drafter("nobody/nothing", target)


def test_an_adapter_that_learned_along_is_published_with_its_drafter(tmp_path: Path) -> None:
    base = save_tiny_target(tmp_path / "base", num_hidden_layers=2)
    bare = Target.load(base)
    heads = build_drafter("medusa", {}, bare.shape)
    assert isinstance(heads, NeuralDrafter)
    joint = Joint(heads, bare, AdapterSettings(rank=2))
    for parameter in joint.parameters():
        parameter.data = (parameter + 0.1 * torch.randn_like(parameter)).bfloat16().float()
    run = tmp_path / "run" / "best"
    publish_joint(joint, run, bare, training(tmp_path), torch.bfloat16)
    found = Publication.of(run, "out")
    card = found.texts["README.md"]
    assert "the adapter in `adapter/`, which was trained with the drafter" in card
    assert "exact relative to target + adapter, not to the bare target" in card
    assert 'Target.load("out/adapter")' in card
    assert str(tmp_path) not in "".join(found.texts.values())
    place = found.write(tmp_path / "out")
    with pytest.raises(UserError, match=r"out/adapter: its base base: "):
        Target.load(place / "adapter")
    config = place / "adapter" / "adapter_config.json"
    config.write_text(config.read_text().replace('"base"', json.dumps(str(base))))
    target = Target.load(place / "adapter")
    assert target.tokenizer.chat_template
    assert same(load_drafter(place, target), load_drafter(run, joint.served_by(bare)))
    for_hub = Publication.of(run, "someone/x").texts["README.md"]
    assert "`hf download someone/x --local-dir DIR`" in for_hub
    assert 'Target.load("DIR/adapter")' in for_hub
    save_file({"x": torch.zeros(1)}, run / "adapter" / "adapter_model.safetensors")
    with pytest.raises(UserError, match="is not the adapter that"):
        Publication.of(run, "out")
