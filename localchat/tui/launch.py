"""From the command line to the screen and back. Importing this loads no textual: whether a terminal can show
the screen at all is asked first."""

import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from localchat.errors import ExitCode, LocalchatError

if TYPE_CHECKING:
    from localchat.chat.conversation import Conversation
    from localchat.session.context import ModelSetup, SessionContext

EXIT_SIGNALS: Final = (signal.SIGTERM, signal.SIGHUP)


def can_show(environ: Mapping[str, str]) -> bool:
    """Whether stdin, stdout and stderr, on which Textual draws, are a terminal that can draw."""
    if environ.get("TERM", "") in ("", "dumb", "unknown"):
        return False
    streams = (sys.stdin, sys.stdout, sys.stderr)
    return all(stream is not None and stream.isatty() for stream in streams)


def launch(context: "SessionContext", setup: "ModelSetup", conversation: "Conversation") -> int:
    """Open the screen on a conversation that is new or goes on; returns the exit code when the person leaves.
    Raises LocalchatError where what was said last could not be kept."""
    from localchat.session.engine_holder import EngineHolder

    engines = EngineHolder()
    _prepare(setup.settings.reduced_motion)
    from localchat.tui.app import ChatApp
    from localchat.tui.textual_internals.driver import hangup_safe

    app = ChatApp(context, setup, engines, conversation)
    app.driver_class = hangup_safe(app.driver_class)
    problem: LocalchatError | None = None
    came: list[int] = []
    try:
        with _own_signals(app.leave, came):
            status = app.run()
    finally:
        try:
            app.recorder.close()
        except LocalchatError as error:
            problem = error
        engines.close()
    if problem is not None:
        raise problem
    return ExitCode.INTERRUPTED if signal.SIGINT in came else status or app.return_code or 0


@contextmanager
def _own_signals(leave: Callable[[], None], came: list[int]) -> Iterator[None]:
    """Textual leaves its handlers of Ctrl+Z and of going on after it behind. While the last words are written,
    they would open the screen once more, without anything on it. And a signal that ends the program waits until
    the screen stands, which takes it from there: in between the terminal would stay as it was made for the
    screen. So does Ctrl+C, which is a signal until the screen has the terminal. `came`: which of these did."""

    def end(number: int, frame: object) -> None:
        came.append(number)
        leave()

    before = {
        number: signal.getsignal(number)
        for number in (*EXIT_SIGNALS, signal.SIGINT, signal.SIGTSTP, signal.SIGCONT)
    }
    for number in (*EXIT_SIGNALS, signal.SIGINT):
        if before[number] in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _prepare(reduced_motion: bool) -> None:
    """What Textual reads from the environment when it is imported. 120 frames a second halve the time from
    key to screen, against the 60 it takes by itself."""
    os.environ.setdefault("TEXTUAL_FPS", "120")
    if reduced_motion:
        os.environ["TEXTUAL_ANIMATIONS"] = "none"
    _add_alt_keys()


def _add_alt_keys() -> None:
    """What Alt sends in most terminals: Escape, then the key. Textual would read Enter (and send the message),
    or the sign that a Mac makes of it."""
    from enum import Enum

    from textual import _ansi_sequences

    sent = {"\r": "enter", "o": "o"} | {digit: digit for digit in "12345"}
    alt = Enum("alt", {f"alt_{name}": f"alt+{name}" for name in sent.values()})  # type: ignore[misc]
    table = _ansi_sequences.ANSI_SEQUENCES_KEYS
    for key, name in sent.items():
        table[f"\x1b{key}"] = (alt[f"alt_{name}"],)  # type: ignore[index]
