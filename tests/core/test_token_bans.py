"""Minimum length of an answer, stop tokens and stop strings that stay in the text."""

from localchat.core.stop_strings import StopPatterns, StopScanner
from localchat.core.token_bans import EndBan


def test_end_tokens_are_banned_until_the_minimum_is_reached() -> None:
    ban = EndBan(3, [1, 34], 40)
    masks = [ban.mask(generated) for generated in range(5)]
    assert masks[3:] == [None, None]
    for words in masks[:3]:
        assert words is not None and len(words) == 8
        banned = [token for token in range(64) if not words[token >> 3] >> (token & 7) & 1]
        assert banned == [1, 34]


def test_stop_string_can_stay_in_the_text() -> None:
    patterns = StopPatterns(["end"])
    assert StopScanner(patterns).push("the end.") == ("the ", "end")
    assert StopScanner(patterns, keep=True).push("the end.") == ("the end", "end")
    scanner = StopScanner(patterns, keep=True)
    assert scanner.push("the e") == ("the ", "")
    assert scanner.push("nd of it") == ("end", "end")
