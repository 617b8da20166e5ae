"""The real program on a terminal of its own, whose screen can be read."""

import fcntl
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pyte
from gguf import GGUFReader

PATIENCE_S = 120.0
PROGRAM = (sys.executable, "-m", "localchat")
_GUIDE = Path(__file__).parents[2] / "localchat/guide/guide.gguf"
NEVER_ENDING = json.dumps({str(token): -100 for token in range(7)})
"""A logit bias against what the guide ends an answer with."""


def endless() -> tuple[str, ...]:
    """Flags with which the guide talks until it is stopped, in one paragraph: lists of single words would
    leave the screen in a second."""
    reader = GGUFReader(_GUIDE)
    field = reader.fields["tokenizer.ggml.tokens"]
    names = [bytes(field.parts[at]).decode() for at in field.data]
    lines = {str(token): -100 for token, name in enumerate(names) if "Ċ" in name}
    return (
        *("-o", "temperature", "0.8", "-o", "repetition_penalty", "1.1"),
        *("-o", "logit_bias", json.dumps(json.loads(NEVER_ENDING) | lines)),
        *("--no-speculation", "--max-tokens", "3000"),
    )


_LIBRARY = {"LOCALCHAT_LLAMACPP_LIBRARY": "xllamacpp"} if find_spec("xllamacpp") else {}
"""What users have. A build of GCC's crashes once on a CPU with AMX, and a notice of that stands before the
first answer."""
_FRAMES = 2026
"""The mode of a terminal in which it shows nothing until it is left: a frame is drawn in it."""
_ASKS_FOR_FRAMES = b"\x1b[?%d$p" % _FRAMES
_HAS_FRAMES = b"\x1b[?%d;2$y" % _FRAMES
_ASKS_FOR_BACKGROUND = b"\x1b]11;?\x1b\\"
_AFTER_AN_ANSWER = re.compile(
    r"\n +(?:TTFT |interrupted|prefill |waiting for the model|loading the model|"
    r"warming up the model|[●▲✕■] )"
)
"""Its figures, how it ended, a notice, or the progress of the prompt before it."""
_COMPOSER = "\n ╭"
_HALF_WRITTEN_S = 1.0
_LOOK_BYTES = 1024

_OWN_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execvp(sys.argv[1], sys.argv[1:])
"""


class _Screen(pyte.Screen):
    """A terminal that shows frames whole: half of one is nothing that anybody saw. `on_frame` is called when
    one stands."""

    def __init__(self, width: int, height: int, on_frame: Callable[[], None]) -> None:
        super().__init__(width, height)
        self._shown, self._drawing = [""] * height, False
        self._text = "\n" * (height - 1)
        self._on_frame = on_frame

    @property
    def text(self) -> str:
        """Text of the screen. Only rows that changed are joined again: pyte takes 17 ms for all."""
        if self.dirty and not self._drawing:
            for row in self.dirty:
                line = self.buffer[row]
                cells = [line[column].data for column in range(self.columns)]
                self._shown[row] = "".join(cells).rstrip()
            self.dirty.clear()
            self._text = "\n".join(self._shown)
        return self._text

    def set_mode(self, *modes: int, private: bool = False, **given: Any) -> None:
        if private and _FRAMES in modes:
            self._text = self.text
            self._drawing = True
        super().set_mode(*modes, private=private, **given)

    def reset_mode(self, *modes: int, private: bool = False, **given: Any) -> None:
        super().reset_mode(*modes, private=private, **given)
        if private and _FRAMES in modes and self._drawing:
            self._drawing = False
            self._on_frame()


class Program:
    """`localchat` in a window of `width` by `height`. `raw`: every byte that it wrote. `background`: what the
    terminal replies where it is asked for its background; an empty one says nothing. `shell`: a command to run
    instead."""

    def __init__(
        self,
        data: Path,
        args: Sequence[str] = (),
        width: int = 100,
        height: int = 30,
        editor: str = "vi",
        background: bytes = b"",
        environ: Mapping[str, str] | None = None,
        shell: Sequence[str] = (),
    ) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
        self._screen = _Screen(width, height, self._look)
        self._stream = pyte.ByteStream(self._screen)
        self.raw = b""
        self._background = background
        self._watched, self._noting = "", False
        self._samples: list[tuple[float, str]] = []
        self.process = subprocess.Popen(
            [sys.executable, "-c", _OWN_TERMINAL, *(shell or (*PROGRAM, *args))],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            env={
                **os.environ,
                "TERM": "xterm-256color",
                "COLORTERM": "truecolor",
                "TERM_PROGRAM": "",  # Textual does not ask every program for frames
                "VISUAL": editor,
                "LOCALCHAT_DATA_DIR": str(data),
                "LOCALCHAT_CONFIG": str(data / "settings.toml"),
                **_LIBRARY,
                **(environ or {}),
            },
        )
        os.close(slave)

    def type(self, keys: str) -> None:
        """Press keys, as a terminal sends them."""
        os.write(self._master, keys.encode())

    def send(self, data: bytes) -> None:
        """Send bytes, and read meanwhile what the program writes."""
        while data:
            _, writable, _ = select.select([], [self._master], [], 0.05)
            if writable:
                data = data[os.write(self._master, data[:1024]) :]
            self._read(0)

    def ask(self, text: str) -> None:
        """Write a question and send it. The keys come apart from each other, as a person's do."""
        self.type(text)
        self.until(lambda: text[-12:] in self.text)
        self.type("\r")

    def watch(self, after: str) -> None:
        """From now on note when letters of the answer to the question `after` are first seen: see `lost`."""
        self._watched, self._samples, self._noting = after, [], True

    def look_away(self) -> None:
        """Stop recording output."""
        self._noting = False

    @property
    def answer(self) -> str:
        """The letters of the answer that is watched, as they stand on the screen."""
        _, asked, below = self.text.rpartition(f"▌ {self._watched}")
        shown = _AFTER_AN_ANSWER.split(below.rpartition(_COMPOSER)[0])[0]
        return letters(shown) if asked else ""

    @property
    def composer(self) -> str:
        """Text of the composer, and the status line below it."""
        return self.text.rpartition(_COMPOSER)[2]

    @property
    def room(self) -> int:
        """Empty rows below what has been said: with none left, the question goes out of view."""
        rows = self.text.rpartition(_COMPOSER)[0].split("\n")[:-1]
        return next((n for n, row in enumerate(reversed(rows)) if row), len(rows))

    def lost(self, stored: str, *, killed: bool = False) -> tuple[float, int]:
        """How long before the last look the first letter was seen that is not `stored`, in seconds (0: all of
        them are), and how many letters are missing. Fails where the two are not the same text. A look at
        Markdown that is half written is passed over, and that of a `killed` screen stays so."""
        kept = letters(stored)
        last_s, last = self._samples[-1]
        seen = [one for one in self._samples if one[1] and _agree(one[1], kept)]
        late = not seen or (not killed and last_s - seen[-1][0] > _HALF_WRITTEN_S)
        assert not late, f"{last!r} is on the screen, and kept is {kept!r}"
        first_s = next((moment for moment, text in seen if len(text) > len(kept)), last_s)
        longest = max(len(text) for _, text in seen)
        return last_s - first_s, max(0, longest - len(kept))

    @property
    def text(self) -> str:
        """Current text of the screen."""
        return self._screen.text

    @property
    def ground(self) -> str:
        """The background of the first cell that the program fills, as six digits."""
        return str(self._screen.buffer[1][1].bg)

    @property
    def modes(self) -> tuple[int, ...]:
        """How the terminal takes keys and gives letters out: raw, with echo."""
        *flags, _, _, _ = termios.tcgetattr(self._master)
        return tuple(flags)

    def until(self, true: Callable[[], object]) -> None:
        """Read until something is true of the screen."""
        end = time.monotonic() + PATIENCE_S
        while not true():
            assert time.monotonic() < end, f"it did not come; on the screen:\n{self.text}"
            assert self.process.poll() is None, (
                f"it has ended; its last words: {self.raw[-2000:]!r}"
            )
            self._read(0.05)

    def see(self, words: str) -> None:
        """Read until these words stand on the screen."""
        self.until(lambda: words in self.text)

    def rest(self, seconds: float) -> None:
        """Read for a while."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._read(0.02)

    def end(self) -> int:
        """Read until it has ended; its exit code."""
        end = time.monotonic() + PATIENCE_S
        while self.process.poll() is None:
            assert time.monotonic() < end, f"it does not end; on the screen:\n{self.text}"
            self._read(0.05)
        return self.process.returncode

    @property
    def engine(self) -> psutil.Process:
        """The process that holds the model."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return next(one for one in children if "localchat.core" in " ".join(one.cmdline()))

    def hang_up(self) -> None:
        """Close the terminal."""
        os.close(self._master)
        self._master = -1

    def close(self) -> None:
        """Take everything down."""
        with suppress(psutil.NoSuchProcess, StopIteration):
            self.engine.kill()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        if self._master >= 0:
            os.close(self._master)

    def _read(self, patience_s: float) -> None:
        ready, _, _ = select.select([self._master], [], [], patience_s)
        if not ready:
            return
        with suppress(OSError):  # the program has closed its side
            # A little at a time: what comes and goes is seen also by who was held up and reads it late.
            data = os.read(self._master, _LOOK_BYTES)
            asked = (self.raw[1 - len(_ASKS_FOR_FRAMES) :] + data).count(_ASKS_FOR_FRAMES)
            os.write(self._master, _HAS_FRAMES * asked)
            seen = self.raw[1 - len(_ASKS_FOR_BACKGROUND) :] + data
            os.write(self._master, self._background * seen.count(_ASKS_FOR_BACKGROUND))
            self.raw += data
            self._stream.feed(data)

    def _look(self) -> None:
        if self._noting:
            self._samples.append((time.monotonic(), self.answer))


def _agree(one: str, other: str) -> bool:
    return one.startswith(other) or other.startswith(one)


def letters(text: str) -> str:
    """Letters and digits alone: what Markdown and the edge of the screen leave as it is."""
    return "".join(each for each in text if each.isalnum())
