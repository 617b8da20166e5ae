"""Copies text to the clipboard of the user's terminal, also over ssh and inside tmux, and reads pictures.

The terminal does not answer, so success cannot be known. Pictures come from the clipboard tool of the desktop.
"""

import base64
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple

from localchat.engine.attachments import make_attachment
from localchat.engine.request import Attachment
from localchat.errors import UsageError
from localchat.session.blocks import AnswerBlock, UserBlock
from localchat.units import counted

if TYPE_CHECKING:
    from localchat.tui.transcript.widget import Transcript

_TMUX: Final = ("tmux", "load-buffer", "-w", "-")
_TIMEOUT_S: Final = 2.0


def osc_52(text: str) -> str:
    """Return the escape sequence that puts `text` into the terminal's clipboard."""
    encoded = base64.b64encode(text.encode("utf-8", "replace")).decode("ascii")
    return f"\x1b]52;c;{encoded}\x1b\\"


def send(text: str, write: Callable[[str], None], environment: Mapping[str, str]) -> None:
    """Copy `text` through tmux if it runs, otherwise through `write`. Blocks for at most 2 s.

    By default tmux drops OSC 52 from programs, but copies its own buffer to the outer terminal.
    """
    if environment.get("TMUX") and _output(_TMUX, text.encode("utf-8", "replace")) is not None:
        return
    write(osc_52(text))


_PICTURE_TOOLS: Final = (
    ("WAYLAND_DISPLAY", ("wl-paste", "--no-newline", "--type", "image/png")),
    ("DISPLAY", ("xclip", "-selection", "clipboard", "-target", "image/png", "-out")),
    ("", ("pngpaste", "-")),
)
"""Commands that print the picture of the clipboard, and the variable that each needs."""
_APPLE_SCRIPT: Final = (
    "osascript",
    "-e",
    "try",
    "-e",
    "the clipboard as «class PNGf»",
    "-e",
    "end try",
)
"""macOS without pngpaste: prints «data PNGf89504E47...»."""


def clipboard_picture(environment: Mapping[str, str] = os.environ) -> Attachment | None:
    """Return the picture of the clipboard. None without one, or without a tool that reads it.

    Blocks for at most 2 s a tool. Raises UsageError for a picture that is too large.
    """
    commands = [
        command
        for variable, command in _PICTURE_TOOLS
        if environment.get(variable) or (not variable and sys.platform == "darwin")
    ]
    for command in commands:
        if data := _output(command):
            return make_attachment(data, "clipboard.png")
    if sys.platform == "darwin":
        output = _output(_APPLE_SCRIPT) or b""
        digits = output.partition(b"PNGf")[2].partition("»".encode())[0]
        with suppress(ValueError):
            if data := bytes.fromhex(digits.decode("ascii", "replace")):
                return make_attachment(data, "clipboard.png")
    return None


def _output(command: Sequence[str], data: bytes = b"") -> bytes | None:
    """Return what a clipboard tool prints for this input. None if it fails or is not installed."""
    try:
        done = subprocess.run(
            command,
            input=data,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode != 0:
        return None
    return done.stdout


class CopiedText(NamedTuple):
    """A text to copy and its name for the user."""

    text: str
    what: str


def chosen_text(transcript: "Transcript", argument: str) -> CopiedText:
    """Return what `/copy` copies: the last answer, the last N messages, `code` or `code N`.

    Raises UsageError for any other argument.
    """
    messages = [block for block in transcript.blocks if isinstance(block, AnswerBlock | UserBlock)]
    answers = [block for block in messages if isinstance(block, AnswerBlock)]
    kind, _, number = argument.partition(" ")
    if kind == "code":
        for answer in reversed(answers):
            if blocks := transcript.code_blocks(answer.id):
                return _code_block(blocks, number.strip())
        raise UsageError("/copy code: no answer has a code block yet")
    if not argument:
        last_answer = ""
        if answers:
            last_answer = answers[-1].text
        return CopiedText(last_answer, "last answer")
    if argument.isdecimal() and int(argument):
        texts = [block.text for block in messages[-int(argument) :]]
        return CopiedText("\n\n".join(texts), f"last {counted(len(texts), 'message')}")
    raise UsageError(f"/copy {argument}: expected a number of messages, code, or code N")


def _code_block(blocks: Sequence[str], number: str) -> CopiedText:
    """Return a code block by the number above it, by default the last one."""
    if number and not (number.isdecimal() and 1 <= int(number) <= len(blocks)):
        raise UsageError(
            f"/copy code {number}: the last answer with code has blocks 1 to {len(blocks)}",
            hint="the number is above each block",
        )
    index = len(blocks)
    if number:
        index = int(number)
    return CopiedText(blocks[index - 1], f"code {index} of {len(blocks)}")
