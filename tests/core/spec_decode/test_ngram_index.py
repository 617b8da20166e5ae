"""Every place where three tokens stood before is found, however the text came, in little memory."""

from hypothesis import given, settings
from hypothesis import strategies as st

from localchat.core.spec_decode.ngram_index import SPAN, NgramIndex

TOKENS = st.lists(st.sampled_from([-1, 0, 1, 2, 3, 2**21 - 1]), max_size=120)


def places(text: list[int], context: list[int]) -> list[int]:
    """Expected result of `ends`, by an exhaustive search."""
    found = [
        at
        for at in range(SPAN - 1, len(text) - 1)
        if text[at - SPAN + 1 : at + 1] == context[-SPAN:]
    ]
    return found[::-1]


@given(st.lists(TOKENS, max_size=5), TOKENS.filter(lambda tokens: len(tokens) >= SPAN))
@settings(max_examples=150, deadline=None)
def test_the_latest_places_are_found_first(pieces: list[list[int]], context: list[int]) -> None:
    index, text = NgramIndex(), []
    for piece in pieces:
        index.extend(piece)
        text += piece
    for end in (len(context), SPAN):
        wanted = places(text, context[:end])
        assert list(index.find(context[:end], 12)) == wanted[:12]
        assert list(index.tokens) == text


def test_a_text_is_found_alike_in_one_piece_and_token_by_token() -> None:
    text = [n * n % 61 for n in range(3000)]
    whole, grown = NgramIndex(text), NgramIndex()
    for token in text:
        grown.extend((token,))
    for at in range(SPAN, len(text), 7):
        context = text[:at]
        assert list(whole.find(context, 12)) == list(grown.find(context, 12))
    assert list(whole.find(text[:500], 12))


def test_a_copied_index_grows_independently() -> None:
    index = NgramIndex([1, 2, 3, 4] * 20)
    twin = index.copy()
    twin.extend([9, 9, 9, 9] * 300)
    index.extend([1, 2, 3])
    assert len(index) == 83
    assert list(index.find([9, 9, 9], 4)) == []
    assert list(twin.find([9, 9, 9], 1)) == [len(twin) - 2]
    assert list(twin.find([1, 2, 3], 1)) == [78]


def test_a_search_through_a_monotonous_text_ends_soon() -> None:
    index = NgramIndex([7] * 20_000)
    assert len(list(index.find([7, 7, 7], 5))) == 5
    assert list(index.find([7, 7, 8], 5)) == []
