"""Sizes, counts, rates, durations and shares as people read them."""

import pytest

from localchat import units


@pytest.mark.parametrize(
    ("count", "words"),
    [
        *((0, "0 B"), (999, "999 B"), (12.7, "12 B"), (1000, "1.0 kB"), (1500, "1.5 kB")),
        *((999_600, "1.0 MB"), (999_960, "1.0 MB"), (9_960_000, "10 MB"), (640_400_000, "640 MB")),
        *((4.7e9, "4.7 GB"), (16_000_000_000, "16.0 GB"), (999_999_999_999, "1.0 TB")),
        *((2e12, "2.0 TB"), (5 * 10**15, "5000.0 TB"), (-2_000_000, "-2.0 MB")),
    ],
)
def test_size_has_one_form_everywhere(count: float, words: str) -> None:
    assert units.size(count) == words


@pytest.mark.parametrize(
    ("done", "total", "words"),
    [
        *((2.1e9, 4.7e9, "2.1/4.7 GB"), (100, 4.7e9, "0.0/4.7 GB"), (0, 0, "0/0 B")),
        *((320e6, 640e6, "320/640 MB"), (500, 1500, "0.5/1.5 kB"), (12, 999, "12/999 B")),
    ],
)
def test_a_part_is_in_the_unit_of_the_whole(done: float, total: float, words: str) -> None:
    assert units.sizes(done, total) == words


def test_counts_and_rates() -> None:
    assert (units.tokens(32768), units.tokens(1)) == ("32,768 tokens", "1 token")
    assert (units.rate(62.04), units.rate(1234.5)) == ("62.0 tok/s", "1,234 tok/s")
    assert (units.decimal(0.456, 2), units.decimal(None, 2)) == ("0.46", "-")
    assert (units.gigabytes_flag(4_700_000_001), units.gigabytes_flag(10**9)) == ("4.8", "1.0")


def test_durations() -> None:
    found = [units.duration(seconds) for seconds in (42, 99.4, 365, 7800)]
    assert found == ["42 s", "99 s", "6 min 05 s", "2 h 10 min"]


def test_shares() -> None:
    found = [units.percent(*pair) for pair in ((1, 1000), (412, 32768), (0, 0), (1, 0))]
    assert found == ["<1%", "1%", "0%", "<1%"]
    assert (units.used_of(412, 32768), units.used_of(7, 0)) == ("412/32,768 (1%)", "7")


@pytest.mark.parametrize(
    ("count", "words"),
    [(0, "0 messages"), (1, "1 message"), (2, "2 messages"), (1234, "1,234 messages")],
)
def test_one_of_a_kind_is_singular(count: int, words: str) -> None:
    assert units.counted(count, "message") == words
