"""Stop strings against the naive definition, over every way to cut the text into pieces."""

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from localchat.core.stop_strings import Scan, StopPatterns, StopScanner


def naive(text: str, stops: list[str]) -> Scan:
    """The stop that is complete first, the longest of those; what stands before it."""
    for end in range(len(text) + 1):
        ending = [s for s in stops if s and text[:end].endswith(s)]
        if ending:
            stop = max(ending, key=len)
            return Scan(text[: end - len(stop)], stop)
    return Scan(text)


def chunked(text: str, cuts: list[int]) -> list[str]:
    borders = [0, *sorted(c % (len(text) + 1) for c in cuts), len(text)]
    return [text[a:b] for a, b in pairwise(borders)]


texts = st.text("ab\n", max_size=24)
stop_lists = st.lists(st.text("ab\n", max_size=5), max_size=6)


@given(text=texts, stops=stop_lists, cuts=st.lists(st.integers(0, 100), max_size=8))
@example(text="aabaab\n", stops=["aabaa\n", "abaab\n", "b\n"], cuts=[1, 2, 3, 4, 5, 6])
@example(text="ab\n", stops=["abb", "b"], cuts=[])
def test_the_first_stop_ends_the_text_however_it_is_cut(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    scanner, shown, stop = StopScanner(StopPatterns(stops)), "", ""
    for piece in chunked(text, cuts):
        scan = scanner.push(piece)
        shown, stop = shown + scan.text, scan.stop
        if stop:
            break
    assert Scan(shown + scanner.flush(), stop) == naive(text, stops)


@given(text=texts, stops=stop_lists)
def test_only_what_could_become_a_stop_is_held(text: str, stops: list[str]) -> None:
    scanner, taken = StopScanner(StopPatterns(stops)), ""
    for character in text:
        taken += character
        if scanner.push(character).stop:
            assert len(scanner._held) == 0
            return
        beginnings = [s[:n] for s in stops for n in range(1, len(s))]
        could = [len(b) for b in beginnings if taken.endswith(b)]
        assert len(scanner._held) == max(could, default=0)


def test_the_stop_and_what_follows_are_not_shown() -> None:
    scanner = StopScanner(StopPatterns(["\nUser:", "END"]))
    assert scanner.push("Hi\nUs") == Scan("Hi")
    assert scanner.push("er") == Scan("")
    assert scanner.push(": more END") == Scan("", "\nUser:")
    assert scanner.flush() == ""


def test_a_false_beginning_is_given_back_whole() -> None:
    scanner = StopScanner(StopPatterns(["abac"]))
    assert scanner.push("aba") == Scan("")
    assert scanner.push("b") == Scan("ab"), "the last ab may begin again"
    assert scanner.flush() == "ab"


@pytest.mark.parametrize("strings", [[], [""]])
def test_without_stop_strings_all_text_passes(strings: list[str]) -> None:
    patterns = StopPatterns(strings)
    assert not patterns
    assert StopScanner(patterns).push("anything") == Scan("anything")


def test_after_a_stop_the_scanner_starts_afresh() -> None:
    scanner = StopScanner(StopPatterns(["aba", "ab"]))
    assert scanner.push("xa") == Scan("x")
    assert scanner.push("b") == Scan("", "ab")
    assert scanner.push("ba") == Scan("b")
    assert scanner.flush() == "a"


def test_choices_share_patterns_and_not_their_state() -> None:
    patterns = StopPatterns(["xy"])
    first, second = StopScanner(patterns), StopScanner(patterns)
    assert first.push("x") == Scan("")
    assert second.push("y") == Scan("y")
    assert first.push("y") == Scan("", "xy")
