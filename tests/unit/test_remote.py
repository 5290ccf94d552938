"""Chats that a server writes: the same rows as here, through faults, kills and poorer answers."""

import json
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from drafters.errors import UserError
from drafters.fingerprint import Fingerprint
from drafters.target import Target
from inference.endpoint import Endpoint
from tests.fake_server import FakeServer, serving
from tests.folders import save_tiny_target
from tests.scripts import Done, run_script
from training.chat_settings import ChatSettings
from training.chats import ChatMaker, Shard
from training.reader import WeightlessReader
from training.remote import ENCODED, LOGPROBS, RETURNED, RemoteSampler
from training.sampler import EngineSampler, Sampler
from training.sources import PROMPTS, Source, Start, self_chat

CHATS = 8
WORDS = Source(PROMPTS, tuple(Start(str(i), given=(f"word {i}",)) for i in range(CHATS)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # greedy answers of these weights: half end by themselves, half loop
    sizes = {"num_hidden_layers": 2, "initializer_range": 0.05, "seed": 2}
    ends = [2, *range(253, 259)]
    return save_tiny_target(tmp_path_factory.mktemp("target"), eos_token_id=ends, **sizes)


@pytest.fixture(scope="module")
def target(folder: Path) -> Target:
    return Target.load(folder)


def remote(server: FakeServer, folder: Path, key: str | None = None) -> RemoteSampler:
    endpoint = Endpoint(server.address, key, wait=0.001)
    return RemoteSampler(endpoint, "served", WeightlessReader.load(str(folder)), 4)


def made(
    folder: Path, sampler: Sampler, temperatures: tuple[float, ...] = (0.0,), **more: Any
) -> Shard:
    reader = WeightlessReader.load(str(folder))
    options = {"max_new_tokens": 24, "max_looped": 1.0, "user_tokens": 64, **more}
    settings = ChatSettings(temperatures=temperatures, **options)
    source = self_chat(None, 0) if "turns" in more else WORDS
    maker = ChatMaker(reader, sampler, source, settings, tick=lambda *_: None)
    return maker.make(0, CHATS, set())


@pytest.mark.parametrize(("where", "how"), [("token_ids", RETURNED), ("logprobs", LOGPROBS)])
def test_returned_ids_make_the_rows_that_are_made_here(
    folder: Path, target: Target, where: str, how: str
) -> None:
    here = made(folder, EngineSampler(target, 4))
    assert {row["finish_reason"] for row in here.rows} == {"stop", "length"}
    with serving(FakeServer(target, where)) as server:
        sampler = remote(server, folder)
        assert sampler.ids == how
        there = made(folder, sampler)
    assert (there.rows, there.keys, there.drops) == (here.rows, here.keys, here.drops)
    asked = server.asked[-1]
    assert asked["temperature"] == 0.0
    assert (asked["top_p"], asked["top_k"], asked["repetition_penalty"]) == (1.0, -1, 1.0)
    assert asked["stop_token_ids"] == sorted(target.eos_ids)
    assert "seed" not in asked


@pytest.mark.slow
def test_looping_answers_are_dropped_where_the_engine_abandons_them(
    folder: Path, target: Target
) -> None:
    long = {"max_new_tokens": 100, "max_looped": 0.2}
    here = made(folder, EngineSampler(target, 4), **long)
    assert here.drops["looping answer"]
    with serving(FakeServer(target)) as server:
        there = made(folder, remote(server, folder), **long)
    assert (there.rows, there.drops) == (here.rows, here.drops)


@pytest.mark.slow
def test_a_self_chat_goes_through_the_same_door(folder: Path, target: Target) -> None:
    with serving(FakeServer(target)) as server:
        options = {"turns": 2, "max_new_tokens": 24}
        shards = [made(folder, remote(server, folder), (1.0,), **options) for _ in range(2)]
    assert shards[0].rows == shards[1].rows
    assert any(len(row["messages"]) == 4 for row in shards[0].rows)
    seeds = {body["seed"] for body in server.asked if "seed" in body}
    assert len(seeds) > CHATS


@pytest.mark.slow
def test_text_is_encoded_again_and_what_is_not_certain_dropped(
    folder: Path, target: Target
) -> None:
    with serving(FakeServer(target, "nowhere")) as server:
        sampler = remote(server, folder)
        assert sampler.ids == ENCODED
        # bytes that are no text
        assert made(folder, sampler).drops == {"answer whose ids are not certain": CHATS}
    loaded = Target.load(folder)
    with torch.no_grad():  # nothing but ASCII and the ending tokens is ever likely
        head = loaded.model.get_output_embeddings().weight
        head[97:253] = head[259:] = 0
    letters = Target(loaded.model, loaded.tokenizer)
    here = made(folder, EngineSampler(letters, 4))
    with serving(FakeServer(letters, "nowhere")) as server:
        there = made(folder, remote(server, folder))
    assert len(there.rows) == len(here.rows) > 1
    for ours, theirs in zip(here.rows, there.rows, strict=True):
        # of many ending tokens the text does not say which
        assert theirs["ids"][:-1] == ours["ids"][:-1]
        assert theirs["finish_reason"] == ours["finish_reason"]


def test_a_busy_or_restarting_server_is_asked_again(folder: Path, target: Target) -> None:
    here = made(folder, EngineSampler(target, 4))
    faults = {0: (503, {"error": {"message": "loading"}}), 1: (429, {}), 2: (0, {})}

    def often(number: int) -> tuple[int, dict[str, Any]] | None:
        return faults.get(number % 6)

    with serving(FakeServer(target, fault=often)) as server:
        sampler = remote(server, folder)
        assert made(folder, sampler).rows == here.rows
    assert sampler.endpoint.retries == len(server.asked) - CHATS - 1 > 2


def test_the_servers_context_is_the_limit(folder: Path, target: Target) -> None:
    with serving(FakeServer(target, limit=40)) as server:
        shard = made(folder, remote(server, folder))
    assert shard.rows
    assert max(len(row["ids"]) for row in shard.rows) <= 40
    with serving(FakeServer(target, limit=4)) as server:
        assert made(folder, remote(server, folder)).drops == {
            "prompt longer than the context": CHATS
        }


def test_an_ending_token_that_is_left_out_is_put_back(folder: Path, target: Target) -> None:
    def trim(choice: dict[str, Any]) -> None:
        if choice["finish_reason"] == "stop":
            choice["matched_stop"] = choice["token_ids"].pop()

    here = made(folder, EngineSampler(target, 4))
    with serving(FakeServer(target, change=trim)) as server:
        assert made(folder, remote(server, folder)).rows == here.rows


def swapped(choice: dict[str, Any]) -> None:
    choice["text"] = "Other words altogether"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"change": swapped}, "has another tokenizer than"),
        ({"change": lambda c: c.update(token_ids=[70000])}, "has another tokenizer than"),
        ({"key": "k"}, r"wants a key \(401\): name the environment variable"),
        ({"fault": lambda _: (400, {"message": "x is too long for the context"})}, "max-new-tok"),
        ({"fault": lambda _: (200, {"choices": []})}, "answers without a choice"),
        ({"fault": lambda _: (503, {})}, "gave no answer in 7 tries: 503"),
        ({"fault": lambda _: (307, {})}, "refuses a request: 307"),
    ],
)
def test_what_is_wrong_with_a_server_is_one_line(
    folder: Path, target: Target, changes: dict[str, Any], message: str
) -> None:
    with serving(FakeServer(target, **changes)) as server, pytest.raises(UserError, match=message):
        remote(server, folder)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("127.0.0.1:8000", "give an address such as"),
        ("ftp://host/", "give an address such as"),
        ("http://me:secret@host", "on host has more in it than host and path"),
        ("http://host?key=secret", "on host has more in it than host and path"),
    ],
)
def test_addresses(url: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        Endpoint(url)
    assert "secret" not in str(error.value)
    assert Endpoint("https://host/").url == "https://host/v1"
    assert Endpoint("https://host/openai/v1/").url == "https://host/openai/v1"


def test_a_target_is_known_without_its_weights(folder: Path, target: Target) -> None:
    full, partly = Fingerprint.of(target), WeightlessReader.load(str(folder)).fingerprint
    assert partly.weights == ""
    assert partly.difference(full) is None
    assert full.difference(partly) is None


def script(folder: Path, out: Path, *options: str) -> Done:
    given = ["--target", str(folder), "--out", str(out), "--temperatures", "0", *options]
    return run_script("make_chats.py", *given, "--max-looped", "1", "--max-new-tokens", "24")


@pytest.mark.slow
def test_the_command_goes_on_after_a_kill_and_stores_no_key(
    folder: Path, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVER_KEY", "a-very-secret-key")
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"question_id": s.name, "category": "c", "turns": [*s.given]} for s in WORDS.starts]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    asked = ["--prompts", str(prompts), "--shard", "3"]
    whole = script(folder, tmp_path / "here", *asked)
    assert whole.returncode == 0, whole.stderr
    monkeypatch.setattr(time, "sleep", lambda _: None)
    dies: dict[str, Any] = {"fault": lambda number: (500, {}) if number > 5 else None}
    out = tmp_path / "there"
    for key, changes in (("a-very-secret-key", dies), ("a-very-secret-key", {})):
        with serving(FakeServer(target, key=key, **changes)) as server:
            served = ["--endpoint", server.address, "--key-from", "SERVER_KEY"]
            unknown = script(folder, out, *asked, *served, "--model", "other")
            assert unknown.returncode == 2
            assert "serves served: give --model" in unknown.stderr
            done = script(folder, out, *asked, *served, "--model", "served", "--rows", "2")
        if changes:
            assert done.returncode == 2
            assert "the same command goes on" in done.stderr
            assert (out / "shards/00000.parquet").exists()
    assert done.returncode == 0, done.stderr
    assert "going on after 3 chats" in done.stderr
    tables = [pq.read_table(tmp_path / name / "chats.parquet") for name in ("here", "there")]
    assert tables[0].equals(tables[1])
    found = [json.loads((tmp_path / n / "manifest.json").read_text()) for n in ("here", "there")]
    assert found[1]["settings"]["server"] == {"model": "served", "ids": RETURNED}
    assert found[0]["settings"]["sampling"] == found[1]["settings"]["sampling"]
    assert {*found[0]} == {*found[1]}
    assert "secret" not in "".join(f.read_text(errors="ignore") for f in out.iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "x"], "--model and --key-from belong to a server"),
        (["--endpoint", "http://127.0.0.1:9", "--features", "1"], "leave them out with --endpoint"),
        (["--endpoint", "http://127.0.0.1:9", "--key-from", "NO_SUCH"], "has no NO_SUCH"),
        (["--endpoint", "http://127.0.0.1:9", "--model", "x"], "is the server up?"),
    ],
)
def test_bad_options_are_one_line(
    folder: Path, tmp_path: Path, options: list[str], message: str
) -> None:
    done = script(folder, tmp_path / "out", "--chats", "2", *options)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr.splitlines()[-1]
    assert not (tmp_path / "out").exists()
