"""Cases A17 and A21 to A28: what public bug reports say can go wrong between a chat and a batch."""

import copy
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from drafters.base import Batch, Features, NeuralDrafter, Prediction
from drafters.errors import UserError
from drafters.losses import LossSettings, LossSums, drafter_loss
from drafters.registry import build_drafter, methods
from drafters.target import Target
from drafters.teacher import Teacher
from inference.prompts import chat_ids
from tests.folders import TEMPLATE, save_tiny_target, tiny_tokenizer
from tests.templates import FORGETFUL, TAGGED, THINKING, TOOLS, answers, renderer
from tests.tiny import tiny_model, tiny_target
from training.batches import pad
from training.chat_settings import ChatSettings
from training.chats import ChatMaker
from training.examples import Example, make_examples, pack, split
from training.lesson_settings import DataSettings
from training.messages import Refused, Unstable
from training.objective import Objective
from training.parts import with_stored_options
from training.records import read_records
from training.sampler import EngineSampler
from training.sources import PROMPTS, Source, Start

CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]
TEXT = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello!<|im_end|>\n"
THOUGHTFUL = [
    {"role": "user", "content": "q1"},
    {"role": "assistant", "content": "<think>a</think>one"},
    {"role": "user", "content": "q2"},
    {"role": "assistant", "content": "<think>b</think>two"},
]
NEURAL = sorted(name for name, kind in methods().items() if issubclass(kind, NeuralDrafter))
OPTIONS: dict[str, dict[str, object]] = {
    "dflash": {"taps": [0, 1, 2]},
    "dflash2": {"taps": [0, 1, 2]},
    "dspark": {"taps": [0, 1, 2]},
    "eagle": {"taps": [0, 1, 2], "unroll": 3},
    "peagle": {"taps": [0, 1, 2]},
    "standalone": {"num_layers": 2},
}


@pytest.fixture(scope="module")
def target() -> Target:
    sizes = {"vocab_size": 265, "num_hidden_layers": 2, "eos_token_id": 2}
    return Target(tiny_model(**sizes), tiny_tokenizer())


@pytest.fixture(scope="module")
def small() -> Target:
    return tiny_target(num_hidden_layers=3, initializer_range=0.2)


def write(path: Path, *rows: object) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def settings(path: Path, **changes: object) -> DataSettings:
    return DataSettings(path=str(path), **changes)  # type: ignore[arg-type]


def batch_of(
    target: Target,
    rows: tuple[Tensor, Tensor, Tensor, Tensor],
    features: Features = Features(),  # noqa: B008 - frozen
) -> Batch:
    ids, mask, document, position = rows
    taps, last = target.forward_batch(ids, document, position, features)
    return Batch(ids, mask, document, position, taps, last)


def loss_of(batch: Batch, target: Target) -> LossSums:
    """Return the sums of a drafter that reads the last state through a fixed matrix."""
    generator = torch.Generator().manual_seed(4)
    head = torch.randn(target.shape.vocab_size, target.shape.hidden_size, generator=generator)
    last, places = batch.last.flatten(0, 1), torch.arange(batch.ids.numel())
    guess = Prediction(places, 1, places, lambda span: last[span] @ head.T)
    return drafter_loss([guess], batch, Teacher(target, None), LossSettings())


def example_of(length: int, answer: int, seed: int = 0) -> Example:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 128, (length,), generator=generator)
    return Example(f"chat-{seed}", ids, torch.arange(length) >= length - answer)


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
@pytest.mark.parametrize("fill", [0, 2], ids=["zero", "eos"])
def test_a17_padding_is_never_attended_to(small: Target, left: bool, fill: int) -> None:
    short, long = example_of(5, 3), example_of(12, 6, seed=1)
    short.ids[-1] = fill  # the genuine ending token is the padding's id
    ids, mask, document, position = pad([short, long])
    ids[document == -1] = fill
    span = slice(0, 5)
    if left:
        span = slice(7, 12)
        for x in (ids, mask, document, position):
            x[0] = x[0].roll(7)
    both = batch_of(small, (ids, mask, document, position))
    alone = batch_of(small, pad([short]))
    torch.testing.assert_close(both.last[0, span], alone.last[0], atol=1e-5, rtol=1e-5)
    parts = [loss_of(alone, small), loss_of(batch_of(small, pad([long])), small)]
    together = loss_of(both, small)
    torch.testing.assert_close(
        torch.stack(list(together)), sum(torch.stack(list(x)) for x in parts), atol=1e-4, rtol=1e-5
    )
    assert int(together.counted) == 3 + 6
    assert bool(mask[0, span][-1])


def test_a17_with_pad_equal_to_eos_the_closing_token_is_supervised(
    tmp_path: Path, target: Target
) -> None:
    assert target.tokenizer.pad_token_id == target.tokenizer.eos_token_id == 2
    file = write(tmp_path / "chats.jsonl", {"messages": CHAT})
    ((example,), _) = make_examples(read_records(file), target, settings(file))
    assert (int(example.ids[-1]), bool(example.label_mask[-1])) == (2, True)


def test_a21_training_ids_are_what_generation_read_and_wrote(
    tmp_path: Path, target: Target
) -> None:
    """Both ways: the ids as they were stored, and the messages rendered with the same options."""
    target.tokenizer.chat_template = THINKING
    try:
        starts = tuple(Start(str(i), given=(f"question {i}",)) for i in range(3))
        chats = ChatSettings(
            temperatures=(1.0,),
            max_new_tokens=6,
            max_looped=1.0,
            template_options={"enable_thinking": False},
        )
        source = Source(PROMPTS, starts)
        sampler = EngineSampler(target, 3)
        maker = ChatMaker(target, sampler, source, chats, tick=lambda *_: None)
        rows = maker.make(0, 3, set()).rows
        assert rows
        opening = "assistant\n<think></think>"
        for row in rows:
            start = row["label_mask"].index(True)
            assert tiny_tokenizer().decode(row["ids"][:start]).endswith(opening)
        made_by = {"sampling": {"template_options": {"enable_thinking": False}}}
        (tmp_path / "manifest.json").write_text(json.dumps({"settings": made_by}))
        file = write(tmp_path / "chats.jsonl", *rows)
        examples, _ = make_examples(read_records(file), target, settings(file))
        assert [e.ids.tolist() for e in examples] == [row["ids"] for row in rows]
        assert [e.label_mask.tolist() for e in examples] == [row["label_mask"] for row in rows]
    finally:
        target.tokenizer.chat_template = TEMPLATE


def test_a21_the_options_of_the_writing_are_those_of_the_training(tmp_path: Path) -> None:
    stored = {"enable_thinking": False}
    made_by = {"sampling": {"template_options": stored}}
    (tmp_path / "manifest.json").write_text(json.dumps({"settings": made_by}))
    file = write(tmp_path / "chats.jsonl", {"messages": CHAT})
    assert with_stored_options(settings(file)).template_options == stored
    same = settings(file, template_options=stored)
    assert with_stored_options(same) == same
    with pytest.raises(UserError, match=r"was written with .*False.*: give the same or none"):
        with_stored_options(settings(file, template_options={"enable_thinking": True}))


def test_a22_text_in_the_templates_form(tmp_path: Path, target: Target) -> None:
    good = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello!<|im_end|>\n"
    foreign = good.replace("assistant", "model")
    file = write(tmp_path / "chats.jsonl", {"text": good}, {"text": foreign})
    examples, report = make_examples(read_records(file), target, settings(file))
    assert [answers(e.ids.tolist(), e.label_mask.tolist()) for e in examples] == [
        ["Hello!<|im_end|>"]
    ]
    reason = r"whose text does not hold the template's opening of answers '<|im_start|>assistant\n'"
    assert report.dropped == {reason: 1}
    only = write(tmp_path / "only.jsonl", {"text": foreign}, {"text": foreign})
    with pytest.raises(UserError, match=r"2 chats read, 0 kept.*2 whose text does not hold"):
        make_examples(read_records(only), target, settings(only))


def test_a22_a_text_whose_answers_do_not_end_is_refused() -> None:
    endless = "<|im_start|>assistant\none<|im_start|>assistant\ntwo<|im_end|>"
    with pytest.raises(Refused, match="before the last one has ended"):
        renderer().render_text(endless)


@pytest.mark.parametrize("answer", ["\nlate", "\n\n", "in an", "é ✓"])
def test_a23_an_answer_begins_where_its_prompt_ends(target: Target, answer: str) -> None:
    """Ids of prompt and answer are those of generation, whatever token would join them."""
    chat = [CHAT[0], {"role": "assistant", "content": answer}]
    (found,) = renderer().render(chat)
    prompt = chat_ids(target, chat[:1])
    assert found.ids[: len(prompt)] == prompt
    assert found.mask == [False] * len(prompt) + [True] * (len(found.ids) - len(prompt))
    assert answers(*found) == [answer + "<|im_end|>"]


def test_a23_a_rewritten_past_gives_every_answer_its_real_context(target: Target) -> None:
    shown = renderer(FORGETFUL)
    first, second = shown.render(THOUGHTFUL)
    assert answers(*first) == ["<think>a</think>one<|im_end|>"]
    assert answers(*second) == ["<think>b</think>two<|im_end|>"]
    shown.tokenizer.chat_template = FORGETFUL
    for found, turns in ((first, THOUGHTFUL[:1]), (second, THOUGHTFUL[:3])):
        prompt = shown.tokenizer.apply_chat_template(
            turns, add_generation_prompt=True, return_dict=True
        )
        start = found.mask.index(True)
        assert found.ids[:start] == list(prompt["input_ids"])
    assert "<think>a" not in tiny_tokenizer().decode(second.ids)


def test_a23_parts_of_a_chat_are_named_after_it(tmp_path: Path, target: Target) -> None:
    file = write(tmp_path / "chats.jsonl", {"id": "c", "messages": THOUGHTFUL})
    target.tokenizer.chat_template = FORGETFUL
    try:
        examples, report = make_examples(read_records(file), target, settings(file))
    finally:
        target.tokenizer.chat_template = TEMPLATE
    assert [e.id for e in examples] == ["c.1", "c.2"]
    assert (report.read, report.kept) == (1, 2)


def test_a23_a_template_that_disagrees_with_itself_is_a_loud_error() -> None:
    with pytest.raises(Unstable, match="opening of answer 2"):
        renderer(THINKING, enable_thinking=False).render(CHAT)
    # the tags also mark what the user says
    loose = TAGGED.replace("message['role'] == 'assistant'", "true")
    with pytest.raises(Unstable, match="tags mark more than the answers"):
        renderer(loose).render(CHAT)


def test_a23_tags_without_the_ending_token_get_it() -> None:
    tight = TAGGED.replace(
        "{{ message['content'] + '<|im_end|>' }}{% endgeneration %}",
        "{{ message['content'] }}{% endgeneration %}{{ '<|im_end|>' }}",
    )
    assert renderer(tight).render(CHAT) == renderer().render(CHAT)


CALL = {"function": {"name": "add", "arguments": {"a": 2}}}
ERRAND = [
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "4", "name": "add"},
    {"role": "assistant", "content": "It is 4."},
]


def test_a24_tools_and_thoughts_are_shown(tmp_path: Path, target: Target) -> None:
    (found,) = renderer(TOOLS).render(ERRAND, [CALL])
    first, last = answers(*found)
    assert json.loads(first.removesuffix("<|im_end|>")) == CALL["function"]
    assert last == "It is 4.<|im_end|>"
    text = tiny_tokenizer().decode(found.ids)
    assert text.startswith("<|im_start|>system\n")
    assert "<|im_start|>tool\n4<|im_end|>" in text
    thought = [CHAT[0], {**CHAT[1], "reasoning_content": "polite"}]
    (found,) = renderer(TOOLS).render(thought)
    assert answers(*found) == ["<think>polite</think>Hello!<|im_end|>"]


@pytest.mark.parametrize(
    ("template", "chat", "tools", "said"),
    [
        (TEMPLATE, ERRAND, None, "with tool_calls that the template does not show"),
        (TEMPLATE, CHAT, [CALL], "with tools that the template does not show"),
        (
            TEMPLATE,
            [CHAT[0], {**CHAT[1], "reasoning_content": "x"}],
            None,
            "with reasoning_content that the template does not show",
        ),
        (
            TOOLS.replace("{% for message in messages %}", "{% for message in messages %}"
                          "{% if message.role != 'tool' %}").replace(
                "{{ '<|im_end|>\n' }}{% endfor %}{% if add", "{{ '<|im_end|>\n' }}{% endif %}"
                "{% endfor %}{% if add"),
            ERRAND,
            None,
            "with a message of the role 'tool' that is not shown",
        ),
        (
            "{{ raise_exception('only one turn') }}",
            CHAT,
            None,
            r"that the template refuses \('?only one turn",
        ),
    ],
)  # fmt: skip
def test_a24_what_a_template_leaves_out_is_refused(
    template: str, chat: Sequence[object], tools: object, said: str
) -> None:
    with pytest.raises(Refused, match=said):
        renderer(template).render(list(chat), tools)


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [CHAT[0], {"role": "assistant", "content": "x\ud800"}]},
        {"messages": [{"role": "user", "content": "\udfff"}, CHAT[1]]},
        {"text": "<|im_start|>assistant\nx\ud800<|im_end|>"},
    ],
)
def test_half_a_character_is_refused_and_counted(
    row: dict[str, object], tmp_path: Path, target: Target
) -> None:
    """JSON can hold it; tokenizers end in a TypeError. In a name it is no matter."""
    file = write(tmp_path / "chats.jsonl", row, {"messages": CHAT, "id": "\ud800"}, {"text": TEXT})
    examples, report = make_examples(read_records(file), target, settings(file))
    assert report.dropped == {"with half a character": 1}
    assert sum(map(len, split(examples, 0.01))) == 2


@pytest.mark.parametrize("ending", ["jsonl", "json"])
@pytest.mark.parametrize("value", ["9" * 5000, "[" * 10**5])
def test_json_that_python_does_not_read(ending: str, value: str, tmp_path: Path) -> None:
    """Numbers of thousands of digits are a ValueError, not one of JSON."""
    file = tmp_path / f"chats.{ending}"
    for text in (f'[{{"messages": {value}}}]', json.dumps({"messages": CHAT, "tools": value})):
        file.write_text(text.strip("[]") if ending == "jsonl" and "tools" not in text else text)
        with pytest.raises(UserError, match=r"chats\.json"):
            read_records(file)


@pytest.mark.parametrize("place", ["/dev/zero", "/dev/null", "."])
def test_chats_are_files(place: str, tmp_path: Path) -> None:
    """A link to a device that never ends filled the memory."""
    (tmp_path / "chats.jsonl").symlink_to(place)
    with pytest.raises(UserError, match=r"chats\.jsonl is no file"):
        read_records(tmp_path)


def test_a24_the_reason_is_counted(tmp_path: Path, target: Target) -> None:
    file = write(tmp_path / "chats.jsonl", {"messages": ERRAND}, {"messages": CHAT})
    _, report = make_examples(read_records(file), target, settings(file))
    assert report.dropped == {"with tool_calls that the template does not show": 1}


def test_a25_both_ways_of_masking_are_cut_alike(tmp_path: Path, target: Target) -> None:
    turns = [{"role": r, "content": "thin band " * 4} for r in ("user", "assistant")] * 3
    file = write(tmp_path / "chats.jsonl", {"messages": turns})
    cut: list[Example] = []
    for template in (TEMPLATE, TAGGED):
        target.tokenizer.chat_template = template
        try:
            kept = settings(file, max_length=64)
            (example,), report = make_examples(read_records(file), target, kept)
        finally:
            target.tokenizer.chat_template = TEMPLATE
        assert len(example.ids) == len(example.label_mask) == 64
        assert "1 shortened" in str(report)
        cut.append(example)
    assert torch.equal(cut[0].ids, cut[1].ids)
    assert torch.equal(cut[0].label_mask, cut[1].label_mask)


def test_a26_answers_that_a_limit_ended_are_counted(tmp_path: Path) -> None:
    folder = save_tiny_target(tmp_path / "target", eos_token_id=None)
    target = Target.load(folder)
    starts = tuple(Start(str(i), given=(f"question {i}",)) for i in range(4))
    chats = ChatSettings(temperatures=(0.0,), max_new_tokens=8, max_looped=1.0)
    source = Source(PROMPTS, starts)
    maker = ChatMaker(target, EngineSampler(target, 4), source, chats, tick=lambda *_: None)
    rows = maker.make(0, 4, set()).rows
    assert rows
    assert {row["finish_reason"] for row in rows} == {"length"}
    file = write(tmp_path / "chats.jsonl", *rows)
    examples, report = make_examples(read_records(file), target, settings(file))
    assert report.cut == len(rows)
    for example, row in zip(examples, rows, strict=True):
        assert example.ids.tolist() == row["ids"]  # no ending token is invented
        assert sum(row["label_mask"]) == 8
    with pytest.raises(UserError, match=f"{len(rows)} whose answer a length limit ended"):
        make_examples(read_records(file), target, settings(file, drop_cut=True))


def test_a27_an_empty_answer_teaches_nothing_and_is_counted(tmp_path: Path, target: Target) -> None:
    silent = [CHAT[0], {"role": "assistant", "content": ""}]
    file = write(
        tmp_path / "chats.jsonl", {"messages": CHAT}, {"messages": silent}, {"messages": CHAT}
    )
    examples, report = make_examples(read_records(file), target, settings(file))
    assert len(examples) == 2
    assert report.dropped == {"without an answer's token": 1}
    (found,) = renderer().render([*silent, *CHAT])
    assert answers(*found) == ["Hello!<|im_end|>"]


@pytest.mark.parametrize("name", NEURAL)
def test_a28_short_answers_teach_what_they_can(small: Target, name: str) -> None:
    """Answers shorter than a drafter looks ahead, alone and together, give a finite loss."""
    torch.manual_seed(0)
    drafter = build_drafter(name, OPTIONS.get(name, {}), small.shape)
    assert isinstance(drafter, NeuralDrafter)
    drafter.init_from(small)
    drafter.eval()  # without noise, and at every depth
    objective = Objective(drafter, small, LossSettings())
    examples = [example_of(20, n, seed=n) for n in (1, 6, 15, 16)]
    counts: list[float] = []
    for group in ([e] for e in examples):
        sums = objective.drafter.predict(batch_of(small, pad(group), drafter.features), small)
        batch = batch_of(small, pad(group), drafter.features)
        found = drafter_loss(sums, batch, objective.teacher, LossSettings())
        assert bool(torch.isfinite(torch.stack(list(found))).all())
        assert float(found.counted[0]) > 0
        counts.append(float(found.counted.sum()))
    batch = batch_of(small, pad(examples), drafter.features)
    whole = drafter_loss(drafter.predict(batch, small), batch, objective.teacher, LossSettings())
    assert float(whole.counted.sum()) == sum(counts)


@pytest.mark.parametrize("name", NEURAL)
def test_packed_equals_unpacked(small: Target, name: str) -> None:
    """Several chats in one row give the sums and gradients of the same chats apart.

    In double precision: a kernel rounds in another way for another number of tokens.
    """
    torch.manual_seed(0)
    small = Target(copy.deepcopy(small.model).double())
    drafter = build_drafter(name, OPTIONS.get(name, {}), small.shape)
    assert isinstance(drafter, NeuralDrafter)
    drafter.double().init_from(small)
    drafter.eval()  # without noise, and at every depth
    examples = [example_of(n, n - 4, seed=n) for n in (17, 9, 12, 6)]
    examples[1].label_mask[0] = True  # has no law before it, packed or not
    packed = pack(examples, 30)
    assert sorted(x for e in packed for x in e.documents) == [6, 9, 12, 17]
    assert [len(e) for e in packed] == [29, 15]
    teacher = Teacher(small, drafter.ids)
    results: list[list[Tensor]] = []
    for rows in (examples, packed):
        drafter.zero_grad()
        batch = batch_of(small, pad(rows), drafter.features)
        sums = drafter_loss(drafter.predict(batch, small), batch, teacher, LossSettings())
        sums.loss.sum().backward()
        slopes = [p.grad.clone() for p in drafter.parameters() if p.grad is not None]
        results.append([*(x.detach() for x in sums), *slopes])
    torch.testing.assert_close(results[0], results[1], atol=1e-6, rtol=1e-6)
