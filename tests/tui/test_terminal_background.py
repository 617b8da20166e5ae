"""The theme follows the terminal's background where none is chosen, and the reply is never taken for keys."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from textual.pilot import Pilot

from localchat.tui.textual_internals.background import Background, background_of
from localchat.tui.textual_internals.terminal_input import BackgroundReply, Keys, TerminalInput
from localchat.tui.themes import THEMES, is_light_terminal
from tests.support.terminal_program import Program
from tests.support.tui_stage import Stage, app_of, play, until

WHITE = b"\x1b]11;rgb:ffff/ffff/ffff\x1b\\"
DARK, LIGHT = (theme.background.removeprefix("#") for theme in THEMES[:2] if theme.background)
Start = Callable[..., Program]


def filtered(*pieces: str) -> tuple[str, list[Background | None]]:
    source = TerminalInput()
    events = [event for piece in pieces for event in source.feed(piece.encode())]
    return (
        "".join(event.text for event in events if isinstance(event, Keys)),
        [background_of(event.color) for event in events if isinstance(event, BackgroundReply)],
    )


@pytest.mark.parametrize("end", ["\x07", "\x1b\\"])
def test_a_reply_between_keys_is_taken_out(end: str) -> None:
    assert filtered(f"ab\x1b]11;rgb:ff/80/00{end}cd") == ("abcd", [Background(1, 128 / 255, 0)])


def test_a_reply_may_come_in_any_two_pieces() -> None:
    reply = WHITE.decode()
    for at in range(1, len(reply)):
        keys, found = filtered("a" + reply[:at], reply[at:] + "b")
        assert (keys, found) == ("ab", [Background(1, 1, 1)])


@pytest.mark.parametrize("keys", ["abc", "\x1b[A", "\x1b]12;x\x07", "\x1bO", "1]11;"])
def test_keys_pass_at_once(keys: str) -> None:
    assert filtered(keys) == (keys, [])


def test_half_a_reply_that_stays_half_becomes_keys() -> None:
    source = TerminalInput()
    assert list(source.feed(b"a\x1b]1")) == [Keys("a")]
    assert list(source.silent(0.05)) == []
    assert list(source.silent(0.2)) == [Keys("\x1b]1")]


def test_what_is_no_colour_is_no_background() -> None:
    assert background_of("?") is background_of("rgb:gg/00/00") is None
    assert background_of("rgba:0000/0000/0000/ffff") == Background(0, 0, 0)


@pytest.mark.parametrize(
    ("color", "is_light"),
    [
        ("rgb:ffff/ffff/ffff", True),
        ("rgb:fdfd/f6f6/e3e3", True),
        ("rgb:0000/2b2b/3636", False),
        ("rgb:0000/0000/ffff", False),
        ("rgb:1e/1e/1e", False),
    ],
)
def test_light_is_what_dark_text_reads_on(color: str, is_light: bool) -> None:
    found = background_of(color)
    assert found is not None
    assert found.is_light is is_light


@pytest.mark.parametrize(
    ("value", "is_light"),
    [("0;15", True), ("0;default;15", True), ("15;0", False), ("7;8", False), ("", False)],
)
def test_the_environment_may_name_the_background(value: str, is_light: bool) -> None:
    assert is_light_terminal({"COLORFGBG": value}) is is_light


@pytest.mark.parametrize(
    ("chosen", "theme"), [(None, "light"), ("dark", "dark"), ("high-contrast", "high-contrast")]
)
def test_a_chosen_theme_stays_whatever_the_terminal_says(
    tmp_path: Path, chosen: str | None, theme: str
) -> None:
    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        app.terminal_background(Background(1, 1, 1))
        await pilot.pause()
        assert app.theme == theme

    play(Stage(tmp_path, changes={"theme": chosen} if chosen else {}), what)


def test_a_theme_taken_by_key_stays_and_auto_brings_the_terminals_back(tmp_path: Path) -> None:
    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        assert app.theme == "light", "COLORFGBG says so"
        await pilot.press("f10")
        chosen = app.theme
        app.terminal_background(Background(0, 0, 0))
        await pilot.pause()
        assert app.theme == chosen
        app.chat.use_theme("auto")
        await until(pilot, lambda: app.theme == "dark")

    play(Stage(tmp_path, environ={"COLORFGBG": "0;15"}), what)


# ---------------------------------------------------------------------------- a real terminal


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    programs: list[Program] = []

    def begin(*args: str, **given: object) -> Program:
        programs.append(Program(tmp_path, args, **given))  # type: ignore[arg-type]
        return programs[-1]

    yield begin
    for each in programs:
        each.close()


def test_a_light_terminal_gets_the_light_theme(start: Start) -> None:
    program = start(background=WHITE)
    program.see("talking to the built-in guide")
    program.until(lambda: program.ground == LIGHT)
    program.type("hello")
    program.see("hello")
    assert "rgb" not in program.text and "]11" not in program.text


def test_a_terminal_that_is_silent_keeps_every_key(start: Start) -> None:
    program = start()
    program.see("talking to the built-in guide")
    program.type("hello")
    program.see("hello")
    assert program.ground == DARK
    assert program.raw.count(b"\x1b]11;?") == 1
    program.type(WHITE.decode() + " there")  # hours later, or from a slow link
    program.see("hello there")
    program.until(lambda: program.ground == LIGHT)


def test_a_chosen_theme_asks_nothing(start: Start) -> None:
    program = start("--theme", "dark", background=WHITE)
    program.see("talking to the built-in guide")
    assert b"\x1b]11" not in program.raw
    assert program.ground == DARK


def test_colorfgbg_counts_where_the_terminal_is_silent(start: Start) -> None:
    program = start(environ={"COLORFGBG": "0;15"})
    program.see("talking to the built-in guide")
    assert program.ground == LIGHT


def test_a_kind_of_terminal_that_would_print_the_question_is_not_asked(start: Start) -> None:
    program = start(environ={"TERM": "linux"})
    program.see("talking to the built-in guide")
    assert b"\x1b]11" not in program.raw
