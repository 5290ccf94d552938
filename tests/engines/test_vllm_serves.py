"""vLLM drafts what is drafted here: random drafters of every family that it serves, in float32."""

import sys
from pathlib import Path

import pytest

from drafters.checkpoint import load_drafter
from drafters.formats.convert import export_drafter
from drafters.formats.served import SERVED, serving
from drafters.target import Target
from inference.served import Engine, Job, Served
from inference.served.comparison import decode, same_drafts, sameness
from tests.engines.servers import ROOT, folder_for_vllm
from tests.foreign import saved
from tests.tiny import prompts_of

GAMMA, TOKENS = 3, 24
PROMPTS = prompts_of(5, 12, 30, vocab_size=256)
# what each needs so that its format loses nothing
OPTIONS: dict[str, dict[str, object]] = {
    "eagle": {"draft_vocab_size": 32},
    "eagle1": {"draft_vocab_size": 0, "fusion_bias": False},
    "medusa": {"draft_vocab_size": 0, "heads": GAMMA},
    "standalone": {"draft_vocab_size": 0, "num_layers": 2},
    "dflash": {"draft_vocab_size": 32, "taps": [1, 5], "slots": GAMMA, "qk_norm": True},
    "dspark": {
        "draft_vocab_size": 32,
        "taps": [1, 5],
        "slots": GAMMA,
        "qk_norm": True,
        "markov_rank": 4,
    },
}

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(
        not (ROOT / "vllm/bin/python").exists(), reason="no engines here: run `make engines`"
    ),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_for_vllm(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def job(folder: Path) -> Job:
    return Job(folder, PROMPTS, TOKENS, "float32", 1)


@pytest.fixture(scope="module")
def plain(job: Job) -> Served:
    return Engine.built("vllm").run(job)


@pytest.mark.parametrize("family", [family for engine, family in SERVED if engine == "vllm"])
def test_ids_are_those_of_here(
    family: str, folder: Path, job: Job, plain: Served, tmp_path: Path
) -> None:
    target = Target.load(folder)
    place = saved(target, tmp_path / "ours", family, **OPTIONS[family])
    way = serving("vllm", family)
    export_drafter(place, way.format, tmp_path / "theirs", target)
    served = Engine.built("vllm").run(job.drafted(tmp_path / "theirs", way, GAMMA))
    same = sameness(target, PROMPTS, plain.outputs, served.outputs)
    ours = decode(target, load_drafter(place, target), PROMPTS, GAMMA, TOKENS)
    found = same_drafts(ours, served)
    sys.stdout.write(f"\n{family}: texts {same}, rounds {found}\n")
    assert not same["different"]
    assert found is not None
    assert found["equal"] == found["met"] > TOKENS
