"""Streamed text: the pieces make the whole, and no piece holds half a character."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from inference.detokenize import TextStream
from tests.folders import VOCAB_SIZE, tiny_tokenizer

TOKENIZER = tiny_tokenizer()


def pieces(ids: list[int], step: int = 1) -> list[str]:
    stream = TextStream(TOKENIZER)
    found = [stream.push(ids[start : start + step]) for start in range(0, len(ids), step)]
    return [*found, stream.flush()]


@pytest.mark.parametrize("step", [1, 2, 3, 100])
def test_characters_of_many_bytes_come_whole(step: int) -> None:
    text = "the é and 漢字 🙂, \u200b in"
    found = pieces(TOKENIZER(text)["input_ids"], step)
    assert "".join(found) == text
    assert not any("\ufffd" in piece for piece in found)


def test_one_byte_at_a_time() -> None:
    assert pieces(TOKENIZER("a🙂b")["input_ids"]) == ["a", "", "", "", "🙂", "b", ""]


def test_special_tokens_are_left_out() -> None:
    assert "".join(pieces(TOKENIZER("<|im_start|>hi<|im_end|>")["input_ids"])) == "hi"


def test_an_output_cut_inside_a_character_ends_broken() -> None:
    assert pieces(TOKENIZER("a🙂")["input_ids"][:-1]) == ["a", "", "", "", "\ufffd"]


@given(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=40), st.integers(1, 5))
def test_any_ids_add_up_to_their_text(ids: list[int], step: int) -> None:
    whole = TOKENIZER.decode(ids, skip_special_tokens=True)
    assert "".join(pieces(ids, step)) == whole


def test_long_outputs_are_not_decoded_again_and_again() -> None:
    class Counting:
        longest = 0

        def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
            self.longest = max(self.longest, len(ids))
            return TOKENIZER.decode(ids, skip_special_tokens=skip_special_tokens)

    counting = Counting()
    stream = TextStream(counting)
    ids = torch.randint(3, VOCAB_SIZE, (400,), generator=torch.Generator().manual_seed(0))
    text = "".join([stream.push([token]) for token in ids.tolist()] + [stream.flush()])
    assert text == TOKENIZER.decode(ids.tolist())
    assert counting.longest < 60
