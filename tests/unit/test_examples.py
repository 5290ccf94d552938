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
from tests.tiny import tiny_model
from training.batches import compose, order_of, pad
from training.examples import Example, first_tokens, make_examples, split
from training.options import DataSettings
from training.records import read_records, writer_of
from training.shards import SCHEMA
from training.template import Refused, Renderer, Unstable

TAGGED = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}"
    "{% endgeneration %}{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Qwen-like: answers of earlier turns lose what they thought.
FORGETFUL = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if loop.last %}{{ message['content'] }}"
    "{% else %}{{ message['content'].split('</think>')[-1] }}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# The empty thought is part of the opening when thinking is off.
THINKING = TEMPLATE.replace(
    "{{ '<|im_start|>assistant\n' }}",
    "{{ '<|im_start|>assistant\n' }}{% if not enable_thinking %}{{ '<think></think>' }}{% endif %}",
)
CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]
TURNS = [*CHAT, {"role": "user", "content": "More"}, {"role": "assistant", "content": "the end"}]


@pytest.fixture(scope="module")
def target() -> Target:
    sizes = {"vocab_size": 265, "num_hidden_layers": 2, "eos_token_id": 2}
    return Target(tiny_model(**sizes), tiny_tokenizer())


def renderer(template: str = TEMPLATE, **options: object) -> Renderer:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return Renderer(tokenizer, frozenset({2}), options)


def answers(ids: list[int], mask: list[bool]) -> list[str]:
    """Decode every unbroken run of supervised tokens."""
    texts, run = [], []
    for token, inside in zip([*ids, 0], [*mask, False], strict=True):
        if inside:
            run.append(token)
        elif run:
            texts.append(tiny_tokenizer().decode(run))
            run = []
    return texts


def write(path: Path, *lines: object) -> Path:
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines))
    return path


def settings(path: Path, **changes: object) -> DataSettings:
    return DataSettings(path=str(path), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("template", [TEMPLATE, TAGGED])
def test_an_answer_is_supervised_with_its_ending_token_and_no_further(template: str) -> None:
    ids, mask = renderer(template).render(TURNS)
    assert answers(ids, mask) == ["Hello!<|im_end|>", "the end<|im_end|>"]
    assert len(ids) == len(mask)
    assert ids == renderer(TEMPLATE).render(TURNS)[0]


def test_template_options_are_those_of_the_generation() -> None:
    # case A21: the answer begins where the opening that was generated from ends
    chat = [CHAT[0], {"role": "assistant", "content": "<think></think>Hello!"}]
    ids, mask = renderer(THINKING, enable_thinking=False).render(chat)
    assert answers(ids, mask) == ["Hello!<|im_end|>"]
    ids, mask = renderer(THINKING, enable_thinking=True).render(chat)
    assert answers(ids, mask) == ["<think></think>Hello!<|im_end|>"]


def test_a_template_that_rewrites_history_is_refused() -> None:
    # case A23
    thoughtful = [
        {"role": "user", "content": "q1"},
        {"role": "assistant", "content": "<think>a</think>one"},
        {"role": "user", "content": "q2"},
        {"role": "assistant", "content": "<think>b</think>two"},
    ]
    with pytest.raises(Unstable, match="message 2"):
        renderer(FORGETFUL).render(thoughtful)
    ids, mask = renderer(FORGETFUL).render(thoughtful[:2])
    assert answers(ids, mask) == ["<think>a</think>one<|im_end|>"]


def test_tools_are_refused_never_left_out() -> None:
    # case A24
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]}
    result = {"role": "tool", "content": "4"}
    for chat in ([CHAT[0], call], [CHAT[0], result, CHAT[1]]):
        with pytest.raises(Refused, match="tool"):
            renderer().render(chat)


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


def test_an_answer_that_a_limit_ended_gets_no_ending_token(tmp_path: Path, target: Target) -> None:
    # case A26: ids are taken as they were generated
    row = {"id": "a", "ids": [1, 9, 2, 1, 8, 7, 6], "label_mask": [False] * 4 + [True] * 3}
    file = tmp_path / "chats.parquet"
    pq.write_table(pa.Table.from_pylist([{**row, "finish_reason": "length"}]), file)
    records = read_records(file)
    examples, report = make_examples(records, target, settings(file))
    assert examples[0].ids.tolist() == row["ids"]
    assert examples[0].label_mask.tolist() == row["label_mask"]
    assert (report.cut, report.kept) == (1, 1)
    with pytest.raises(UserError, match=r"nothing to learn from.*1 whose answer a length limit"):
        make_examples(records, target, settings(file, drop_cut=True))


@pytest.mark.parametrize("template", [TEMPLATE, TAGGED])
@pytest.mark.parametrize("limit", range(10, 60, 7))
def test_ids_and_mask_are_cut_at_the_same_place(
    tmp_path: Path, target: Target, template: str, limit: int
) -> None:
    # case A25, at every kind of place
    whole, mask = renderer(template).render(TURNS)
    file = write(tmp_path / "chats.jsonl", {"messages": TURNS})
    target.tokenizer.chat_template = template
    try:
        kept = settings(file, max_length=limit)
        if not any(mask[1:limit]):
            with pytest.raises(UserError, match=f"starts after {limit} tokens"):
                make_examples(read_records(file), target, kept)
            return
        examples, report = make_examples(read_records(file), target, kept)
    finally:
        target.tokenizer.chat_template = TEMPLATE
    assert examples[0].ids.tolist() == whole[:limit]
    assert examples[0].label_mask.tolist() == mask[:limit]
    assert report.shortened == (len(whole) > limit)


def test_chats_that_teach_nothing_are_dropped_and_counted(tmp_path: Path, target: Target) -> None:
    # cases A22 and A27: a chat without an answer, and an answer without a token
    silent = {"ids": [5, 6, 7], "label_mask": [False] * 3}
    first = {"ids": [5, 6, 7], "label_mask": [True, False, False]}  # no law before it
    file = write(
        tmp_path / "chats.jsonl", {"messages": CHAT[:1]}, silent, first, "", {"messages": CHAT}
    )
    examples, report = make_examples(read_records(file), target, settings(file))
    assert (report.read, report.kept) == (4, 1)
    assert report.dropped == {"without an answer's token": 3}
    assert "dropped: 3 without an answer's token" in str(report)
    assert examples[0].supervised == len("Hello!") + 1
    only = write(tmp_path / "only.jsonl", silent, first)
    with pytest.raises(UserError, match=r"2 chats read, 0 kept.*dropped: 2 without an answer"):
        make_examples(read_records(only), target, settings(only))


def test_an_unstable_chat_stops_the_run_unless_it_may_be_dropped(
    tmp_path: Path, target: Target
) -> None:
    thoughtful = [
        *CHAT[:1],
        {"role": "assistant", "content": "<think>a</think>one"},
        *TURNS[2:],
    ]
    file = write(tmp_path / "chats.jsonl", {"messages": CHAT}, {"messages": thoughtful})
    target.tokenizer.chat_template = FORGETFUL
    try:
        with pytest.raises(UserError, match=r"chats\.jsonl line 2: .*data\.unstable=drop"):
            make_examples(read_records(file), target, settings(file))
        _, report = make_examples(read_records(file), target, settings(file, unstable="drop"))
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
            [{"messages": CHAT}, "", {"text": "x"}],
            r"line 3: neither ids nor messages \(it has text",
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
    with pytest.raises(UserError, match=r"no \.parquet or \.jsonl file"):
        read_records(tmp_path)
    with pytest.raises(UserError, match=r"give a \.parquet or \.jsonl file"):
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
