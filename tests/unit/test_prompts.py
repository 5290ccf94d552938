"""Prompt sets: what is read, what is refused and with which line number."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from drafters import Target
from drafters.errors import UserError
from inference.prompts import Prompt, chat_ids, first_turn_ids, read_prompts, text_ids
from tests.folders import tiny_tokenizer
from tests.tiny import tiny_model, tiny_target
from training.forms import ChatForm
from training.template import Refused, Renderer

GOOD = '{"question_id": 81, "category": "writing", "turns": ["Hi", "And?"], "reference": []}\n'


def target(*, template: bool = True) -> Target:
    return Target(tiny_model(vocab_size=265), tiny_tokenizer(template=template), name="tiny")


def file(folder: Path, text: str | bytes) -> Path:
    path = folder / "set.jsonl"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_a_set_is_read_in_order_and_up_to_the_limit(tmp_path: Path) -> None:
    second = '{"question_id": "b", "category": "code", "turns": ["x = 1\\n"]}'
    path = file(tmp_path, GOOD + "\n" + second + "\nno JSON beyond the limit")
    assert read_prompts(path, limit=2) == [
        Prompt("81", "writing", ("Hi", "And?")),
        Prompt("b", "code", ("x = 1\n",)),
    ]
    assert read_prompts(path, limit=1) == [Prompt("81", "writing", ("Hi", "And?"))]


SPEED_BENCH = {
    "question_id": "c0ffee",
    "category": "coding",
    "sub_category": "debugging",
    "turns": ["Hi", "And?"],
    "source": "a data set",
    "src_id": "7",
    "difficulty": None,
    "multiturn": True,
}


@pytest.mark.parametrize(
    ("line", "prompt"),
    [
        (GOOD, Prompt("81", "writing", ("Hi", "And?"))),
        (json.dumps(SPEED_BENCH), Prompt("c0ffee", "coding", ("Hi", "And?"))),
        ('{"prompt": "Hi"}', Prompt("1", "set", ("Hi",))),
        (
            '{"prompt_id": 3, "category": "code", "prompt": ["Hi", "And?"], "reference": []}',
            Prompt("3", "code", ("Hi", "And?")),
        ),
        (
            '{"messages": [{"role": "system", "content": "Be brief."}, '
            '{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}, '
            '{"role": "user", "content": "And?"}]}',
            Prompt("1", "set", ("Hi", "And?"), "Be brief."),
        ),
    ],
)
def test_forms_that_people_have(tmp_path: Path, line: str, prompt: Prompt) -> None:
    assert read_prompts(file(tmp_path, line)) == [prompt]


def test_parquet_is_read_as_lines_are(tmp_path: Path) -> None:
    path = tmp_path / "test.parquet"
    rows = [SPEED_BENCH, {**SPEED_BENCH, "question_id": None, "category": None}]
    parquet.write_table(pa.Table.from_pylist(rows), path)
    found = [Prompt("c0ffee", "coding", ("Hi", "And?")), Prompt("2", "test", ("Hi", "And?"))]
    assert read_prompts(path) == found
    assert read_prompts(path, limit=1) == found[:1]
    path.write_text(GOOD)
    with pytest.raises(UserError, match=r"test\.parquet is no Parquet"):
        read_prompts(path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 3: not JSON"),
        ("[" * 100_000, "line 3: not JSON"),
        ("[1]", "line 3: holds list, not an object"),
        ('{"category": "a"}', "line 3: has no 'turns', 'prompt' or 'messages'"),
        ('{"prompt": 3}', "line 3: turns is 3"),
        ('{"messages": "Hi"}', "line 3: messages are 'Hi'"),
        ('{"messages": [{"role": "user", "content": ["Hi"]}]}', "line 3: messages are "),
        ('{"messages": [{"role": "assistant", "content": "Hi"}]}', r"line 3: turns is \[\]"),
        ('{"question_id": 1.5, "category": "a", "turns": ["x"]}', "line 3: question_id is 1.5"),
        ('{"question_id": true, "category": "a", "turns": ["x"]}', "line 3: question_id is True"),
        ('{"question_id": 1, "category": 2, "turns": ["x"]}', "line 3: category is 2"),
        ('{"question_id": 1, "category": "a", "turns": "x"}', "line 3: turns is 'x'"),
        ('{"question_id": 1, "category": "a", "turns": []}', r"line 3: turns is \[\]"),
        ('{"question_id": 1, "category": "a", "turns": ["x", 2]}', "line 3: a turn is 2"),
        ('{"question_id": 1, "category": "a", "turns": [" "]}', "line 3: a turn is ' '"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_prompts(file(tmp_path, GOOD + "\n" + line + "\n" + GOOD))


def test_a_bad_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"set.jsonl holds no prompts: give lines such as"):
        read_prompts(file(tmp_path, "\n\n"))
    with pytest.raises(UserError, match=r"set.jsonl is not UTF-8 text"):
        read_prompts(file(tmp_path, b"\xff\xfe{}"))
    with pytest.raises(UserError, match=r"cannot be read \(No such file"):
        read_prompts(tmp_path / "nothing.jsonl")
    with pytest.raises(UserError, match=r"cannot be read \(Is a directory"):
        read_prompts(tmp_path)
    with pytest.raises(UserError, match=r"limit is 0"):
        read_prompts(file(tmp_path, GOOD), limit=0)


def test_the_first_turn_goes_through_the_template_once() -> None:
    chat = target()
    found = first_turn_ids(chat, [Prompt("1", "a", ("Hi", "later"))])
    text = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert chat.tokenizer.decode(found[0]) == text
    # the markers are single ids, and none is doubled
    assert [i for i in found[0] if i < 3] == [1, 2, 1]
    system = {"role": "system", "content": "Be brief."}
    messages = [system, {"role": "user", "content": "Hi"}]
    whole = "<|im_start|>system\nBe brief.<|im_end|>\n" + text
    assert chat.tokenizer.decode(chat_ids(chat, messages)) == whole
    asked = [Prompt("1", "a", ("Hi", "later"), "Be brief.")]
    assert chat.tokenizer.decode(first_turn_ids(chat, asked)[0]) == whole


def test_without_a_template_the_text_is_read_as_it_is() -> None:
    base = target(template=False)
    found = first_turn_ids(base, [Prompt("1", "a", ("Hi the",))])
    assert base.tokenizer.decode(found[0]) == "Hi the"
    found = first_turn_ids(base, [Prompt("1", "a", ("Hi the",), "Hi")])
    assert base.tokenizer.decode(found[0]) == "Hi\nHi the"
    with pytest.raises(UserError, match="tiny has no chat template"):
        chat_ids(base, [{"role": "user", "content": "Hi"}])


def test_texts_that_cannot_be_read() -> None:
    with pytest.raises(UserError, match="tiny-llama has no tokenizer"):
        text_ids(tiny_target(), "Hi")
    with pytest.raises(UserError, match="the prompt '' has no tokens"):
        text_ids(target(), "")


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('no system role') }}", "no system role"),
        ("{{ messages[0] + 1 }}", "unsupported operand"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "recursion"),
        ("{% for i in range(10 ** 9) %}x{% endfor %}", "Range too big"),
    ],
)
def test_a_template_is_somebodys_program(template: str, reason: str) -> None:
    refusing = target()
    refusing.tokenizer.chat_template = template
    message = {"role": "user", "content": "Hi"}
    with pytest.raises(UserError, match=f"template of tiny refuses the chat: .*{reason}"):
        chat_ids(refusing, [message])
    with pytest.raises(UserError, match=f"template of tiny refuses the chat: .*{reason}"):
        ChatForm(refusing, {})
    with pytest.raises(Refused, match=reason):
        Renderer(refusing.tokenizer, set(), {}).render(
            [message, {"role": "assistant", "content": "Ho"}]
        )
