"""Runs the terminal UI and returns its exit code.

Imports no Textual at the top: `can_show` is asked first, and Textual reads the environment when it is imported.
"""

import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from localchat.errors import ExitCode, LocalchatError

if TYPE_CHECKING:
    from localchat.chat.conversation import Conversation
    from localchat.session.context import ModelSetup, SessionContext
    from localchat.tools.tool import Effect


def can_show(environ: Mapping[str, str]) -> bool:
    """Whether stdin, stdout and stderr are a terminal that can show a screen. Textual draws on stderr."""
    if environ.get("TERM", "") in ("", "dumb", "unknown"):
        return False
    streams = (sys.stdin, sys.stdout, sys.stderr)
    return all(stream is not None and stream.isatty() for stream in streams)


def launch(
    context: "SessionContext",
    setup: "ModelSetup",
    conversation: "Conversation",
    allowed: "frozenset[Effect]" = frozenset(),
) -> int:
    """Show the chat until the user leaves, and return the exit code.

    `allowed`: effects of tools that need no question. Raises LocalchatError if the last messages could not be
    saved.
    """
    from localchat.session.engine_holder import EngineHolder

    engines = EngineHolder()
    _prepare(setup.settings.reduced_motion)
    from localchat.tui.app import EXIT_SIGNALS, ChatApp
    from localchat.tui.textual_internals.background import asks_background
    from localchat.tui.textual_internals.driver import hangup_safe
    from localchat.tui.textual_internals.terminal_input import reads_pastes
    from localchat.tui.themes import AUTO

    app = ChatApp(context, setup, engines, conversation)
    app.session.tools.allowed = allowed
    app.driver_class = hangup_safe(reads_pastes(app.driver_class, app.terminal_background))
    if setup.settings.theme == AUTO:
        term = context.environ.get("TERM", "")
        app.driver_class = asks_background(app.driver_class, term)
    problem: LocalchatError | None = None
    received: list[int] = []
    try:
        with _signals_handled(EXIT_SIGNALS, app.leave, received):
            status = app.run()
    finally:
        try:
            app.recorder.close()
        except LocalchatError as error:
            problem = error
        engines.close()
    if problem is not None:
        raise problem
    if signal.SIGINT in received:
        return ExitCode.INTERRUPTED
    return status or app.return_code or 0


@contextmanager
def _signals_handled(
    exit_signals: tuple[signal.Signals, ...], leave: Callable[[], None], received: list[int]
) -> Iterator[None]:
    """Leave on signals before the first frame, and restore all handlers at the end.

    Until the first frame, ending the program would leave the terminal in the mode of the screen. Ctrl+C is a
    signal until then, too. Textual keeps its handlers of SIGTSTP and SIGCONT, which would show an empty
    screen again while the last messages are saved. `received` gets the signals.
    """

    def end(number: int, frame: object) -> None:
        received.append(number)
        leave()

    before = {
        number: signal.getsignal(number)
        for number in (*exit_signals, signal.SIGINT, signal.SIGTSTP, signal.SIGCONT)
    }
    for number in (*exit_signals, signal.SIGINT):
        # A handler that was set, or a signal that is ignored (nohup), stays as it is.
        if before[number] in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _prepare(reduced_motion: bool) -> None:
    """Set what Textual reads when it is imported. 120 frames a second halve the time from key to screen,
    compared with its default of 60."""
    os.environ.setdefault("TEXTUAL_FPS", "120")
    if reduced_motion:
        os.environ["TEXTUAL_ANIMATIONS"] = "none"
    from localchat.tui.textual_internals.driver import add_alt_keys

    add_alt_keys()
