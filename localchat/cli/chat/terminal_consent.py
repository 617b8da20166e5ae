"""Ask on the terminal whether a tool call may run. A pipe never answers."""

import asyncio
import os
import sys
import termios
from contextlib import suppress
from typing import Final

from localchat.cli.streams import Terminal
from localchat.sanitize import sanitize_line
from localchat.tools.consent import EFFECTS, Decision
from localchat.tools.tool import Plan, Tool

_ANSWERS: Final[dict[str, Decision]] = {
    **dict.fromkeys(("y", "yes", "once"), "once"),
    **dict.fromkeys(("s", "session"), "session"),
    **dict.fromkeys(("n", "no", ""), "no"),
    "never": "never",
}


class TerminalConsent:
    """Reads each decision from the terminal of this process, even if stdin is a pipe."""

    def __init__(self, terminal: Terminal, handle: int) -> None:
        """`handle`: descriptor of the terminal."""
        self._terminal = terminal
        self._handle = handle
        self._turn = asyncio.Lock()

    async def ask(self, tool: Tool, plan: Plan) -> Decision:
        """Print the call, and read lines until one is a decision."""
        async with self._turn:
            write = self._terminal.print_line
            write(f"{sanitize_line(tool.name)}: may {EFFECTS[tool.effect]}")
            # A bar marks each line, so that no text of the model looks like a question of ours.
            for line in (plan.preview or plan.title).split("\n"):
                write(f"  │ {sanitize_line(line)}")
            choices = f"y = yes, s = {sanitize_line(plan.scope_text)}, n = no, never"
            # Text that was typed before the question is no answer to it.
            with suppress(termios.error):
                termios.tcflush(self._handle, termios.TCIFLUSH)
            while True:
                self._terminal.prompt(f"  Allow? ({choices}) ")
                decision = _ANSWERS.get((await self._line()).strip().lower())
                if decision is not None:
                    return decision

    async def _line(self) -> str:
        """Return the next line, empty at the end of the input. A cancellation leaves the line unread."""
        loop = asyncio.get_running_loop()
        readable = loop.create_future()

        def note() -> None:
            if not readable.done():
                readable.set_result(None)

        line = ""
        try:
            loop.add_reader(self._handle, note)
            await readable
            line = os.read(self._handle, 4096).decode("utf-8", "replace")
        except OSError:
            pass  # the terminal is gone
        finally:
            loop.remove_reader(self._handle)
            if not line:
                # Ctrl+C and Ctrl+D leave the cursor behind the question.
                self._terminal.print_line("")
        return line

    def close(self) -> None:
        """Close the terminal."""
        os.close(self._handle)


def open_consent(terminal: Terminal) -> TerminalConsent | None:
    """Return the consent of this process's terminal. None: stderr is not a terminal."""
    if not terminal.stderr_is_terminal:
        return None
    try:
        # Event loops of macOS cannot wait for /dev/tty, only for the device itself.
        handle = os.open(os.ttyname(sys.stderr.fileno()), os.O_RDWR | os.O_NOCTTY)
        return TerminalConsent(terminal, handle)
    except OSError:
        return None
