"""Chats to examples: masks by the template, what is dropped and why, the split, the batches."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from drafters.errors import UserError
from drafters.target import Target
from tests.folders import TEMPLATE, tiny_tokenizer
from tests.templates import TAGGED, THINKING, answers, renderer
from tests.tiny import tiny_model
from training.batches import compose, order_of, pad
from training.examples import Example, first_tokens, make_examples, split
from training.lesson_settings import DataSettings
from training.messages import Refused
from training.records import read_records, writer_of
from training.shards import SCHEMA

CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]
TURNS = [*CHAT, {"role": "user", "content": "More"}, {"role": "assistant", "content": "the end"}]


@pytest.fixture(scope="module")
def target() -> Target:
    sizes = {"vocab_size": 265, "num_hidden_layers": 2, "eos_token_id": 2}
    return Target(tiny_model(**sizes), tiny_tokenizer())


def write(path: Path, *lines: object) -> Path:
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines))
    return path


def settings(path: Path, **changes: object) -> DataSettings:
    return DataSettings(path=str(path), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("template", [TEMPLATE, TAGGED])
def test_an_answer_is_supervised_with_its_ending_token_and_no_further(template: str) -> None:
    (found,) = renderer(template).render(TURNS)
    assert answers(*found) == ["Hello!<|im_end|>", "the end<|im_end|>"]
    assert len(found.ids) == len(found.mask)
    assert found == renderer(TEMPLATE).render(TURNS)[0]


@pytest.mark.parametrize(
    "messages",
    [None, [], "Hi", [["user", "Hi"]], [{"role": "user"}], [{"role": "narrator", "content": "x"}]],
)
def test_what_is_no_chat_is_refused(messages: object) -> None:
    with pytest.raises(Refused):
        renderer().render(messages)


def test_a_chat_that_opens_with_an_answer_is_refused() -> None:
    with pytest.raises(Refused, match="opens with an answer"):
        renderer().render(CHAT[1:])


def test_chats_that_are_refused_are_counted(tmp_path: Path, target: Target) -> None:
    silent = {"ids": [5, 6, 7], "label_mask": [False] * 3}
    first = {"ids": [5, 6, 7], "label_mask": [True, False, False]}  # no law before it
    file = write(
        tmp_path / "chats.jsonl", {"messages": CHAT[:1]}, silent, first, "", {"messages": CHAT}
    )
    examples, report = make_examples(read_records(file), target, settings(file))
    assert (report.read, report.kept) == (4, 1)
    assert report.dropped == {"without an answer's token": 2, "without an answer": 1}
    assert "dropped: 2 without an answer's token; 1 without an answer" in str(report)
    assert examples[0].supervised == len("Hello!") + 1


def test_an_unstable_chat_stops_the_run_unless_it_may_be_dropped(
    tmp_path: Path, target: Target
) -> None:
    # the template opens an answer with what it then leaves out of a message
    file = write(tmp_path / "chats.jsonl", {"messages": CHAT})
    thinking = [CHAT[0], {"role": "assistant", "content": "<think></think>Hello!"}]
    write(file, {"messages": thinking}, {"messages": CHAT})
    target.tokenizer.chat_template = THINKING
    off = {"template_options": {"enable_thinking": False}}
    try:
        with pytest.raises(UserError, match=r"chats\.jsonl line 2: .*data\.unstable=drop"):
            make_examples(read_records(file), target, settings(file, **off))
        dropping = settings(file, unstable="drop", **off)
        _, report = make_examples(read_records(file), target, dropping)
    finally:
        target.tokenizer.chat_template = TEMPLATE
    assert report.kept == 1
    assert sum(report.dropped.values()) == 1


def test_messages_need_a_template(tmp_path: Path) -> None:
    bare = Target(tiny_model(vocab_size=265, num_hidden_layers=2), tiny_tokenizer(template=False))
    file = write(tmp_path / "chats.jsonl", {"messages": CHAT})
    with pytest.raises(UserError, match="no chat template"):
        make_examples(read_records(file), bare, settings(file))


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (['{"ids": [1, 2}'], "line 1: not valid JSON"),
        ([{"messages": CHAT}, "[1]"], "line 2: not an object"),
        (
            [{"messages": CHAT}, "", {"words": "x"}],
            r"line 3: no chat in it \(it has words\): give ids with label_mask, messages",
        ),
        ([{"ids": [1, 2]}], "line 1: ids without label_mask"),
        ([{"ids": [1, 2], "label_mask": [True]}], "line 1: 2 ids but 1 entries"),
        ([{"ids": [1.5], "label_mask": [True]}], "line 1: ids is not a list of whole numbers"),
        ([{"ids": [1], "label_mask": [1]}], "line 1: label_mask is not a list of true and false"),
        ([""], "no chats in it"),
    ],
)
def test_a_malformed_file_is_named_with_its_line(
    tmp_path: Path, lines: list[object], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        read_records(write(tmp_path / "chats.jsonl", *lines))


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        read_records(tmp_path / "nowhere.parquet")
    with pytest.raises(UserError, match=r"no \.parquet or \.arrow or \.jsonl"):
        read_records(tmp_path)
    with pytest.raises(UserError, match=r"give a \.parquet or \.arrow or \.jsonl"):
        read_records(write(tmp_path / "chats.txt", "Hi"))
    with pytest.raises(UserError, match="not readable as Parquet"):
        read_records(write(tmp_path / "chats.parquet", "Hi"))
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="UTF-8"):
        read_records(tmp_path / "bytes.jsonl")


def test_the_writer_of_chats_is_read_from_their_manifest(tmp_path: Path) -> None:
    file = write(tmp_path / "chats.jsonl", {"messages": CHAT})
    assert writer_of(file) is None
    write(tmp_path / "manifest.json", {"settings": {"target": {"weights": "ab"}}})
    assert writer_of(file) == writer_of(tmp_path) == {"weights": "ab"}
    write(tmp_path / "manifest.json", ["something else"])
    assert writer_of(file) is None


def test_ids_of_another_target_are_refused(tmp_path: Path, target: Target) -> None:
    file = write(tmp_path / "chats.jsonl", {"ids": [1, 265], "label_mask": [False, True]})
    with pytest.raises(UserError, match=r"line 1: ids from 1 to 265.*0 to 264"):
        make_examples(read_records(file), target, settings(file))


def test_parquet_and_jsonl_of_a_folder_are_read_alike(tmp_path: Path) -> None:
    rows = [
        {"id": str(i), "ids": list(range(i + 1)), "label_mask": [True] * (i + 1), "messages": None}
        for i in range(5)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=2)
    write(tmp_path / "b.jsonl", *rows)
    records = read_records(tmp_path)
    assert [r.id for r in records] == ["0", "1", "2", "3", "4"] * 2
    for left, right in zip(records[:5], records[5:], strict=True):
        assert left.ids is not None
        assert right.ids is not None
        assert left.ids.tolist() == right.ids.tolist() == list(range(len(left.ids)))
    assert records[6].where == f"{tmp_path}/b.jsonl line 2"


def test_the_columns_that_chats_are_made_with_are_read(tmp_path: Path) -> None:
    row = {"id": "a", "ids": [1, 9, 2], "label_mask": [False, True, True], "messages": CHAT}
    made = {**row, "finish_reason": "stop", "temperature": 0.7, "category": "chat"}
    pq.write_table(pa.Table.from_pylist([made], schema=SCHEMA), tmp_path / "chats.parquet")
    (record,) = read_records(tmp_path)
    assert record.ids is not None
    assert record.label_mask is not None
    assert (record.id, record.cut, record.messages) == ("a", False, None)
    assert record.ids.tolist() == row["ids"]
    assert record.label_mask.tolist() == row["label_mask"]


def examples_of(*lengths: int) -> list[Example]:
    return [
        Example(f"chat-{i}", torch.full((n,), i + 3), torch.arange(n) >= n // 2)
        for i, n in enumerate(lengths)
    ]


def test_the_split_depends_on_a_chats_id_alone() -> None:
    many = examples_of(*[4] * 400)
    training, held_out = split(many, 0.1)
    assert 20 <= len(held_out) <= 60
    assert len(training) + len(held_out) == 400
    again = split(many[::-1], 0.1)[1]
    assert {e.id for e in again} == {e.id for e in held_out}
    part = split(many[:200], 0.1)[1]
    assert {e.id for e in part} == {e.id for e in held_out} & {e.id for e in many[:200]}


def test_the_split_never_leaves_a_side_empty() -> None:
    for share in (1e-6, 0.5):
        training, held_out = split(examples_of(4, 4, 4), share)
        assert training
        assert held_out
    with pytest.raises(UserError, match="at least two"):
        split(examples_of(4), 0.5)


def test_the_first_tokens_are_whole_chats() -> None:
    assert [e.id for e in first_tokens(examples_of(4, 5, 6), 9)] == ["chat-0", "chat-1"]
    assert len(first_tokens(examples_of(4, 5, 6), 1)) == 1
    assert len(first_tokens(examples_of(4, 5, 6), None)) == 3


def test_batches_hold_every_example_once_within_the_budget() -> None:
    lengths = torch.randint(2, 60, (300,)).tolist()
    groups = compose(lengths, 128, seed=3)
    assert sorted(i for group in groups for i in group) == list(range(300))
    for group in groups:
        assert len(group) * max(lengths[i] for i in group) <= 128
    padding = sum(max(lengths[i] for i in g) * len(g) for g in groups) / sum(lengths)
    assert padding < 1.1
    assert compose(lengths, 128, seed=3) == groups != compose(lengths, 128, seed=4)
    assert compose([500], 128, seed=0) == [[0]]


def test_every_epoch_has_its_own_order_and_the_same_again() -> None:
    orders = [order_of(20, 7, epoch) for epoch in range(3)]
    assert all(sorted(order) == list(range(20)) for order in orders)
    assert orders[0] != orders[1] != orders[2]
    assert orders == [order_of(20, 7, epoch) for epoch in range(3)]


def test_rows_are_padded_on_the_right() -> None:
    ids, mask, document, position = pad(examples_of(2, 4))
    assert ids.tolist() == [[3, 3, 0, 0], [4, 4, 4, 4]]
    assert mask.tolist() == [[False, True, False, False], [False, False, True, True]]
    assert document.tolist() == [[0, 0, -1, -1], [1, 1, 1, 1]]
    assert position.tolist() == [[0, 1, 2, 3]] * 2


def test_a_prompt_ends_where_the_first_answer_begins() -> None:
    example = Example("a", torch.arange(6), torch.tensor([0, 0, 1, 1, 0, 1]).bool())
    assert example.prompt == [0, 1]
    assert example.supervised == 3
