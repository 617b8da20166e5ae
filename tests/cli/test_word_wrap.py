"""An answer on a terminal breaks at words, however its pieces come."""

import pytest

from localchat.cli.word_wrap import WordWrap, wrap_at_words

WIDTH = 20


def wrapped(text: str, piece: int = 3, width: int = WIDTH) -> str:
    wrap = WordWrap()
    pieces = [text[at : at + piece] for at in range(0, len(text), piece)]
    return "".join(wrap.add(one, width) for one in pieces) + wrap.rest()


@pytest.mark.parametrize("piece", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("The quick brown fox jumps over", "The quick brown fox\njumps over"),
        ("exactly twenty cells and more", "exactly twenty cells\nand more"),
        ("one\n\n  indented text that wraps", "one\n\n  indented text that\nwraps"),
        ("日本語のテキストは、どこでも折り返す。", "日本語のテキストは、\nどこでも折り返す。"),
        ("日本語のテキストはど、こ", "日本語のテキストは\nど、こ"),
        ("thumbs 👍🏽👍🏽👍🏽👍🏽👍🏽👍🏽👍🏽", "thumbs 👍🏽👍🏽👍🏽👍🏽👍🏽👍🏽\n👍🏽"),
        ("a family of 👩‍👩‍👧 wide", "a family of 👩‍👩‍👧 wide"),
    ],
)
def test_lines_break_between_words_and_wide_characters(text: str, shown: str, piece: int) -> None:
    assert wrapped(text, piece) == shown


@pytest.mark.parametrize("piece", [1, 4, 1000])
@pytest.mark.parametrize(
    "text",
    [
        "```sh\nlocalchat run some-model --ctx 4096\n```",
        "~~~\na ``` line that is wider than it\n```\nand the code goes on and on\n~~~",
        "````\n```\nstill code, wider than the window\n```\n````",
        "| a table | with rows that are wider |",
        "https://example.com/a/path/that/is/long",
    ],
)
def test_code_tables_and_long_words_stay_as_the_model_wrote_them(text: str, piece: int) -> None:
    assert wrapped(text, piece) == text


def test_text_below_a_code_block_wraps_again() -> None:
    code = "```\nx = 'a line wider than it'\n```\n"
    assert wrapped(f"{code}and text below of them") == f"{code}and text below of\nthem"


def test_a_word_after_one_that_the_terminal_broke_stands_behind_its_end() -> None:
    assert wrapped("x" * 25 + " and then a word") == "x" * 25 + " and then a\nword"


def test_only_the_last_word_is_held_back() -> None:
    wrap = WordWrap()
    assert wrap.add("one two", WIDTH) == "one"
    assert wrap.add(" ", WIDTH) == " two"
    assert wrap.rest() == " "


def test_nothing_is_held_where_the_width_is_not_known() -> None:
    assert WordWrap().add("one two", 0) == "one two"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("localchat: other programs are busy", "localchat: other\nprograms are busy"),
        ("first line\n  see localchat run --help", "first line\n  see localchat run\n  --help"),
        ("/send   send it again", "/send   send it\n        again"),
        ("a long first column  and more", "a long first column \nand more"),
        ("a line and its end\n", "a line and its end\n"),
        ("/a/path/that/is/wider/than/it", "/a/path/that/is/wider/than/it"),
    ],
)
def test_a_whole_text_goes_on_under_its_indent(text: str, shown: str) -> None:
    assert wrap_at_words(text, WIDTH) == shown
    assert wrap_at_words(text, 0) == text
