"""Files and shapes of chat data: the same chat in every common form gives the same example."""

import json
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from drafters.errors import UserError
from training.dialects import messages_of
from training.messages import Refused, checked
from training.records import read_records

CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]
SHAREGPT = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello!"}]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": CHAT},
        {"conversations": SHAREGPT},
        {"conversations": CHAT},
        {"prompt": "Hi", "response": "Hello!"},
        {"prompt": CHAT[:1], "completion": CHAT[1:]},
        {"instruction": "Hi", "input": "", "output": "Hello!"},
        {"question": "Hi", "answer": "Hello!"},
    ],
)
def test_every_shape_gives_the_same_messages(row: dict[str, object]) -> None:
    assert checked(messages_of(row)) == CHAT


def test_what_stands_beside_a_prompt_is_kept() -> None:
    row = {"system": "Be kind.", "instruction": "Sum up:", "input": "a b", "output": "c"}
    assert messages_of(row) == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Sum up:\n\na b"},
        {"role": "assistant", "content": "c"},
    ]
    assert messages_of({"text": "x"}) is None


def test_an_unknown_speaker_is_a_reason_not_a_guess(tmp_path: Path) -> None:
    chat = [{"from": "narrator", "value": "Once"}]
    with pytest.raises(Refused, match="from 'narrator'"):
        messages_of({"conversations": chat})
    file = tmp_path / "chats.jsonl"
    file.write_text(json.dumps({"conversations": chat}))
    assert read_records(file)[0].refused == "with a message from 'narrator'"


def test_parts_of_a_content_are_joined_and_pictures_refused() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert checked([{"role": "user", "content": parts}])[0]["content"] == "ab"
    with pytest.raises(Refused, match="not text"):
        checked([{"role": "user", "content": [{"type": "image", "url": "x"}]}])
    with pytest.raises(Refused, match="has weight beside"):
        checked([{**CHAT[0], "weight": 2}])


CALLS = [
    {"role": "user", "content": "x"},
    {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
    {"role": "tool", "content": "1"},
    {"role": "assistant", "content": "y", "tool_calls": [{"function": {"name": "g", "b": "c"}}]},
]


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "arrow", "saved"])
def test_every_kind_of_file_is_read_alike(tmp_path: Path, kind: str) -> None:
    """Arrow gives every object the keys of all others; what is empty was not given."""
    rows = [{"id": "a", "messages": CALLS}, {"id": "b", "messages": CHAT}]
    file = tmp_path / f"chats.{kind}"
    table = pa.Table.from_pylist(rows)
    if kind == "jsonl":
        file.write_text("\n".join(map(json.dumps, rows)))
    elif kind == "json":
        file.write_text(json.dumps(rows, indent=1))
    elif kind == "parquet":
        pq.write_table(table, file)
    elif kind == "arrow":
        with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    else:
        datasets.Dataset(table).save_to_disk(str(file))
    records = read_records(file)
    assert [r.id for r in records] == ["a", "b"]
    assert [r.messages for r in records] == [CALLS, CHAT]


def test_a_split_of_a_saved_data_set(tmp_path: Path) -> None:
    both = {n: datasets.Dataset.from_list([{"id": n, "messages": CHAT}]) for n in ("train", "test")}
    datasets.DatasetDict(both).save_to_disk(str(tmp_path / "saved"))
    assert read_records(tmp_path / "saved", "test")[0].id == "test"
    with pytest.raises(UserError, match=r"no split 'valid': give data\.split as train, test"):
        read_records(tmp_path / "saved", "valid")


def test_the_hub_is_asked_by_name_only(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no such file .*hub:OWNER/NAME"):
        read_records("owner/name")
    with pytest.raises(UserError, match=r"data\.path hub:owner/none, split train"):
        read_records("hub:owner/none")


def test_tools_may_be_json(tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    file.write_text(json.dumps({"messages": CHAT, "tools": '[{"name": "f"}]'}))
    assert read_records(file)[0].tools == [{"name": "f"}]
    file.write_text(json.dumps({"messages": CHAT, "tools": "["}))
    with pytest.raises(UserError, match="line 1: tools are not valid JSON"):
        read_records(file)
