"""The driver of the terminal where it closes, and where the program was stopped and goes on."""

import os
import pty
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from localchat.tui.textual_internals.driver import alert, hangup_safe


class Recorder:
    """Stands in for Textual's driver: notes what it is told to do."""

    def __init__(self, fileno: int) -> None:
        self.fileno = fileno
        self.calls: list[str] = []
        self._auto_restart = True
        self._must_signal_resume = False
        self._writer_thread: object = None

    def start_application_mode(self) -> None:
        self.calls.append("start")
        self._writer_thread = "a thread"

    def suspend_application_mode(self) -> None:
        self.calls.append("suspend")

    def _sigcont_application(self, *received: object) -> None:
        self.start_application_mode()


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    """Both ends of a terminal: the one that shows it, and the program's."""
    ends = pty.openpty()
    yield ends
    for end in ends:
        try:
            os.close(end)
        except OSError:
            assert end == ends[0]  # closed by the test


def driver(fileno: int) -> Recorder:
    made = hangup_safe(Recorder)(fileno)  # type: ignore[arg-type]
    assert isinstance(made, Recorder)
    made.start_application_mode()
    return made


def test_a_terminal_that_closes_starts_no_threads_again(terminal: tuple[int, int]) -> None:
    """The kernel sends SIGHUP and SIGCONT: a second thread that reads keys would hide the first."""
    shown, ours = terminal
    one = driver(ours)
    os.close(shown)
    one._sigcont_application()
    assert one.calls == ["start"]


def test_a_program_that_was_stopped_from_outside_ends_its_threads_first(
    terminal: tuple[int, int],
) -> None:
    one = driver(terminal[1])
    one._sigcont_application()
    assert one.calls == ["start", "suspend", "start"]


def test_a_program_that_suspended_itself_only_resumes(terminal: tuple[int, int]) -> None:
    one = driver(terminal[1])
    one._must_signal_resume = True
    one._sigcont_application()
    assert one.calls == ["start", "start"]


def test_a_program_that_lent_its_terminal_to_an_editor_leaves_it_alone(
    terminal: tuple[int, int],
) -> None:
    one = driver(terminal[1])
    one._auto_restart = False
    one._sigcont_application()
    assert "suspend" not in one.calls


def test_an_alert_is_a_bell_and_a_notification() -> None:
    sent: list[str] = []
    driver = SimpleNamespace(write=sent.append)
    app: Any = SimpleNamespace(_driver=driver, bell=lambda: sent.append("\a"))
    alert(app, "it is\x1b done")
    assert sent == ["\a", "\x1b]9;it is\N{SYMBOL FOR ESCAPE} done\x1b\\"]
