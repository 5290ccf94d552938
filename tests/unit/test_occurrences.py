"""The index of earlier occurrences equals a search through all documents."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from drafters.occurrences import GRAMS, Occurrences

TOKENS = st.lists(st.integers(0, 3), max_size=24)


def searched(
    documents: Sequence[list[int]], text: list[int], most: int, reach: int
) -> list[tuple[int, int, int]]:
    """Return (length, document, place) of the latest matches of the longest gram that occurred."""
    for size in GRAMS:
        places = [
            (number, end)
            for number, document in enumerate(documents)
            for end in range(size, len(document))
            if size <= len(text) and document[end - size : end] == text[-size:]
        ]
        if places:
            found = []
            for number, end in places[::-1][:most]:
                before = documents[number][:end]
                fits = [n for n in range(1, reach + 1) if n <= min(len(before), len(text))]
                length = max(n for n in fits if before[-n:] == text[-n:])
                found.append((length, number, end))
            return found
    return []


@given(
    st.lists(TOKENS, min_size=1, max_size=4), TOKENS, st.integers(1, 5), st.sampled_from([6, 64])
)
def test_matches_equal_a_search(
    documents: list[list[int]], text: list[int], most: int, reach: int
) -> None:
    """Whole documents, and a text that is the last of them while it grows."""
    index = Occurrences()
    for tokens in documents:
        index.begin()
        for token in tokens:
            index.extend([token])
    places = {id(document): number for number, document in enumerate(index.documents)}
    for end in (text, documents[-1]):
        found = index.matches(end, most, reach)
        got = [(match.length, places[id(match.document)], match.after) for match in found]
        assert got == searched(documents, end, most, reach)


@given(st.lists(TOKENS, min_size=1, max_size=8), TOKENS, st.integers(0, 40))
def test_the_oldest_documents_leave_whole(
    documents: list[list[int]], text: list[int], limit: int
) -> None:
    """What is left behaves as if what left had never been there, and leaves no entry behind."""
    index = Occurrences(limit)
    kept: list[list[int]] = []
    for tokens in documents:
        index.begin()
        index.extend(tokens)
        kept.append(tokens)
        while sum(map(len, kept)) > limit:
            kept.pop(0)
        assert index.size == sum(map(len, kept)) <= limit
        assert list(index.documents) == kept
    fresh = Occurrences()
    for tokens in kept:
        fresh.begin()
        fresh.extend(tokens)
    assert {gram: len(v) for gram, v in index._where.items()} == {
        gram: len(v) for gram, v in fresh._where.items()
    }
    read = [
        [(m.length, m.after, m.next(3)) for m in i.matches(text, 9, 64)] for i in (index, fresh)
    ]
    assert read[0] == read[1]
