"""Text from outside can do nothing to a terminal, and none of it vanishes."""

from hypothesis import given
from hypothesis import strategies as st

from localchat.sanitize import sanitize, sanitize_line
from tests.support.cli_program import HOSTILE

_OBEYED = {chr(code) for code in (*range(0x20), *range(0x7F, 0xA0))} - {"\n", "\t"}


@given(st.text(st.characters()))
def test_nothing_obeyed_is_left_and_nothing_is_lost(text: str) -> None:
    shown = sanitize(text)
    assert not set(shown) & _OBEYED
    assert len(shown) == len(text)
    shown.encode("utf-8")


@given(st.text(), st.integers(0, 50))
def test_a_cut_anywhere_changes_nothing(text: str, cut: int) -> None:
    assert sanitize(text[:cut]) + sanitize(text[cut:]) == sanitize(text)


def test_ordinary_text_of_any_script_stays() -> None:
    text = "naïve\tשלום 日本 👩‍🚀\n"
    assert sanitize(text) == text


def test_escapes_and_direction_overrides_are_shown() -> None:
    assert sanitize(HOSTILE) == "a␛]0;title␇b␛[2Jc\ufffd1md\ufffde␍f␀g"


def test_a_name_stays_on_its_line() -> None:
    assert sanitize_line("a\nb\tc") == "a␊b c"


def test_what_is_hidden_is_shown_and_what_scripts_need_stays() -> None:
    hidden = "a\U000e0068\U000e0069b\u2028c\u2029d\ufeffe\xadf"
    assert sanitize(hidden) == "a\ufffd\ufffdb\u2424c\u2424d\ufffde\u2010f"
    khmer = "ភាសា\u200bខ្មែរ \u200eא\u200f می\u200cخواهم ❤\ufe0f"
    assert sanitize(khmer) == khmer
