from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import MISSING

from drafters.errors import UserError
from drafters.settings import configs_dir, find_config, load, to_yaml
from drafters.untrusted import LARGEST


class Colour(Enum):
    red = 1
    blue = 2


@dataclass
class Optim:
    lr: float = 1e-3
    steps: int = 3
    schedule: Literal["cosine", "flat"] = "cosine"
    clip: float | None = None

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"optim.steps = {self.steps}: give 1 or more")


@dataclass
class Section:
    where: Path = Path("here")
    colour: Colour = Colour.red


@dataclass
class Schema:
    target: str = MISSING
    optim: Optim = field(default_factory=Optim)
    extra: Section | None = None
    warm: bool = False
    layers: tuple[int, ...] = (1, 2)
    names: list[str] = field(default_factory=list)
    drafter: dict[str, Any] = field(default_factory=dict)


def refusal(tmp_path: Path, text: str = "", *overrides: str) -> str:
    file = tmp_path / "a.yaml"
    file.write_text(text)
    with pytest.raises(UserError) as caught:
        load(Schema, [file], ["target=t", *overrides])
    assert "\n" not in str(caught.value)
    return str(caught.value).replace(str(file), "a.yaml")


def test_later_sources_win_and_sections_merge(tmp_path: Path) -> None:
    first, second = tmp_path / "1.yaml", tmp_path / "2.yaml"
    first.write_text("target: one\noptim:\n  lr: 1e-4\n  steps: 7\nlayers: [1, 2, 3]\n")
    second.write_text("target: two\noptim: {steps: 8}\n")
    got = load(Schema, [first, second], ["optim.clip=2", "layers=[4]", "extra.colour=blue"])
    assert got == Schema(
        target="two",
        optim=Optim(lr=1e-4, steps=8, clip=2.0),
        extra=Section(colour=Colour.blue),
        layers=(4,),
    )


def test_free_form_section_takes_any_keys(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("target: t\ndrafter:\n  method: x\n  heads: {count: 3}\n")
    got = load(Schema, [file], ["drafter.heads.width=1e-3", "drafter.list=[1, a]"])
    assert got.drafter == {"method": "x", "heads": {"count": 3, "width": 1e-3}, "list": [1, "a"]}


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("")
    assert load(Schema, [tmp_path / "a.yaml"], ["target=t"]) == Schema(target="t")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optim.lrr=1", "unknown key 'optim.lrr'; the nearest known key is 'optim.lr'"),
        ("lr=1", "unknown key 'lr'; the nearest known key is 'optim.lr'"),
        ("optim.shedule=flat", "unknown key 'optim.shedule'; the nearest known key is"),
        ("colour=red", "unknown key 'colour'; the nearest known key is 'extra.colour'"),
        ("zzz=1", "unknown key 'zzz'; known keys: target, optim.lr, optim.steps"),
        ("optim.steps=1.5", "optim.steps = 1.5 is not allowed; give a whole number"),
        ("optim.steps=null", "optim.steps = None is not allowed; give a whole number"),
        ("optim.clip=x", "optim.clip = 'x' is not allowed; give a number or null"),
        ("optim.schedule=step", "'step' is not allowed; give one of cosine, flat"),
        ("optim=3", "give a section with the keys lr, steps, schedule, clip"),
        ("optim.lr.x=3", "optim.lr has no key 'x'; give it a number"),
        ("extra.colour=green", "extra.colour = 'green' is not allowed; give one of red, blue"),
        ("layers=[a]", "layers = ['a'] is not allowed; give a list [...], each a whole number"),
        ("layers=3", "layers = 3 is not allowed; give a list [...], each a whole number"),
        ("drafter=3", "drafter = 3 is not allowed; give a section of keys"),
        ("warm=maybe", "warm = 'maybe' is not allowed; give true or false"),
        ("optim.lr", "'optim.lr' is not a setting; write key=value or section.key=value"),
        ("=3", "'=3' is not a setting"),
        ("a..b=3", "'a..b=3' is not a setting"),
        ("optim.lr=[1", "'optim.lr=[1': the value is not valid YAML"),
        ("target=${nothing}", "target: Interpolation key 'nothing' not found"),
        ("optim.steps=0", "optim.steps = 0: give 1 or more"),
    ],
)
def test_a_wrong_override_is_named(tmp_path: Path, override: str, message: str) -> None:
    assert message in refusal(tmp_path, "", override)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("warm: true\noptim:\n  lr: 1\n  stepz: 2\n", "a.yaml line 4: unknown key 'optim.stepz'"),
        ("warm: true\nwarn: true\n", "a.yaml line 2: unknown key 'warn'; the nearest known"),
        ("optim:\n  lr: fast\n", "a.yaml line 2: optim.lr = 'fast' is not allowed"),
        ("warm: true\noptim: [1\n", "a.yaml line 3: not valid YAML"),
        ("warm: true\nwarm: false\n", "a.yaml line 2: not valid YAML"),
        ("- 1\n- 2\n", "a.yaml: holds list where a mapping of keys is needed"),
        ("a: \x00", "a.yaml: not valid YAML"),
    ],
)
def test_a_wrong_file_is_named_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    assert message in refusal(tmp_path, text)


def test_missing_file_and_missing_value(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.yaml: cannot be read: No such file"):
        load(Schema, [tmp_path / "none.yaml"])
    with pytest.raises(UserError, match=r"no value for target; .* or as target=VALUE"):
        load(Schema)


@pytest.mark.slow
@settings(max_examples=12)
@given(
    lr=st.floats(-LARGEST, LARGEST),
    text=st.text(st.characters(codec="utf-8", exclude_categories=["C"])),
    layers=st.lists(st.integers(-9, 99)),
    section=st.none() | st.builds(Section, colour=st.sampled_from(Colour)),
)
def test_settings_survive_yaml(
    tmp_path_factory: pytest.TempPathFactory, lr: float, text: str, layers: list, section: Any
) -> None:
    made = Schema(text.replace("$", ""), Optim(lr=lr), section, layers=tuple(layers))
    made.drafter = {"a": {"b": [lr, text.replace("$", "")]}}
    file = tmp_path_factory.mktemp("yaml") / "a.yaml"
    file.write_text(to_yaml(made), encoding="utf-8")
    assert load(Schema, [file]) == made


def test_own_configs_are_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (configs_dir() / "prompts" / "demo.jsonl").is_file()
    monkeypatch.chdir(tmp_path)
    own = configs_dir() / "prompts" / "demo.jsonl"
    assert find_config("configs/prompts/demo.jsonl") == own
    assert find_config("prompts/demo.jsonl") == own
    (tmp_path / "mine.yaml").write_text("")
    assert find_config("mine.yaml") == Path("mine.yaml")
    with pytest.raises(UserError, match=r"no config file nothing\.yaml"):
        find_config("nothing.yaml")
    for name in ("", "configs/../nothing.yaml"):  # nothing above the configs is looked through
        with pytest.raises(UserError, match=r"no config file .*one of: accelerate/cpu\.yaml"):
            find_config(name)
