"""Suffix decoding: counts by hand, lengths, the corpus of finished answers."""

import math

import pytest

from drafters.errors import UserError
from drafters.growth import Chain, Dynamic, Growth
from drafters.methods.suffix import SuffixOptions, best_guess
from drafters.occurrences import Occurrences
from drafters.registry import build_drafter
from drafters.tree import TokenTree
from inference import generate
from tests.tiny import prompts_of, tiny_target


def guess_of(text: str, growth: Growth, **options: float) -> tuple[str, list[int], list[float]]:
    index = Occurrences()
    index.begin()
    index.extend([ord(letter) for letter in text])
    config = SuffixOptions(**options)
    matches = index.matches(index.documents[0], config.occurrences, config.reach)
    guess = best_guess(matches, config, growth)
    return "".join(map(chr, guess.tokens)), guess.parents, guess.shares


WIDE = Dynamic(8, 4, 6)


def test_counts_by_hand() -> None:
    """After "ab" came "cab..." and "dab": of two tokens, both first ones or the later path."""
    assert guess_of("abcabdab", WIDE) == ("dc", [-1, -1], [0.5, 0.5])
    assert guess_of("abcabdab", Chain(4)) == ("da", [-1, 0], [0.5, 0.5])
    assert guess_of("abcabdab", WIDE, factor=2) == ("dcaa", [-1, -1, 0, 1], [0.5] * 4)


def test_the_more_frequent_comes_first() -> None:
    """After "x" came y twice and z once: 2/3 and 1/3, one token for a match of one."""
    assert guess_of("xyxyxzx", Chain(4))[0] == "y"
    found = guess_of("xyxyxzx", WIDE, factor=3)
    assert found[0] == "yxz"
    assert found[2] == pytest.approx([2 / 3, 2 / 3, 1 / 3])
    assert guess_of("xyxyxzx", WIDE, factor=9, min_prob=0.5)[0] == "yx"


def test_a_longer_match_that_promises_more_is_taken() -> None:
    """One place agrees on 8 tokens, two more on 4 only: 8 sure tokens beat 4 at a third."""
    text = "pqrsabcdefghijkl" + "1abcdX" + "2abcdY" + "pqrsabcd"
    assert guess_of(text, Chain(8)) == ("efghijkl", [-1, *range(7)], [1.0] * 8)
    assert guess_of(text, Chain(3))[0] == "efg"


def test_nothing_matches() -> None:
    assert guess_of("abc", Chain(4)) == ("", [], [])


def tree_of(text: str) -> TokenTree:
    index = Occurrences()
    index.begin()
    index.extend([ord(letter) for letter in text])
    config = SuffixOptions(factor=2)
    matches = index.matches(index.documents[0], 32, 64)
    return best_guess(matches, config, WIDE).tree(ord(text[-1]))


def test_confidence_grows_with_the_match() -> None:
    """A match of two: counts are believed by 2/3 a level."""
    tree = tree_of("abcabdab")
    tree.check()
    assert tree.confidence is not None
    expected = [1.0, 1 / 3, 1 / 3, 2 / 9, 2 / 9]
    assert [math.exp(c) for c in tree.confidence.tolist()] == pytest.approx(expected)


@pytest.mark.parametrize("corpus", [0, 1000])
def test_answers_are_remembered_where_that_is_asked_for(corpus: int) -> None:
    """The same prompt again: with a corpus its answer is drafted, and the output is the same."""
    target = tiny_target(num_hidden_layers=2, hidden_size=32, intermediate_size=64)
    [prompt] = prompts_of(9)
    drafter = build_drafter("suffix", {"corpus": corpus}, target.shape)
    first, again = generate(
        target, drafter, [prompt, prompt], growth=Chain(6), max_new_tokens=24, rows=1
    )
    assert first.ids == again.ids
    assert (again.tau > first.tau + 1) == bool(corpus)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"factor": 0}, "factor is 0"),
        ({"min_prob": 2.0}, "min_prob 2.0: give more than 0"),
        ({"corpus": -1}, "corpus -1: give 1 or more, corpus 0 or more"),
        ({"corpse": 1}, "nearest known key is 'corpus'"),
    ],
)
def test_bad_options(options: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build_drafter("suffix", options, tiny_target().shape)
