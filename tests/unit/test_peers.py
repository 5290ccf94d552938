"""Peers: Hugging Face's generate beside our decoding, on the same prompts, in the same turns."""

from pathlib import Path

import pytest
import torch

from drafters import Target
from drafters.errors import UserError
from drafters.rules import Rules
from drafters.sampling import Warp
from inference.bench import BenchSettings, measure, steps
from inference.peer import Peer
from inference.peers import parse_peer
from inference.prompts import Prompt
from inference.report import peers_table
from inference.summary import summarise
from tests.fake_server import FakeServer, serving
from tests.folders import VOCAB_SIZE, tiny_tokenizer
from tests.tiny import tiny_model

PROMPTS = [Prompt("1", "chat", ("Hi the land",)), Prompt("2", "code", ("x = 1",))]
QUICK = BenchSettings(max_new_tokens=24, repeats=2, warmup=1)


@pytest.fixture(scope="module")
def target() -> Target:
    model = tiny_model(vocab_size=VOCAB_SIZE, num_hidden_layers=2)
    return Target(model, tiny_tokenizer(), name="tiny")


@pytest.mark.slow
def test_peers_are_timed_in_the_same_turns_and_give_the_same_text(target: Target) -> None:
    peers = [parse_peer(name, target.dtype) for name in ("hf", "hf-lookup")]
    told: list[int] = []
    result = summarise(
        measure(target, [], PROMPTS, QUICK, lambda: told.append(1), peers), "prompts.jsonl"
    )
    assert len(told) == steps(len(PROMPTS), 0, QUICK, len(peers))
    plain, lookup = result["peers"]
    assert [plain["identical"], lookup["identical"]] == [2, 2]
    assert plain["over_its_plain"] is None
    assert lookup["over_its_plain"]["value"] > 0
    for one in (plain, lookup):
        assert one["none_over_it"]["value"] == pytest.approx(
            result["baseline"]["tokens_per_second"] / one["tokens_per_second"]
        )
        low, high = one["none_over_it"]["interval"]
        assert low <= one["none_over_it"]["value"] <= high
    assert peers_table(result).row_count == 2
    for outputs in peers[0].outputs.values():
        assert len(outputs) == QUICK.repeats
        for one in outputs:
            assert one.decoded == len(one.ids) - 1
            assert 0 < one.seconds < one.total_seconds


def test_a_sampling_peer_draws_what_it_is_told(target: Target) -> None:
    peer = parse_peer("hf", target.dtype)
    first, again, other = (_ids(peer, target, Warp(1.0), seed) for seed in (0, 0, 1))
    assert first == again != other
    assert _ids(peer, target, Warp(1.0, top_k=1), 3) == _ids(peer, target, Warp(), 0)


def _ids(peer: Peer, target: Target, warp: Warp, seed: int) -> list[int]:
    return peer.decode(target, [[1, 2]], 12, warp, seed)[0].ids


def test_prompts_answered_together_by_a_peer_share_its_time(target: Target) -> None:
    peer = parse_peer("hf", target.dtype)
    together = BenchSettings(max_new_tokens=9, repeats=1, warmup=1, rows=2)
    told: list[int] = []
    result = summarise(
        measure(target, [], PROMPTS, together, lambda: told.append(1), [peer]), "prompts.jsonl"
    )
    assert len(told) == steps(len(PROMPTS), 0, together, 1)
    assert result["peers"][0]["identical"] == 2
    first, second = (peer.outputs[prompt][0] for prompt in (0, 1))
    assert first.total_seconds == second.total_seconds


@pytest.mark.parametrize("rows", [1, 2])
def test_a_server_is_a_peer(target: Target, rows: int) -> None:
    together = BenchSettings(max_new_tokens=9, repeats=1, warmup=1, rows=rows)
    with serving(FakeServer(target)) as server:
        names = (f"own={server.address}", f"own-lookup={server.address}")
        peers = [parse_peer(name, target.dtype) for name in names]
        result = summarise(
            measure(target, [], PROMPTS, together, lambda: None, peers), "prompts.jsonl"
        )
    plain, lookup = result["peers"]
    assert (plain["name"], plain["identical"], plain["over_its_plain"]) == ("own", 2, None)
    assert lookup["over_its_plain"]["value"] > 0
    outputs = [peers[0].outputs[number][0] for number in (0, 1)]
    assert all(0 < one.seconds < one.total_seconds for one in outputs)
    if rows == 1:
        assert [one.decoded for one in outputs] == [len(one.ids) - 1 for one in outputs]
    asked = server.asked[-1]
    assert (asked["temperature"], asked["cache_prompt"]) == (0.0, False)


def test_a_servers_text_is_encoded_where_it_returns_no_ids(target: Target) -> None:
    said: list[str] = []
    told = FakeServer(target, "nowhere", change=lambda choice: said.append(choice["text"]))
    with serving(told) as server:
        peer = parse_peer(f"own={server.address}", target.dtype)
        [output] = peer.decode(target, [[1, 2]], 6, Warp(), 0)
    text = "".join(target.tokenizer.decode([token]) for token in output.ids)
    assert text
    assert output.ids == target.tokenizer(said[-1], add_special_tokens=False)["input_ids"]
    assert 0 < output.seconds < output.total_seconds


def test_servers_that_are_none_get_one_line(target: Target) -> None:
    with pytest.raises(UserError, match="is not reached"):
        parse_peer("own=http://127.0.0.1:9", target.dtype)
    with serving(FakeServer(target, fault=lambda _: (400, {"error": "no"}))) as server:
        peer = parse_peer(f"own={server.address}", target.dtype)
        with pytest.raises(UserError, match="refuses a request: 400 no"):
            peer.decode(target, [[1]], 2, Warp(), 0)
    with serving(FakeServer(target, fault=lambda _: (0, {}))) as server:
        peer = parse_peer(f"own={server.address}", target.dtype)
        with pytest.raises(UserError, match="broke off an answer"):
            peer.decode(target, [[1]], 2, Warp(), 0)


def test_nothing_after_an_end_token_counts(target: Target) -> None:
    model = tiny_model(vocab_size=VOCAB_SIZE, num_hidden_layers=2)
    peer = parse_peer("hf", target.dtype)
    whole = peer.decode(target, [[1], [2, 3, 4]], 9, Warp(), 0)
    end = whole[0].ids[2]
    model.generation_config.eos_token_id = end
    cut = peer.decode(Target(model, tiny_tokenizer(), name="ends"), [[1], [2, 3, 4]], 9, Warp(), 0)
    assert cut[0].ids == whole[0].ids[: whole[0].ids.index(end) + 1]
    assert cut[0].decoded == len(cut[0].ids) - 1


def test_bad_peers_get_one_clear_line(target: Target, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="give hf, hf-lookup, hf-assistant=FOLDER, or NAME=http"):
        parse_peer("vllm", torch.float32)
    with pytest.raises(UserError, match="assistant"):
        parse_peer(f"hf-assistant={tmp_path}", torch.float32)
    lookup = parse_peer("hf-lookup", torch.float32)
    with pytest.raises(UserError, match="rows is 2: give 1"):
        measure(target, [], PROMPTS, BenchSettings(rows=2), peers=[lookup])
    with pytest.raises(UserError, match="without penalties"):
        lookup.decode(target, [[1]], 2, Warp(rules=Rules(repetition_penalty=1.2)), 0)
