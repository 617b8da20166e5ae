from typing import Any

import pytest

from localchat_llamacpp.wordpiece import LOWERCASE, STRIP_ACCENTS, WordPiece

VOCABULARY = [
    "[UNK]",
    "▁cafe",
    "▁Café",
    "▁café",
    "▁한",
    "▁ᄒ",
    "ᅡ",
    "ᆫ",
    "▁a",
    "a",
    "▁▁",
    "▁!",
    "▁漢",
]
UNKNOWN = 0


def _encode(text: str, vocabulary: list[str] = VOCABULARY, **metadata: bool) -> list[str]:
    words = WordPiece(vocabulary, UNKNOWN, metadata)
    return [vocabulary[token] for token in words.encode(text)]


UNCASED: dict[str, Any] = {LOWERCASE: True}
CASED: dict[str, Any] = {LOWERCASE: False}


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        (UNCASED, "▁cafe"),
        (CASED, "▁Café"),
        ({**UNCASED, STRIP_ACCENTS: False}, "▁café"),
    ],
)
def test_the_file_says_whether_case_and_accents_are_folded(
    metadata: dict[str, Any], expected: str
) -> None:
    assert _encode("Café", **metadata) == [expected]


def test_a_vocabulary_with_capitals_keeps_them_where_the_file_says_nothing() -> None:
    assert _encode("Café") == ["▁Café"]


def test_a_vocabulary_without_capitals_folds_case_where_the_file_says_nothing() -> None:
    assert _encode("CAFÉ", ["[UNK]", "▁cafe"]) == ["▁cafe"]


def test_hangul_is_taken_apart_with_accents_only() -> None:
    assert _encode("한", **UNCASED) == ["▁ᄒ", "ᅡ", "ᆫ"]
    assert _encode("한", **CASED) == ["▁한"]


def test_long_words_are_unknown() -> None:
    assert _encode("a" * 100, **UNCASED) == ["▁a", *["a"] * 99]
    assert _encode("a" * 101, **UNCASED) == ["[UNK]"]


def test_ideographs_and_punctuation_are_words() -> None:
    assert _encode("a漢a!", **UNCASED) == ["▁a", "▁漢", "▁a", "▁!"]


def test_a_mark_of_words_in_the_text_is_text() -> None:
    assert _encode("▁", **UNCASED) == ["▁▁"]
    assert _encode("▁a", **UNCASED) == ["▁▁", "a"]


def test_characters_without_meaning_are_left_out() -> None:
    assert _encode("\ud800\x00\u200ba\ufffd\x07a\u2028a", **UNCASED) == ["▁a", "a", "▁a"]
