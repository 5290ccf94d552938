"""Chats: forms, sources, what is kept and what is dropped, and shards that survive a kill."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from drafters.base import Features
from drafters.errors import UserError
from drafters.losses import LossSettings
from drafters.target import Target
from inference.stop import Stop
from tests.folders import TEMPLATE, VOCAB_SIZE, tiny_tokenizer
from tests.tiny import tiny_model
from training.chat_settings import ChatSettings
from training.chats import ChatMaker, Keep, Shard
from training.features import Lessons
from training.forms import ChatForm
from training.keys import row_keys
from training.lesson_settings import FeatureSettings
from training.records import read_records
from training.sampler import EngineSampler
from training.shards import CHATS, MANIFEST, Goal, ShardFolder, Tally
from training.sources import Source, Start, given_prompts, given_texts, self_chat

END = 2
SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}"
    "{% endif %}" + TEMPLATE
)
BRACKETS = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}"
    "{{ '[INST] ' + m['content'] | trim + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + eos_token }}{% endif %}{% endfor %}"
)
NAMES = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{{ m['content'].split('</think>')[-1] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)


def talker(template: str | None = SYSTEM, *, ends: float = 3.6, seed: int = 0) -> Target:
    """Make a random target that says `<|im_end|>` with a logit of `ends`, all else with 0 +- .2.

    All embeddings share one large component, so every final state is nearly a vector of ones.
    """
    model = tiny_model(
        vocab_size=VOCAB_SIZE,
        eos_token_id=END,
        seed=seed,
        initializer_range=0.02,
        num_hidden_layers=2,
    )
    with torch.no_grad():
        model.get_input_embeddings().weight.add_(1.0)
        model.get_output_embeddings().weight[END] += ends / 64
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return Target(model, tokenizer, name="talker")


def maker(target: Target, source: Source, *, rows: int = 8, **settings: object) -> ChatMaker:
    options = {"temperatures": (1.0, 0.9), "max_new_tokens": 24, "user_tokens": 24, **settings}
    sampler = EngineSampler(target, rows)
    return ChatMaker(target, sampler, source, ChatSettings(**options), tick=lambda *_: None)


def made(target: Target, count: int, source: Source | None = None, **settings: object) -> Shard:
    return maker(target, source or self_chat(None, 0), **settings).make(0, count, set())


def prompts(path: Path, *turns: Sequence[str]) -> Source:
    lines = [
        {"question_id": i, "category": "test", "turns": list(t)} for i, t in enumerate(turns, 1)
    ]
    file = path / "prompts.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return given_prompts(file)


@pytest.mark.parametrize(
    ("template", "opening", "closing", "second", "stop"),
    [
        (
            SYSTEM,
            "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\n",
            "<|im_end|>\n<|im_start|>assistant\n",
            "a<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n<|im_start|>user\n",
            Stop(frozenset({END})),
        ),
        (
            BRACKETS,
            "<|im_start|>[INST] ",
            " [/INST]",
            "a [/INST] b<|im_end|>[INST] ",
            Stop(frozenset({END}), ("[/INST]",)),
        ),
        (
            NAMES,
            "user: ",
            "\nassistant:",
            "a\nassistant: b\nuser: ",
            Stop(frozenset({END}), ("assistant:",)),
        ),
    ],
    ids=["special tokens", "brackets", "names"],
)
def test_the_template_says_where_a_message_lies(
    template: str, opening: str, closing: str, second: str, stop: Stop
) -> None:
    form = ChatForm(talker(template), {})
    assert form.opening([]) == opening
    assert form.closing == closing
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert form.opening(said) == opening + second
    assert form.user_stop == stop


@pytest.mark.parametrize("change", ["| upper", "+ m['content']"])
def test_a_template_that_changes_messages_cannot_be_played(change: str) -> None:
    template = "{% for m in messages %}{{ m['content'] " + change + " }}{% endfor %}"
    with pytest.raises(UserError, match=r"shows a user's message [02] times"):
        ChatForm(talker(template), {})


def test_openings_serve_every_temperature(tmp_path: Path) -> None:
    file = tmp_path / "openings.txt"
    file.write_text("code\tWrite a\nplain words\nx\tA:\\n\\n\n\n")
    source = self_chat(file, seed=3)
    starts = [source.start(i, 2) for i in range(8)]
    assert starts[0::2] == starts[1::2]
    assert {(s.category, s.opening) for s in starts} == {
        ("code", "Write a"),
        ("", "plain words"),
        ("x", "A:\n\n"),
        ("", ""),
    }
    assert source.start(8, 2) == starts[0]
    assert self_chat(file, seed=3) == source
    assert self_chat(file, seed=4).digest != source.digest


def test_every_answer_is_kept_as_it_was_given() -> None:
    target = talker()
    shard = made(target, 24)
    assert len(shard.rows) + shard.drops.total() == 24
    assert len(shard.rows) > 8
    form = ChatForm(target, {})
    for row in shard.rows:
        question, answer = row["messages"]
        prompt = form.encode(form.prompt([question]))
        start = row["label_mask"].index(True)
        said = row["ids"][start:]
        assert row["ids"][:start] == prompt
        assert all(row["label_mask"][start:])
        assert (said[-1] == END) == (row["finish_reason"] == "stop")
        assert END not in said[:-1]
        assert target.tokenizer.decode([i for i in said if i != END]) == answer["content"]
    assert {row["temperature"] for row in shard.rows} == {1.0, 0.9}


def test_answers_cut_by_the_limit_are_marked_and_get_no_end(tmp_path: Path) -> None:
    source = prompts(tmp_path, ["one"], ["two"], ["three", "never asked"])
    shard = made(talker(ends=-9.0), 3, source, max_new_tokens=8, max_looped=1.0)
    assert [row["id"] for row in shard.rows] == ["1", "2", "3"]
    for row in shard.rows:
        assert row["finish_reason"] == "length"
        assert sum(row["label_mask"]) == 8
        assert row["ids"][-1] != END
        assert len(row["messages"]) == 2


@pytest.mark.slow
def test_a_chat_depends_on_its_number_alone() -> None:
    target = talker()
    source = self_chat(None, 0)
    whole = maker(target, source).make(0, 10, set())
    few = maker(target, source, rows=3).make(0, 10, set())
    assert few.rows == whole.rows
    assert few.drops == whole.drops
    parts = maker(target, source)
    first = parts.make(0, 5, set())
    rest = parts.make(5, 5, set(first.keys))
    assert first.rows + rest.rows == whole.rows
    assert first.drops + rest.drops == whole.drops
    other = made(target, 10, seed=1)
    assert [r["ids"] for r in other.rows] != [r["ids"] for r in whole.rows]


def test_openings_are_the_first_words(tmp_path: Path) -> None:
    file = tmp_path / "openings.txt"
    file.write_text("code\tWrite a\n")
    shard = made(talker(), 8, self_chat(file, 0))
    assert shard.rows
    assert {row["category"] for row in shard.rows} == {"code"}
    assert all(row["messages"][0]["content"].startswith("Write a") for row in shard.rows)


@pytest.mark.slow
def test_several_turns_are_all_supervised() -> None:
    target = talker(ends=3.0)
    shard = made(target, 12, turns=3, user_tokens=60, max_new_tokens=60)
    full = [row for row in shard.rows if len(row["messages"]) == 6]
    assert full
    form = ChatForm(target, {})
    for row in full:
        mask = row["label_mask"]
        assert sum(b and not a for a, b in zip([False, *mask], mask, strict=False)) == 3
        ended = target.tokenizer.decode(row["ids"])
        assert form.prompt(row["messages"]).startswith(ended)


def test_a_template_that_rewrites_the_past_splits_the_chat(tmp_path: Path) -> None:
    target = talker(THINKING)
    source = prompts(tmp_path, ["Hi", "Why?"], ["Go", "on"], ["No", "way"])
    options = {"enable_thinking": False}
    shard = made(target, 3, source, template_options=options, max_new_tokens=200)
    by_id = {row["id"]: row for row in shard.rows}
    assert {"1.1", "1.2"} <= set(by_id)
    first, second = by_id["1.1"], by_id["1.2"]
    opened = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    for row in (first, second):
        start = row["label_mask"].index(True)
        assert all(row["label_mask"][start:])
        assert target.tokenizer.decode(row["ids"][:start]).endswith(opened)
    assert "<think>" not in target.tokenizer.decode(second["ids"]).split("Why?")[0]
    assert [len(row["messages"]) for row in (first, second)] == [2, 4]


@pytest.mark.slow
def test_looping_answers_are_dropped() -> None:
    target = talker(ends=-9.0)
    source = Source(
        "prompts", tuple(Start(name, given=(name,)) for name in ("one", "two", "three"))
    )
    options = {"temperatures": (0.0,), "max_new_tokens": 128}
    kept = made(target, 3, source, max_looped=1.0, **options)
    assert [sum(row["label_mask"]) for row in kept.rows] == [128] * 3
    dropped = made(target, 3, source, max_looped=0.2, **options)
    assert dropped.drops == {"looping answer": 3}
    # a hopeless answer is not written to its end
    assert dropped.tokens["answers"] < kept.tokens["answers"]


def test_what_was_asked_before_is_dropped(tmp_path: Path) -> None:
    source = prompts(tmp_path, ["What is it?"], ["what IS it"], ["What is it now?"])
    shard = made(talker(), 3, source)
    assert shard.drops["duplicate"] == 1
    assert "2" not in {row["id"] for row in shard.rows}
    again = maker(talker(), source).make(0, 3, set(shard.keys))
    assert not again.rows


def test_a_prompt_without_room_is_dropped(tmp_path: Path) -> None:
    shard = made(talker(), 1, prompts(tmp_path, ["word " * 300]))
    assert shard.drops == {"prompt longer than the context": 1}


def test_markup_is_no_message() -> None:
    target = talker(ends=0.0)
    with torch.no_grad():  # the other special tokens come often
        target.model.get_output_embeddings().weight[:2] += 3 / 64
    shard = made(Target(target.model, target.tokenizer), 12)
    assert (
        shard.drops["question with markup in it"] or shard.drops["question cut by its length limit"]
    )
    assert not shard.rows


def test_texts_are_continued_without_a_template(tmp_path: Path) -> None:
    file = tmp_path / "texts.txt"
    file.write_text("the inn\n\nthe end\n")
    target = talker(None)
    shard = made(target, 2, given_texts(file))
    for row in shard.rows:
        start = row["label_mask"].index(True)
        text = row["messages"][0]["content"]
        assert row["ids"][:start] == target.tokenizer(text)["input_ids"]
    assert len(shard.rows) + shard.drops.total() == 2
    with pytest.raises(UserError, match="talker has no chat template"):
        maker(target, self_chat(None, 0))


SETTINGS = {"seed": 0, "source": {"kind": "self-chat"}}


def fill(folder: Path, goal: Goal, shards: int | None = None) -> ShardFolder:
    """Make chats as scripts/make_chats.py does; with `shards`, stop as a kill would."""
    wanted = {"tokens": goal.tokens, "chats": goal.chats}
    store = ShardFolder(folder, {**SETTINGS, "goal": wanted})
    work = maker(talker(), self_chat(None, 0))
    tally = store.tally()
    while (size := tally.next_size(goal, 6, work.longest_answers)) and shards != 0:
        tally.add(store.add(work.make(tally.made, size, tally.keys)))
        shards = None if shards is None else shards - 1
    return store


def test_the_first_shard_is_no_larger_than_the_goal_surely_takes() -> None:
    tally = Tally()
    assert tally.next_size(Goal(tokens=1000), 256, 200) == 5
    assert tally.next_size(Goal(tokens=1001, size=4), 256, 200) == 4
    assert tally.next_size(Goal(chats=9), 256, 200) == 9
    assert tally.next_size(Goal(tokens=10**6), 256, 200) == 256
    tally.made, tally.kept, tally.supervised = 5, 5, 500
    assert tally.next_size(Goal(tokens=1000), 256, 200) == 9


@pytest.mark.slow
def test_a_killed_run_goes_on_without_duplicates_or_loss(tmp_path: Path) -> None:
    goal = Goal(chats=9)
    fill(tmp_path / "whole", goal).finish(goal, {})
    fill(tmp_path / "killed", goal, shards=1)
    (tmp_path / "killed" / "shards" / "00001.part").write_bytes(b"half a fil")
    manifest = fill(tmp_path / "killed", goal).finish(goal, {"command": "c"})
    whole, killed = (pq.read_table(tmp_path / name / CHATS) for name in ("whole", "killed"))
    assert killed.equals(whole)
    assert killed.num_rows == manifest["chats"] == 9
    assert len(set(killed["id"].to_pylist())) == 9
    assert not (tmp_path / "killed" / "shards").exists()
    assert manifest["made"] == 9 + manifest["beyond_the_goal"] + sum(manifest["dropped"].values())
    records = read_records(tmp_path / "killed")
    assert [r.ids.tolist() for r in records if r.ids is not None] == whole["ids"].to_pylist()


@pytest.mark.slow
def test_a_goal_in_tokens_takes_no_chat_too_many(tmp_path: Path) -> None:
    goal = Goal(tokens=60)
    manifest = fill(tmp_path, goal).finish(goal, {})
    masks = pq.read_table(tmp_path / CHATS)["label_mask"].to_pylist()
    assert sum(map(sum, masks)) == manifest["supervised_tokens"] >= 60
    assert sum(map(sum, masks[:-1])) < 60


@pytest.mark.slow
def test_a_finished_data_set_grows(tmp_path: Path) -> None:
    first = fill(tmp_path, Goal(chats=5)).finish(Goal(chats=5), {})
    small = pq.read_table(tmp_path / CHATS)
    fill(tmp_path, Goal(chats=12), shards=1)
    assert pq.read_table(tmp_path / CHATS).equals(small)  # until there is more
    assert len(read_records(tmp_path)) == 5
    grown = fill(tmp_path, Goal(chats=12)).finish(Goal(chats=12), {})
    table = pq.read_table(tmp_path / CHATS)
    assert table.slice(0, 5).equals(small)
    assert table.num_rows == grown["chats"] == 12
    assert len({tuple(ids) for ids in table["ids"].to_pylist()}) == 12
    numbers = [int(name) for name in table["id"].to_pylist()]
    assert numbers == sorted(set(numbers))
    assert numbers[5] >= first["made"]
    assert grown["made"] == 12 + grown["beyond_the_goal"] + sum(grown["dropped"].values())
    assert not (tmp_path / "shards").exists()
    with pytest.raises(UserError, match=r"holds 12 chats .* ask for more than that"):
        fill(tmp_path, Goal(chats=7))


def test_the_keys_of_stored_chats_are_those_they_were_made_with() -> None:
    shard = maker(talker(), self_chat(None, 0)).make(0, 6, set())
    assert shard.rows
    assert [key for row in shard.rows for key in row_keys(row, "self-chat")] == shard.keys


def test_other_settings_are_refused(tmp_path: Path) -> None:
    fill(tmp_path, Goal(chats=2), shards=1)
    other = {**SETTINGS, "seed": 1}
    with pytest.raises(UserError, match="seed 0, now it is 1"):
        ShardFolder(tmp_path, other)
    goal = Goal(chats=2)
    fill(tmp_path, goal).finish(goal, {})
    with pytest.raises(UserError, match=f"{MANIFEST} is of a run with seed 0"):
        ShardFolder(tmp_path, other)
    assert ShardFolder(tmp_path, {**SETTINGS, "goal": {"tokens": None, "chats": 2}}).done


def test_a_folder_of_an_earlier_version_goes_on(tmp_path: Path) -> None:
    """Its fingerprint lacks the fields that came later."""
    ShardFolder(tmp_path, {"target": {"weights": "w"}})
    ShardFolder(tmp_path, {"target": {"weights": "w", "quantisation": "", "adapter": ""}})
    with pytest.raises(UserError, match="'quantisation': 'int8'"):
        ShardFolder(tmp_path, {"target": {"weights": "w", "quantisation": "int8"}})


def test_a_target_that_moved_is_the_same(tmp_path: Path) -> None:
    def settings(name: str, weights: str) -> dict[str, object]:
        return {"target": {"name": name, "weights": weights}}

    ShardFolder(tmp_path, settings("a", "w"))
    ShardFolder(tmp_path, settings("b", "w"))
    with pytest.raises(UserError, match="'weights': 'w'"):
        ShardFolder(tmp_path, settings("a", "other"))


def test_one_process_fills_a_folder(tmp_path: Path) -> None:
    first = ShardFolder(tmp_path, SETTINGS)
    with pytest.raises(UserError, match="another process is filling"):
        ShardFolder(tmp_path, SETTINGS)
    assert first.tally().made == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperatures": ()}, "no temperatures"),
        ({"temperatures": (0.0, -1.0)}, "temperature is -1.0"),
        ({"user_temperature": 0.0}, "messages are always sampled"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"turns": 33}, "at most 32"),
        ({"max_looped": 0.0}, "max_looped is 0.0"),
    ],
)
def test_settings_out_of_range(change: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ChatSettings(**change)


def test_a_run_that_goes_on_may_change_its_goal(tmp_path: Path) -> None:
    ShardFolder(tmp_path, {"seed": 0, "goal": {"tokens": 100}}).lock.release()
    ShardFolder(tmp_path, {"seed": 0, "goal": {"tokens": 50}}).lock.release()
    with pytest.raises(UserError, match="seed 0, now it is 1"):
        ShardFolder(tmp_path, {"seed": 1, "goal": {"tokens": 50}})


@pytest.mark.parametrize(("template", "turns"), [(SYSTEM, 2), (THINKING, 2)])
def test_kept_states_are_those_of_a_full_forward(tmp_path: Path, template: str, turns: int) -> None:
    """Prompt and answer, read and written one token at a time, several turns and parts."""
    target = talker(template)
    words = prompts(tmp_path, *[[f"{word} {i}" for i in range(turns)] for word in ("Hi", "Go on")])
    settings = ChatSettings(temperatures=(1.0, 0.9), max_new_tokens=24, max_looped=1.0)
    parts: dict[str, Any] = {"sampler": EngineSampler(target, 2), "tick": lambda *_: None}
    plain = ChatMaker(target, source=words, settings=settings, **parts).make(0, 2, set())
    assert not plain.states
    layers = (0, 1)
    keep = Keep(target, layers, torch.float32)
    keeping = ChatMaker(target, source=words, settings=settings, keep=keep, **parts)
    shard = keeping.make(0, 2, set())
    assert shard.rows == plain.rows
    assert len(shard.states) == len(shard.rows) > 1
    for row, (example, states) in zip(shard.rows, shard.states, strict=True):
        assert (example.ids.tolist(), example.label_mask.tolist()) == (
            row["ids"],
            row["label_mask"],
        )
        lessons = Lessons(
            [example],
            [[0]],
            target=target,
            features=Features(layers),
            settings=FeatureSettings(),
            loss=LossSettings(),
        )
        (wanted,) = lessons._run_target([example])
        assert len(states.last) == len(example) - 1
        for name, value in vars(wanted).items():
            torch.testing.assert_close(getattr(states, name), value, atol=1e-4, rtol=1e-4)
