"""Publication: a drafter's folder made ready for others: weights, config, card, what they rest on.

Safetensors and JSON only. Paths of this machine are not told: of an absolute path the last part
stays. What is published was loaded once, exactly as whoever takes it will load it.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
import yaml
from jinja2 import TemplateError

from drafters import adapter
from drafters.adapter import ADAPTER, Adapter, is_adapter
from drafters.base import NeuralDrafter
from drafters.card import MANIFEST, Sources, card
from drafters.errors import UserError
from drafters.paths import without_paths
from drafters.stored import CONFIG, WEIGHTS, StoredDrafter, read_config
from drafters.untrusted import read_object
from drafters.whole import whole_folder

BENCHMARK, CARD, SETTINGS = "benchmark.json", "README.md", "settings.yaml"


@dataclass(frozen=True)
class Publication:
    """What will be published.

    Args:
        weights: the file with the tensors; copied as it is.
        texts: every other file by its name.
        beside: files of the target's adapter, copied as they are, by their names.
    """

    weights: Path
    texts: Mapping[str, str]
    beside: Mapping[str, Path] = field(default_factory=dict[str, Path])

    @classmethod
    def of(
        cls, folder: str | Path, place: str, benchmark: str | Path | None = None
    ) -> "Publication":
        """Make a publication of a trained drafter; nothing is written.

        Args:
            folder: that training wrote, such as runs/eagle/best; the run's settings.yaml is read
                beside it, the data's manifest where the data lies.
            place: where others will load it from: OWNER/NAME or a folder.
            benchmark: a benchmark.json that measured this folder; None: it is not measured.

        Raises:
            UserError: if the folder does not load, or the benchmark is of another drafter.
        """
        stored = StoredDrafter.read(folder)
        drafter = stored.load()
        for name, tensor in drafter.state_dict().items():
            if not bool(torch.isfinite(tensor).all()):
                raise UserError(f"{folder}: {name} holds values that are not finite: not published")
        try:
            texts = cls._texts(stored, drafter, place, benchmark) | _adapter_config(stored)
            return cls(stored.folder / WEIGHTS, texts, _adapter_files(stored))
        except UserError:
            raise
        except (LookupError, TypeError, AttributeError, ValueError, TemplateError) as error:
            sort = type(error).__name__
            raise UserError(
                f"{folder}: its notes or {benchmark or 'its manifest'} are not as training and "
                f"benchmark.py write them ({sort}: {error}): make them again"
            ) from error

    @staticmethod
    def _texts(
        stored: StoredDrafter, drafter: NeuralDrafter, place: str, benchmark: str | Path | None
    ) -> dict[str, str]:
        """Return what is published beside the weights."""
        sources = Sources(
            _read_yaml(stored.folder.parent / SETTINGS),
            _manifest(stored),
            {} if benchmark is None else read_object(Path(benchmark)),
        )
        plain = {"training": stored.training, "recipe": sources.recipe}
        shown = without_paths(plain)
        target = stored.made_for
        name, base = without_paths([target.name, target.base])
        made_for = replace(target, name=name, base=base)
        public = replace(stored, made_for=made_for, training=shown["training"])
        public_sources = replace(sources, recipe=shown["recipe"])
        texts = {
            CONFIG: _json(_config(stored)),
            CARD: card(public, drafter, public_sources, place),
        }
        if sources.manifest:
            texts[MANIFEST] = _json(without_paths(sources.manifest))
        if sources.benchmark:
            texts[BENCHMARK] = _json(without_paths(sources.benchmark))
        return texts

    @property
    def sizes(self) -> dict[str, int]:
        """Return the bytes of every file by its name."""
        found = {name: len(text.encode()) for name, text in self.texts.items()}
        copied = {name: path.stat().st_size for name, path in self.beside.items()}
        return {WEIGHTS: self.weights.stat().st_size, **copied, **found}

    def write(self, folder: str | Path) -> Path:
        """Write the files, into a folder that is new, empty, or holds an earlier publication.

        Raises:
            UserError: if something else lies there.
        """
        place = Path(folder)
        if place.resolve() == self.weights.parent.resolve():
            raise UserError(f"{place} is what is to be published: give another folder")
        if place.exists() and not place.is_dir():
            raise UserError(f"{place} is a file: give a folder")
        if place.is_dir() and {f.name for f in place.iterdir()} - _OURS:
            raise UserError(f"{place} holds other files: give a folder of its own")
        with whole_folder(place) as new:
            shutil.copyfile(self.weights, new / WEIGHTS)
            for name, path in self.beside.items():
                (new / name).parent.mkdir(exist_ok=True)
                shutil.copyfile(path, new / name)
            for name, text in self.texts.items():
                (new / name).write_text(text, encoding="utf-8")
        return place


_OURS = {WEIGHTS, CONFIG, CARD, MANIFEST, BENCHMARK, ADAPTER}
_TOKENIZER = {".json", ".jinja", ".txt", ".model"}


def _adapter_config(stored: StoredDrafter) -> dict[str, str]:
    """Return the settings of the target's adapter, by the file's name, if it learned along."""
    if not stored.made_for.adapter or not is_adapter(stored.folder / ADAPTER):
        return {}
    found = read_object(stored.folder / ADAPTER / adapter.CONFIG)
    return {f"{ADAPTER}/{adapter.CONFIG}": _json(without_paths(found))}


def _adapter_files(stored: StoredDrafter) -> dict[str, Path]:
    """Return what else makes the adapter's folder a target, by name.

    Raises:
        UserError: if it is not the one that the drafter was made for.
    """
    folder = stored.folder / ADAPTER
    if not _adapter_config(stored):
        return {}
    if Adapter.read(folder).digest != stored.made_for.adapter:
        raise UserError(f"{folder} is not the adapter that {stored.folder} was made for")
    files = [f for f in folder.iterdir() if f.suffix in _TOKENIZER and f.name != adapter.CONFIG]
    return {f"{ADAPTER}/{f.name}": f for f in sorted([*files, folder / adapter.WEIGHTS])}


def _config(stored: StoredDrafter) -> dict[str, Any]:
    """Return the config as it is but for paths; options are what the drafter is made of."""
    config = read_config(stored.folder)
    return {**without_paths(config), "options": config["options"]}


def _manifest(stored: StoredDrafter) -> dict[str, Any]:
    """Return the manifest of the data if it lies where training found it."""
    path = (stored.training.get("data") or {}).get("path")
    if not path:
        return {}
    place = Path(path)
    file = (place if place.is_dir() else place.parent) / "manifest.json"
    return read_object(file) if file.is_file() else {}


def _json(value: object) -> str:
    return json.dumps(value, indent=2) + "\n"


def _read_yaml(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"{path} cannot be read ({reason}): it is the run's recipe") from error
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}
