"""Pastes and keys in the bytes of a terminal, and what the screen does with them."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from textual.pilot import Pilot
from textual.widgets import Input

from localchat.history.store import History
from localchat.tui.attachments import clean
from localchat.tui.screens.models import ModelScreen
from localchat.tui.textual_internals.terminal_input import (
    EscapeKey,
    Keys,
    PastedText,
    TerminalEvent,
    TerminalInput,
)
from tests.support.terminal_program import Program
from tests.support.tui_stage import Stage, app_of, play, until

START = b"\x1b[200~"
END = b"\x1b[201~"
COLORED = b"first \x1b[31mred\x1b[0m part\r\nsecond\x1b[A\r\x03third"
Begin = Callable[..., Program]


def events(*pieces: bytes, silent_s: float = 10.0) -> list[TerminalEvent]:
    """Return the events of bytes that come in these pieces, followed by silence."""
    source = TerminalInput()
    found = [event for piece in pieces for event in source.feed(piece)]
    found += source.silent(silent_s)
    merged: list[TerminalEvent] = []
    for event in found:
        if merged and isinstance(event, Keys) and isinstance(merged[-1], Keys):
            merged[-1] = Keys(merged[-1].text + event.text)
        else:
            merged.append(event)
    return merged


def test_a_paste_contains_its_escape_codes_wherever_it_is_cut() -> None:
    data = b"ab" + START + COLORED + END + b"\r"
    expected = [Keys("ab"), PastedText(COLORED.decode()), Keys("\r")]
    assert events(data) == expected
    for index in range(1, len(data)):
        assert events(data[:index], data[index:]) == expected, index
    assert events(*(data[index : index + 1] for index in range(len(data)))) == expected


@pytest.mark.parametrize(
    "content",
    [b"a" + END + b"\rrm\r", b"a" + START + b"b" + END + b"c", b"a" + END + b"b" + END + b"\r"],
)
def test_markers_inside_a_paste_do_not_end_it(content: bytes) -> None:
    text = content.replace(START, b"").replace(END, b"").decode()
    assert events(START + content + END) == [PastedText(text)]


def test_two_pastes_stay_two() -> None:
    data = START + b"a" + END + b"\r" + START + b"b" + END
    assert events(data) == [PastedText("a"), Keys("\r"), PastedText("b")]


def test_a_paste_without_an_end_is_delivered_and_its_late_part_is_pasted() -> None:
    source = TerminalInput()
    assert [*source.feed(START + b"a\rb"), *source.silent(0.5)] == []
    assert [*source.silent(5)] == [PastedText("a\rb")]
    assert [*source.feed(b"x")] == [Keys("x")]
    assert [*source.feed(b"late\r" * 30)] == []
    assert [*source.feed(b"end\r" + END), *source.silent(1)] == [
        PastedText("late\r" * 30 + "end\r")
    ]
    assert [*source.feed(b"\r")] == [Keys("\r")]


def test_a_short_late_part_with_its_marker_is_pasted() -> None:
    source = TerminalInput()
    assert [*source.feed(START + b"a"), *source.silent(5)] == [PastedText("a")]
    assert [*source.feed(b"b\r" + END), *source.silent(1)] == [PastedText("b\r")]


def test_invalid_bytes_are_replaced() -> None:
    assert events(b"caf\xe9 ") == [Keys("caf\ufffd ")]
    assert events(START + b"caf\xe9" + END) == [PastedText("caf\ufffd")]
    assert events(b"\xe4\xbd", b"\xa0\xff") == [Keys("\u4f60\ufffd")]


@pytest.mark.parametrize(
    "keys", ["\x1b[A\x1b[B", "\x1b\r", "\x1b1", "\x1bo", "\x1bOA", "\x1b[<0;1;1M"]
)
def test_sequences_of_keys_pass_unchanged(keys: str) -> None:
    assert events(keys.encode()) == [Keys(keys)]
    assert events(keys[:1].encode(), keys[1:].encode()) == [Keys(keys)]


@pytest.mark.parametrize("text", ["Summarise all of it, please", "Once upon a time", "Please"])
def test_a_text_right_after_the_escape_key_is_a_text(text: str) -> None:
    assert events(f"\x1b{text}".encode()) == [EscapeKey(), Keys(text)]
    assert events(b"\x1b", text.encode()) == [EscapeKey(), Keys(text)]
    assert events(b"\x1b") == [EscapeKey()]


def test_escape_codes_of_a_paste_are_shown() -> None:
    escape = "\N{SYMBOL FOR ESCAPE}"
    assert clean("\x1b[1mred\x1b[0m\r\nx\ry") == f"{escape}[1mred{escape}[0m\nx\ny"


def test_a_field_takes_all_lines_of_a_paste(tmp_path: Path) -> None:
    async def steps(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        app.push_screen(ModelScreen(app.session.context))
        await until(pilot, lambda: isinstance(app.screen.focused, Input))
        from textual.events import Paste

        await app.on_event(Paste("\nqw\x1ben\r\n2.5\n"))
        await until(pilot, lambda: app.screen.query_one("#filter", Input).value == "qw\u241ben 2.5")

    play(Stage(tmp_path), steps)


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    opened: list[Program] = []

    def start(**environ: str) -> Program:
        flags = ("-m", "guide", "--no-attach")
        opened.append(Program(tmp_path, flags, width=80, height=24, environ=environ))
        return opened[-1]

    yield start
    for program in opened:
        program.close()


def test_the_program_takes_any_bytes_of_a_terminal(begin: Begin, tmp_path: Path) -> None:
    program = begin()
    program.see("choose a model")
    program.send(START + b"first \x1b[31mred\x1b[0m\rcaf\xe9" + END)
    program.see("caf\ufffd")
    program.see("first \u241b[31mred\u241b[0m")
    program.type("\x03")
    program.send(START + b"\x1b[32mline\x1b[0m\r" * 4_000 + END)
    program.see("paste 1, 4,000 lines")
    program.type("\x11")
    assert program.end() == 0
    with History.open(tmp_path / "history.sqlite3") as history:
        assert history.last() is None


def test_a_crash_of_the_screen_has_an_exit_code(begin: Begin, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "from localchat.tui.textual_internals import terminal_input\n"
        "def broken(source, data):\n    raise RuntimeError('on purpose')\n"
        "terminal_input.TerminalInput.feed = broken\n"
    )
    program = begin(PYTHONPATH=os.pathsep.join([str(tmp_path), *sys.path]))
    # A report of the terminal may reach the broken reader before a key does.
    with suppress(AssertionError, OSError):
        program.see("choose a model")
        program.type("a")
    assert program.end() == 1
