"""Fixtures of the command line: a call in this process, and a program on a terminal of its own."""

import io
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from localchat.cli.main import run
from tests.support.cli_program import Item, ScriptedApp
from tests.support.ram_bandwidth import put_bandwidth
from tests.support.terminal_screen import Call, Outcome, Screen

RATE = 20e9
"""Bytes per second that the RAM delivers."""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A file that stands for a model; the scripted engines never read it."""
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"GGUF")
    return path


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], model: Path) -> Call:
    """Run the command on a script. `stdin`: bytes that are piped in. The model is named by the
    environment unless `named` is false. The RAM reads RATE, which no test measures."""
    put_bandwidth(monkeypatch, RATE)

    def called(
        app: ScriptedApp | Sequence[Item],
        *args: str | Path,
        stdin: bytes = b"",
        named: bool = True,
    ) -> Outcome:
        if named:
            monkeypatch.setenv("LOCALCHAT_MODEL", str(model))
        used = app if isinstance(app, ScriptedApp) else ScriptedApp(app)
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        code = run([str(arg) for arg in args], used.app)
        return Outcome(code, *capfd.readouterr())

    return called


@pytest.fixture
def on_terminal() -> Iterator[Callable[..., Screen]]:
    """Start Python with these arguments, on a terminal."""
    opened: list[Screen] = []

    def start(*args: str, stdin: bytes | None = None, term: str = "xterm") -> Screen:
        opened.append(Screen(args, stdin=stdin, term=term))
        return opened[-1]

    yield start
    for one in opened:
        one.close()


@pytest.fixture
def screen(
    model: Path, monkeypatch: pytest.MonkeyPatch, on_terminal: Callable[..., Screen]
) -> Callable[..., Screen]:
    """Start `localchat` on a scenario of tests.support.cli_program, on a terminal."""
    monkeypatch.setenv("LOCALCHAT_MODEL", str(model))

    def start(scenario: str, *args: str, stdin: bytes | None = None, term: str = "xterm") -> Screen:
        return on_terminal(
            "-m", "tests.support.cli_program", scenario, *args, stdin=stdin, term=term
        )

    return start
