"""Bytes that reach a real terminal: a program in a pseudo-terminal shows hostile texts."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time

import pyte

_PROGRAM = """
import sys
from textual.app import App
from localchat.session.blocks import *
from localchat.tui.transcript.widget import Transcript

NASTY = {nasty!r}

class Nasty(App):
    def compose(self):
        yield Transcript()
    def on_mount(self):
        view = self.query_one(Transcript)
        view.show([
            UserBlock("u", NASTY, (Fold(NASTY, 0, 2),)),
            ToolCallBlock("t", NASTY, NASTY),
            NoticeBlock("n", NASTY, "error", (Offer(NASTY, "x"),)),
            ReasoningBlock("r", NASTY), SummaryBlock("s", NASTY, 1, 1),
            AnswerBlock("a", "| " + NASTY + " |\\n|---|\\n| `" + NASTY + "` |\\n\\n```" + NASTY, footer=NASTY),
        ])
        for id_ in "urst":
            view.open_fold(id_)
        view.put(AnswerBlock("w", ""))
        for character in NASTY:
            view.append_text("w", character)
        view.append_text("w", " the-end")
        view.finish("w")
        self.set_timer(0.3, lambda: self.exit())

Nasty().run()
"""
_NASTY = "".join(
    [
        *("\x1b]0;pwned\x07", "\x1b]2;pwned\x1b\\", "\x1b]52;c;cHduZWQ=\x07"),
        *("\x1b[2J", "\x1b[31m", "\x1b[?1049l", "\x9b2J", "\x9d0;pwned\x9c", "\x90q\x9c"),
        *("a\x00b\x08c\x0bd\x0ce\x7ff\x0eg\x0f", "&#27;]0;pwned&#7; &#x9b;2J"),
        *("[a](https://x.org/\x1b]0;pwned\x07) <https://x.org/\x9b2J> https://y.org/\x1b]0;z\x07",),
        *("[/x] [@click=app.exit]x[/] [red]", "\u202e\u2066\u2028"),
    ]
)


def run(nasty: str) -> bytes:
    """All bytes that the program wrote on its terminal of 80x50."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 80, 0, 0))
    program = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM.format(nasty=nasty)],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=os.environ | {"TERM": "xterm-256color", "COLORTERM": "truecolor"},
    )
    os.close(slave)
    written = b""
    deadline = time.monotonic() + 90
    try:
        while time.monotonic() < deadline:
            if not select.select([master], [], [], 0.2)[0]:
                if program.poll() is not None:
                    break
                continue
            try:
                chunk = os.read(master, 65_536)
            except OSError:  # Linux says so when the last writer is gone
                break
            written += chunk
    finally:
        program.kill()
        program.wait()
        os.close(master)
    return written


def test_nothing_of_a_hostile_text_is_obeyed() -> None:
    written = run(_NASTY)
    screen = pyte.Screen(80, 50)
    stream = pyte.Stream(screen)
    text = written.decode("utf-8")
    assert "the-end" in text
    operating = re.findall(r"\x1b\]([^\x07\x1b]*)", text)
    # links, and the shape of the pointer that Textual gives back at its end
    assert all(command.startswith("8;") or command == "22;default" for command in operating)
    assert not [link for link in operating if not link.isascii() or not link.isprintable()]
    assert not re.search(r"[\x80-\x9f\x00-\x06\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f]", text)
    shown = text.split("\x1b[?1049l")[0]
    assert text.count("\x1b[?1049l") == 1  # only the program itself leaves the screen
    stream.feed(re.sub(r"\x1b\[[<>=?][0-9;]*[a-zA-Z]|\x1b\[\?[0-9;]*\$p", "", shown))
    assert "the-end" in "\n".join(screen.display)
