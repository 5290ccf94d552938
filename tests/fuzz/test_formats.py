"""Every file format that is read: damaged files are refused in one line, whatever the damage.

DRAFTERS_FUZZ=2000 tries so many of each; CI tries a few.
"""

import copy
import json
import os
import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from drafters import embedded
from drafters.base import NeuralDrafter
from drafters.cache_root import cache_root
from drafters.checkpoint import load_drafter, save_drafter
from drafters.errors import UserError
from drafters.formats.convert import export_drafter, import_drafter
from drafters.formats.generation_config import read_warp
from drafters.growth.ranks import read_paths
from drafters.growth.static import Static
from drafters.publication import Publication
from drafters.registry import build_drafter
from drafters.sampling import Warp
from drafters.settings import load
from drafters.target import Target
from drafters.untrusted import read_object
from drafters.warmstart import WarmStart
from inference import report
from inference.cost_store import CostStore
from inference.costs import CostTable
from inference.prompts import read_prompts
from inference.spec import Spec
from tests.folders import save_tiny_target
from tests.unit.test_adapter import tuned
from training.feature_store import ABOUT, FeatureStore, Kind
from training.options import TrainSettings
from training.records import read_records, template_options_of, writer_of
from training.shards import ShardFolder
from training.sources import given_prompts, given_texts, self_chat
from training.state import Progress, load_state, save_state

BUDGET = int(os.environ.get("DRAFTERS_FUZZ", "12"))
LIMIT = 30.0  # seconds of one read, on a busy machine

Read = Callable[[], object]


@dataclass
class Format:
    """A file that is read.

    Args:
        file: where the damaged one is written.
        good: what a sound one holds.
        read: reads it.
        lines: whether JSON is one object a line.
    """

    file: Path
    good: bytes
    read: Read
    lines: bool = False
    extra: list[bytes] = field(default_factory=list[bytes])

    def refuses(self, damaged: bytes) -> None:
        """Read a damaged file: it is taken, or refused in one line."""
        self.file.write_bytes(damaged)
        said = "refused"
        try:
            self.read()
        except UserError as error:
            said = str(error)
        finally:
            self.file.write_bytes(self.good)
        assert 0 < len(said.strip()) < 4000 + 4 * len(damaged)


WORDS = ["", "a", "..", "/etc/passwd", "nan", "-1", "{{ 7 * 7 }}", "\ud800", "x" * 5000]
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=True)
    | st.sampled_from(WORDS)
    | st.text(max_size=8)
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)


def mutated(held: Any, value: Any, choose: random.Random) -> Any:
    """Replace, drop or add one thing somewhere in plain values."""
    held = copy.deepcopy(held)
    node, path = held, []
    while isinstance(node, dict | list) and node and (not path or choose.random() < 0.7):
        key = choose.choice(list(node) if isinstance(node, dict) else range(len(node)))
        path.append((node, key))
        node = node[key]
    if not path:
        return value
    above, key = path[-1]
    action = choose.choice(["replace", "replace", "drop", "add"])
    if action == "drop":
        del above[key]
    elif action == "add" and isinstance(above, dict):
        above["unknown"] = value
    else:
        above[key] = value
    return held


def torn(good: bytes, choose: random.Random) -> bytes:
    """Cut bytes, or change a few."""
    found = bytearray(good)
    if choose.random() < 0.3:
        return bytes(found[: choose.randrange(len(found))])
    for _ in range(choose.randint(1, 4)):
        place = choose.randrange(min(len(found), 4096))
        found[place] = choose.randrange(256)
    return bytes(found)


def damaged(one: Format, value: Any, choose: random.Random) -> bytes:
    """Return a damaged file: bytes, or what JSON or YAML it holds, or a safetensors header."""
    if choose.random() < 0.35:
        return torn(one.good, choose)
    if one.file.suffix == ".safetensors":
        length = struct.unpack("<Q", one.good[:8])[0]
        header = mutated(json.loads(one.good[8 : 8 + length]), value, choose)
        text = json.dumps(header).encode()
        return struct.pack("<Q", len(text)) + text + one.good[8 + length :]
    if one.file.suffix == ".yaml":
        plain = mutated(yaml.safe_load(one.good), value, choose)
        return json.dumps(plain).encode()  # YAML too
    if one.file.suffix in (".json", ".jsonl"):
        text = one.good.decode()
        held = [json.loads(x) for x in text.splitlines()] if one.lines else json.loads(text)
        plain = mutated(held, value, choose)
        if one.lines and isinstance(plain, list):
            return "\n".join(map(json.dumps, plain)).encode()
        return json.dumps(plain).encode()
    return json.dumps(value).encode()


@pytest.fixture(scope="module")
def formats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Format]]:
    root = tmp_path_factory.mktemp("fuzz")
    patch = pytest.MonkeyPatch()
    native = cache_root() / "native"  # compiled once a machine
    native.mkdir(parents=True, exist_ok=True)
    (root / "cache").mkdir()
    (root / "cache" / "native").symlink_to(native)
    patch.setenv("DRAFTERS_CACHE", str(root / "cache"))
    made = _made(root)
    yield made
    patch.undo()


def _made(root: Path) -> dict[str, Format]:
    sizes = {"num_hidden_layers": 3, "hidden_size": 16, "intermediate_size": 32}
    place = save_tiny_target(root / "target", num_attention_heads=2, **sizes)
    target = Target.load(place)
    drafter = build_drafter("eagle", {"draft_vocab_size": 32, "taps": [0, 1, 2]}, target.shape)
    assert isinstance(drafter, NeuralDrafter)
    folder = save_drafter(drafter, root / "run" / "best", target, {"step": 1})
    foreign = root / "foreign"
    export_drafter(folder, "vllm", foreign)
    found: dict[str, Format] = {}

    def add(name: str, file: Path, read: Read, good: object = None, lines: bool = False) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        if good is not None:
            text = good if isinstance(good, str) else json.dumps(good)
            file.write_text(text)
        found[name] = Format(file, file.read_bytes(), read, lines)

    def imported() -> None:
        try:
            import_drafter(foreign, root / "imported", target, allow_loss=True)
        except UserError:
            assert not (root / "imported").exists()
            raise
        for file in (root / "imported").iterdir():
            file.unlink()
        (root / "imported").rmdir()

    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    prompt = {"question_id": 1, "category": "c", "turns": ["a", "b"]}
    for name in ("config.json", "model.safetensors"):
        add(f"drafter {name}", folder / name, lambda: load_drafter(folder, target))
        add(f"warm start {name}", folder / name, lambda: WarmStart.read(folder))
        add(f"foreign {name}", foreign / name, imported)
        add(f"target {name}", place / name, lambda: Target.load(place))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        add(f"target {name}", place / name, lambda: Target.load(place))
    adapted = tuned(place, root / "adapted", r=2)[0]
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        add(f"adapter {name}", adapted / name, lambda: Target.load(adapted))
    for name, rows in (
        ("messages", [{"id": "x", "messages": chat}] * 2),
        ("ids", [{"ids": [1, 2, 3], "label_mask": [False, True, True]}]),
        ("pair", [{"prompt": "a", "response": "b", "tools": "[]"}]),
        ("sharegpt", [{"conversations": [{"from": "human", "value": "a"}]}]),
    ):
        file = root / f"{name}.jsonl"
        text = "\n".join(map(json.dumps, rows)) + "\n"
        add(f"chats {name}", file, lambda file=file: read_records(file), text, lines=True)
    rows = pa.Table.from_pylist([{"ids": [1, 2], "label_mask": [True, False]}] * 9)
    pq.write_table(rows, root / "chats.parquet")
    add("chats parquet", root / "chats.parquet", lambda: read_records(root / "chats.parquet"))
    prompts = root / "prompts.jsonl"
    text = json.dumps(prompt) + "\n"
    add("prompts", prompts, lambda: (read_prompts(prompts), given_prompts(prompts)), text, True)
    words = root / "words.txt"
    add("texts", words, lambda: (given_texts(words), self_chat(words, 0)), "code\tWrite a\n")
    config = root / "train.yaml"
    smoke = {"schema_version": 1, "data": {"batch_tokens": 256}, "drafter": {"heads": 2}}
    add(
        "config",
        config,
        lambda: load(TrainSettings, [config], ["target=a", "output=b", "data.path=c"]),
        yaml.safe_dump(smoke),
    )
    tree = root / "tree.json"
    add("tree", tree, lambda: Static(tree=read_paths(tree)).shape, {"paths": [[0], [1], [0, 0]]})
    add("tree spec", tree, lambda: Spec.parse(f"none:growth=static,tree={tree}"))
    store = CostStore(target, Warp())
    table = CostTable({(1, 1): 0.1}, {(1, 1): 0.1}, {})
    store.add(table)
    add("costs", store.path, store.load)
    kind = Kind.of(target, (0,), "float32")
    features = root / "features"
    about = {**kind.__dict__, "target": kind.target.to_dict(), "schema_version": 1}
    add("features", features / ABOUT, lambda: FeatureStore(features, kind), about)
    made = {"settings": {"goal": {"tokens": None, "chats": 1}}, "chats": 1, "supervised_tokens": 3}
    data = root / "data"
    goal = {"goal": {"tokens": None, "chats": 1}}
    add("manifest", data / "manifest.json", lambda: ShardFolder(data, goal), made)
    hints = root / "hints"
    add(
        "manifest of chats",
        hints / "manifest.json",
        lambda: (writer_of(hints), template_options_of(hints)),
        {"settings": {"target": target.shape.to_dict(), "sampling": {"template_options": {}}}},
    )
    state = root / "state.safetensors"
    _state(state)
    add("state", state, lambda: _state(state, read=True))
    measured = _benchmark(folder)
    benchmark = root / "benchmark.json"
    add("benchmark", benchmark, lambda: Publication.of(folder, "x", benchmark), measured)
    add("benchmark read", benchmark, lambda: report.read(benchmark))
    recipe = folder.parent / "settings.yaml"
    add("recipe", recipe, lambda: Publication.of(folder, "x"), "schedule: {epochs: 4.0}\n")
    cached = cache_root() / "targets" / embedded.NAME
    cached.mkdir(parents=True)
    (cached / "config.json").write_text("{}")
    embedded.write_manifest(cached, {})
    add("cached", cached / "manifest.json", lambda: embedded.damage(cached, verify=True))
    options = root / "options.json"
    good = {"do_sample": True, "temperature": 0.5, "top_k": 3, "sequence_bias": [[[1], 2.0]]}
    add("generation", options, lambda: read_warp(read_object(options)), good)
    return found


def _state(file: Path, read: bool = False) -> None:
    import torch

    module = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(module.parameters())
    if read:
        load_state(file, module, optimizer, {"seed": 1})
        return
    module(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    save_state(file, module, optimizer.state, Progress(), {"seed": 1}, [torch.get_rng_state()])


def _benchmark(folder: Path) -> dict[str, Any]:
    one = {
        "name": str(folder),
        "checkpoint": str(folder),
        "growth": "chain",
        "shape": {"gamma": 3},
        "verify_mode": "lossless",
        "draft_mode": "argmax",
        "tau": 1.8,
        "alpha": 0.5,
        "speedup": 1.2,
        "speedup_interval": [1.1, 1.3],
        "identical": 3,
        "near_ties": 0,
    }
    settings_ = {
        "prompts": 3,
        "max_new_tokens": 8,
        "temperature": 0.0,
        "rows": 1,
        "repeats": 1,
        "seed": 0,
        "prompt_file": "x.jsonl",
    }
    return {
        "target": {"name": "t", "title": "t", "dtype": "float32", "engine": "fast"},
        "machine": {"cpu": "x", "cores": 2},
        "versions": {},
        "settings": settings_,
        "drafters": [one],
    }


NAMES = [
    "adapter adapter_config.json",
    "adapter adapter_model.safetensors",
    "benchmark",
    "benchmark read",
    "cached",
    "chats ids",
    "chats messages",
    "chats pair",
    "chats parquet",
    "chats sharegpt",
    "config",
    "costs",
    "drafter config.json",
    "drafter model.safetensors",
    "features",
    "foreign config.json",
    "foreign model.safetensors",
    "generation",
    "manifest",
    "manifest of chats",
    "prompts",
    "recipe",
    "state",
    "target config.json",
    "target generation_config.json",
    "target model.safetensors",
    "target tokenizer.json",
    "target tokenizer_config.json",
    "texts",
    "tree",
    "tree spec",
    "warm start config.json",
    "warm start model.safetensors",
]


@pytest.mark.slow
def test_every_format_has_its_test(formats: dict[str, Format]) -> None:
    assert sorted(formats) == NAMES


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMES)
def test_damage_is_refused_in_one_line(formats: dict[str, Format], name: str) -> None:
    one = formats[name]

    @settings(max_examples=BUDGET, deadline=LIMIT * 1000, suppress_health_check=list(HealthCheck))
    @given(value=values, seed=st.integers(0, 2**32))
    def tried(value: Any, seed: int) -> None:
        one.refuses(damaged(one, value, random.Random(seed)))

    tried()
    for data in (b"", b"\x00" * 64, b"[" * 100_000, b"{", b'"x"', b"\xff\xfe", b"null"):
        one.refuses(data)
