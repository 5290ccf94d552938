"""A real server writes what our engine writes: the embedded target, greedy, in float32."""

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from drafters.embedded import cached_folder
from drafters.settings import find_config
from drafters.target import Target
from inference.compare import compare
from inference.endpoint import Endpoint
from tests.engines.servers import ROOT, llama_server, vllm_server
from training.chat_settings import ChatSettings
from training.chats import ChatMaker
from training.reader import ChatReader
from training.remote import LOGPROBS, RETURNED
from training.sampler import EngineSampler, Sampler
from training.sources import Source, given_prompts
from training.writers import served_writer

CHATS, TOKENS = 16, 48
SERVERS = {"vllm": (vllm_server, RETURNED), "llama.cpp": (llama_server, LOGPROBS)}
BUILT = {"vllm": "vllm/bin/python", "llama.cpp": "llama.cpp/llama.cpp/build/bin/llama-server"}

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(not cached_folder().exists(), reason="needs the embedded target"),
]


def rows(reader: ChatReader, sampler: Sampler) -> dict[str, dict[str, Any]]:
    source = given_prompts(find_config("prompts/demo.jsonl"))
    settings = ChatSettings(temperatures=(0.0,), max_new_tokens=TOKENS, max_looped=1.0)
    first = Source(source.kind, source.starts[:CHATS])
    maker = ChatMaker(reader, sampler, first, settings, tick=lambda *_: None)
    shard = maker.make(0, CHATS, set())
    assert not shard.drops
    return {row["id"]: row for row in shard.rows}


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.load(cached_folder())


@pytest.fixture(scope="module")
def here(target: Target) -> dict[str, dict[str, Any]]:
    return rows(target, EngineSampler(target, 4))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=pytest.mark.skipif(
                not (ROOT / place).exists(), reason=f"no {name} here: run `make engines`"
            ),
        )
        for name, place in BUILT.items()
    ],
)
def test_ids_are_those_of_our_engine(
    name: str, target: Target, here: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    serve, how = SERVERS[name]
    with serve(cached_folder(), tmp_path) as address:
        writer = served_writer(str(cached_folder()), Endpoint(address), "served", 4)
        assert writer.identity["server"] == {"model": "served", "ids": how}
        there = rows(writer.reader, writer.sampler)
    assert there.keys() == here.keys()
    outcomes = [outcome(target, here[key], there[key]) for key in here]
    found = Counter(said.partition(":")[0] for said in outcomes)
    sys.stdout.write(f"\n{name}: {CHATS} answers of up to {TOKENS} tokens: {dict(found)}\n")
    assert not found["different"], [said for said in outcomes if said != "equal"]


def outcome(target: Target, ours: dict[str, Any], theirs: dict[str, Any]) -> str:
    start = ours["label_mask"].index(True)
    prompt = ours["ids"][:start]
    assert theirs["ids"][:start] == prompt
    difference = compare(target, prompt, ours["ids"][start:], theirs["ids"][start:])
    if difference is None:
        return "equal"
    return f"{'near-tie' if difference.near_tie else 'different'}: {difference}"
