"""Incremental decoding against the decoding of the whole."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localchat.core.detokenizer import DecodedText, Detokenizer

# Invalid and cut-off sequences beside valid text of every length of code point.
fragments = st.one_of(
    st.text(max_size=4).map(lambda t: t.encode("utf-8", "surrogatepass")),
    st.binary(max_size=4),
    st.sampled_from(
        [b"\xf0\x9f", b"\xe2\x82", b"\xc3", b"\x80", b"\xed\xa0\x80", b"\xf5", b"\xc0\xaf", b""]
    ),
)
tokens_of_bytes = (
    st.lists(fragments, max_size=10)
    .map(b"".join)
    .flatmap(
        lambda whole: st.lists(st.integers(0, len(whole)), max_size=12).map(
            lambda cuts: [
                whole[a:b]
                for a, b in zip([0, *sorted(cuts)], [*sorted(cuts), len(whole)], strict=True)
            ]
        )
    )
)


@given(tokens_of_bytes)
def test_pieces_are_the_decoded_whole_without_the_start_of_a_code_point(
    tokens: list[bytes],
) -> None:
    detokenizer = Detokenizer()
    pieces = [detokenizer.push(token) for token in tokens]
    whole = b"".join(tokens)
    complete = whole[: len(whole) - detokenizer.held_bytes]
    last = detokenizer.flush()
    assert "".join(p.text for p in [*pieces, last]) == complete.decode(errors="replace")
    assert sum(p.tokens for p in [*pieces, last]) == len(tokens)
    assert len(detokenizer._ends) == detokenizer.held_bytes == 0


@given(tokens_of_bytes)
def test_a_token_completes_with_the_piece_that_shows_its_last_byte(tokens: list[bytes]) -> None:
    detokenizer, completed, shown = Detokenizer(), 0, ""
    for count, token in enumerate(tokens, 1):
        piece = detokenizer.push(token)
        completed += piece.tokens
        shown += piece.text
        assert detokenizer.held_bytes < 4, "no more waits than one code point can need"
        assert completed + len(detokenizer._ends) == count
        out = sum(map(len, tokens[:count])) - detokenizer.held_bytes
        assert sum(map(len, tokens[:completed])) <= out
        assert completed == count or sum(map(len, tokens[: completed + 1])) > out
        assert b"".join(tokens[:count])[:out].decode(errors="replace") == shown


@given(st.text(max_size=20))
def test_valid_text_in_single_bytes_shows_whole_code_points_only(text: str) -> None:
    detokenizer = Detokenizer()
    pieces = [detokenizer.push(bytes([byte])).text for byte in text.encode()]
    assert "".join(pieces) == text
    assert all(len(piece) <= 1 for piece in pieces)
    assert detokenizer.flush() == DecodedText()


def test_half_a_code_point_waits_and_its_tokens_complete_together() -> None:
    detokenizer = Detokenizer()
    euro = "€".encode()
    assert detokenizer.push(b"a" + euro[:1]) == DecodedText("a", 0)
    assert detokenizer.push(euro[1:2]) == DecodedText("", 0)
    assert detokenizer.push(b"") == DecodedText("", 0)
    assert detokenizer.push(euro[2:] + b"b") == DecodedText("€b", 4)


def test_a_broken_beginning_is_shown_as_soon_as_it_is_known_to_be_broken() -> None:
    detokenizer = Detokenizer()
    assert detokenizer.push(b"\xe2\x82") == DecodedText("", 0)
    assert detokenizer.push(b"x") == DecodedText("�x", 2)
    assert detokenizer.push(b"\xf0\x9f") == DecodedText("", 0)
    assert detokenizer.flush() == DecodedText("", 1)
    assert detokenizer.push(b"\x9f") == DecodedText("�", 1), (
        "the rest of what was flushed is no code point"
    )


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        ([b" Hello", b" world"], "Hello world"),
        ([b"  two"], " two"),
        ([b"", b" x"], "x"),
        ([b"x", b" y"], "x y"),
        ([b" ", b" "], " "),
    ],
)
def test_one_leading_space_is_dropped_where_the_vocabulary_puts_one(
    tokens: list[bytes], text: str
) -> None:
    detokenizer = Detokenizer(strip_leading_space=True)
    pieces = [detokenizer.push(token) for token in tokens]
    assert "".join(p.text for p in pieces) == text
    assert sum(p.tokens for p in pieces) == len(tokens)
