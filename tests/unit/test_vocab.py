"""The reduced draft vocabulary."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drafters.errors import UserError
from drafters.vocab import DraftVocabulary, choose, coverage


@pytest.mark.parametrize(
    ("counts", "size", "always", "expected"),
    [
        ([0, 5, 0, 9, 7], 2, [], [3, 4]),
        ([0, 5, 0, 9, 7], 3, [2], [2, 3, 4]),
        ([0, 5, 0, 9, 7], 1, [0], [0]),
        ([3, 3, 3, 3], 2, [], [0, 1]),  # equals: the lowest ids
        ([0, 0, 0, 4, 0], 3, [], [0, 1, 3]),  # a19: filled up with the lowest unused ids
        ([0, 0, 0, 0, 0], 3, [4, 4], [0, 1, 4]),
        ([1, 2, 3], 3, [0], [0, 1, 2]),
    ],
)
def test_choose(counts: list[int], size: int, always: list[int], expected: list[int]) -> None:
    ids = choose(torch.tensor(counts), size, always)
    assert ids.tolist() == expected
    assert ids.dtype == torch.int64


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=12).flatmap(
        lambda counts: st.tuples(
            st.just(counts),
            st.integers(1, len(counts)),
            st.sets(st.integers(0, len(counts) - 1), max_size=len(counts)),
        )
    )
)
def test_chosen_ids_are_ascending_complete_and_the_best(
    case: tuple[list[int], int, set[int]],
) -> None:
    counts, size, always = case
    if len(always) > size:
        with pytest.raises(UserError):
            choose(torch.tensor(counts), size, always)
        return
    ids = choose(torch.tensor(counts), size, always).tolist()
    assert ids == sorted(set(ids))
    assert len(ids) == size
    assert always <= set(ids)
    free = sorted((counts[i] for i in ids if i not in always), reverse=True)
    others = sorted((c for i, c in enumerate(counts) if i not in always), reverse=True)
    assert free == others[: len(free)]


@pytest.mark.parametrize(
    ("size", "always", "message"),
    [
        (0, [], "draft vocabulary of 0 ids: give 1 .* to 4"),
        (5, [], "of 5 ids: give 1 .* to 4 "),
        (1, [0, 2], "of 1 ids: give 2 .* to 4"),
        (2, [4], r"required ids \[4\]: the target's vocabulary is 0 to 3"),
        (2, [-1], r"required ids \[-1\]"),
    ],
)
def test_impossible_sizes_and_ids_are_refused(size: int, always: list[int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        choose(torch.tensor([1, 2, 3, 4]), size, always)


def test_coverage() -> None:
    counts = torch.tensor([1, 2, 5])
    assert coverage(counts, torch.tensor([0, 1, 2])) == 1
    assert coverage(counts, torch.tensor([1, 2])) == 7 / 8
    with pytest.raises(UserError, match="no tokens"):
        coverage(torch.zeros(3, dtype=torch.int64), torch.tensor([0]))


def test_all_ids_are_stored_as_none() -> None:
    for size in (0, 8, 9):
        vocabulary = DraftVocabulary(size, 8)
        assert (vocabulary.ids, vocabulary.size, len(vocabulary)) == (None, 0, 8)
        assert not vocabulary.state_dict()
    with pytest.raises(UserError, match="whole vocabulary"):
        vocabulary.keep(torch.arange(8))
    with pytest.raises(UserError, match="draft_vocab_size is -1"):
        DraftVocabulary(-1, 8)


def test_kept_ids_are_saved_and_loaded() -> None:
    vocabulary, again = DraftVocabulary(3, 8), DraftVocabulary(3, 8)
    vocabulary.keep(torch.tensor([1, 4, 7]))
    again.load_state_dict(vocabulary.state_dict())
    assert again.ids is not None
    assert again.ids.tolist() == [1, 4, 7]


@pytest.mark.parametrize("ids", [[1, 1, 2], [2, 1, 3], [-1, 0, 1], [5, 6, 8]])
def test_wrong_ids_are_refused_when_set_and_when_loaded(ids: list[int]) -> None:
    vocabulary = DraftVocabulary(3, 8)
    with pytest.raises(UserError, match="ascending, unique and within 0 to 7"):
        vocabulary.keep(torch.tensor(ids))
    with pytest.raises(UserError, match="ascending, unique and within 0 to 7"):
        vocabulary.load_state_dict({"ids": torch.tensor(ids)})
    with pytest.raises(UserError, match="2 draft ids for draft_vocab_size 3"):
        vocabulary.keep(torch.tensor([1, 2]))
