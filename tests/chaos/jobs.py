"""Jobs: the commands that write, how they are called, and what must hold of what they leave."""

import hashlib
import json
import os
import random
import shutil
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
import yaml
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from drafters import dequantise, embedded
from drafters.base import NeuralDrafter
from drafters.checkpoint import load_drafter, save_drafter
from drafters.registry import build_drafter
from drafters.target import Target
from tests.folders import save_tiny_target
from tests.scripts import SCRIPTS, run_script
from training.run import main

CONFIGS = SCRIPTS.parent / "configs" / "smoke"
WORDS = ["the", "and", "in", "an", "then", "thin", "anthem", "band", "hand", "sand"]
Result = dict[str, str]


@dataclass(frozen=True)
class Job:
    """One command.

    Args:
        name: of it.
        run: call it with the output's place; returns its exit code.
        check: raise if what lies there cannot be read, or half of something passes for it.
        result: what lies there at the end, without clocks.
        before: what lies there before; None: nothing.
        again: exit codes of a call that finds the work done.
    """

    name: str
    run: Callable[[Path], int]
    check: Callable[[Path], None]
    result: Callable[[Path], Result]
    before: Path | None = None
    again: tuple[int, ...] = (0,)

    def prepare(self, out: Path) -> None:
        """Put there what lies there before."""
        if self.before is not None:
            shutil.copytree(self.before, out)


def jobs(root: Path) -> list[Job]:
    """Make the inputs of all commands under a folder and return the commands."""
    _inputs(root)
    published = _publish(root / "earlier", root / "published")
    assert published == 0
    small = root / "few chats"
    assert _chats(root, small, 8) == 0
    exported = root / "exported"
    assert _export(root, exported) == 0
    return [
        Job("fetch", lambda out: _fetch(root, out), _check_fetch, _fetched),
        Job("make_chats", lambda out: _chats(root, out, 20), _check_chats, _chats_made),
        Job("grow", lambda out: _chats(root, out, 20), _check_chats, _chats_made, small),
        Job("store_features", lambda out: _store(root, out), _check_store, _stored),
        Job("train", lambda out: _train(root, out), _check_run, _trained),
        Job(
            "export",
            lambda out: _export(root, out),
            lambda out: _one_of(out, exported),
            _files,
            again=(0, 2),
        ),
        Job(
            "publish",
            lambda out: _publish(root / "best", out),
            lambda out: _check_published(out, root),
            _files,
            root / "published",
        ),
    ]


def _inputs(root: Path) -> None:
    save_tiny_target(root / "target", num_hidden_layers=8)
    ends = list(range(2, 130))  # so that a random model comes to an end
    save_tiny_target(root / "talker", initializer_range=0.02, eos_token_id=ends)
    source = random.Random(0)
    with (root / "chats.jsonl").open("w") as stream:
        for number in range(40):
            said = [" ".join(source.choices(WORDS, k=k)) for k in (4, 9)]
            roles = zip(("user", "assistant"), said, strict=True)
            chat = [{"role": role, "content": text} for role, text in roles]
            stream.write(json.dumps({"id": f"chat-{number}", "messages": chat}) + "\n")
    target = Target.load(root / "target")
    for seed, name in enumerate(("earlier", "best")):
        torch.manual_seed(seed)
        drafter = build_drafter("eagle", {"taps": [1, 3, 4]}, target.shape)
        assert isinstance(drafter, NeuralDrafter)
        save_drafter(drafter, root / name, target, {"step": seed})
    with zipfile.ZipFile(root / "a.whl", "w") as archive:
        archive.writestr("a/model.gguf", b"12345")
    embedded.WHEEL = embedded.Wheel("a==1", embedded.sha256(root / "a.whl"), "a/model.gguf", 5)
    embedded.NEEDED_BYTES = 1
    dequantise.convert = _convert


def _convert(gguf: Path, into: Path) -> None:
    """Stand for the conversion: what it writes, and no more than a few bytes of it."""
    (into / "config.json").write_text(gguf.read_text())
    save_file({"weight": torch.arange(9.0)}, into / "model.safetensors")


def _fetch(root: Path, out: Path) -> int:
    os.environ["DRAFTERS_CACHE"] = str(out)
    return run_script("fetch_target.py", "--wheel", str(root / "a.whl")).shown()


def _check_fetch(out: Path) -> None:
    folder = out / "targets" / embedded.NAME
    assert not folder.exists() or embedded.damage(folder, verify=True) is None


def _fetched(out: Path) -> Result:
    return _files(out / "targets" / embedded.NAME)


def _chats(root: Path, out: Path, chats: int) -> int:
    given = ["--target", root / "talker", "--out", out, "--chats", chats, "--shard", 4]
    given += ["--max-new-tokens", 8, "--user-tokens", 8, "--rows", 8, "--max-looped", 1]
    given += ["--temperatures", "1,0.9", "--features", "0,2"]
    return run_script("make_chats.py", *map(str, given)).shown()


def _check_chats(out: Path) -> None:
    for file in out.rglob("*.parquet"):
        pq.read_table(file)
    for file in out.rglob("*.json"):
        json.loads(file.read_text())
    if (out / "manifest.json").exists():
        assert (out / "chats.parquet").exists()
    if (out / "features").exists():
        _check_store(out / "features")


def _chats_made(out: Path) -> Result:
    assert {f.name for f in out.iterdir()} == {"chats.parquet", "manifest.json", "features"}
    manifest = json.loads((out / "manifest.json").read_text())
    for clock in ("seconds", "tokens_per_second", "command", "machine"):
        manifest.pop(clock)
    rows = pq.read_table(out / "chats.parquet").to_pylist()
    told = {"chats": _digest(rows), "manifest": _digest(manifest)}
    return told | _stored(out / "features")


def _store(root: Path, out: Path) -> int:
    given = [f"target={root / 'target'}", f"data.path={root / 'chats.jsonl'}"]
    given += [f"features.store={out}"]
    config = ("--config", str(CONFIGS / "eagle.yaml"))
    return run_script("store_features.py", "eagle", *config, *given).shown()


def _check_store(out: Path) -> None:
    _stored(out)


def _stored(out: Path) -> Result:
    """Return the digest of every chat's states, in whatever shard they lie."""
    found: Result = {}
    for file in sorted(out.glob("*.safetensors")):
        with safe_open(file, "pt") as shard:
            start = 0
            for key, count in json.loads(shard.metadata()["documents"]):
                parts = [shard.get_slice(n)[start : start + count] for n in sorted(shard.keys())]
                found[key] = _digest([part.float().tolist() for part in parts])
                start += count
    return found


def _train(root: Path, out: Path) -> int:
    given = [f"target={root / 'target'}", f"data.path={root / 'chats.jsonl'}", f"output={out}"]
    given += ["schedule.steps=6", "save_times=3", "evaluate.times=2", "resume=true"]
    sys.argv = ["train_medusa.py", "--config", str(CONFIGS / "medusa.yaml"), *given]
    try:
        main("medusa", "smoke/medusa.yaml", "Train.")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1


def _check_run(out: Path) -> None:
    for name in ("best", "last"):
        if (out / name).exists():
            load_drafter(out / name)
    if (out / "state.safetensors").exists():
        load_file(out / "state.safetensors")
    if (out / "settings.yaml").exists():
        assert "schema_version" in yaml.safe_load((out / "settings.yaml").read_text())


def _trained(out: Path) -> Result:
    found = {name: _digest(_files(out / name)) for name in ("best", "last")}
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    measured = [line for line in lines if "tau" in line]
    return (
        found
        | {"settings": _digest((out / "settings.yaml").read_text())}
        | {"measured": _digest(measured)}
    )


def _export(root: Path, out: Path) -> int:
    return run_script("export.py", str(root / "best"), "--to", "vllm", "--out", str(out)).shown()


def _publish(folder: Path, out: Path) -> int:
    return run_script("publish.py", str(folder), "--to", str(out)).shown()


def _check_published(out: Path, root: Path) -> None:
    load_drafter(out)
    new = root / "published now"
    if not new.exists():
        assert _publish(root / "best", new) == 0
    if _files(out)["model.safetensors"] != _files(new)["model.safetensors"]:
        _one_of(out, root / "published")


def _one_of(out: Path, whole: Path) -> None:
    assert not out.exists() or _files(out) == _files(whole), f"{out.name} is half there"


def _files(folder: Path) -> Result:
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
