"""A Ctrl+C that finds the main thread in no wait of its own kind is heard all the same.

A signal that another thread takes interrupts no system call of the main one, exactly as one that comes just
before the call: so the tests need no luck."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from localchat.cli.signals import calling, deferred, interruptible
from tests.support.terminal_screen import Screen

_RESCUE_S = 60.0
"""After which a wait that nothing ends is ended, so that the test fails instead of hanging."""


class Wait:
    """Something that the main thread waits for and that never comes."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._reader, self._writer = os.pipe()
        self._program = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        self.rescued = False
        self._rescue = threading.Timer(_RESCUE_S, self._save)
        self._rescue.daemon = True
        self._rescue.start()

    def event(self) -> None:
        self._over.wait()

    def pipe(self) -> None:
        os.read(self._reader, 1)

    def program(self) -> None:
        self._program.wait()

    def _save(self) -> None:
        self.rescued = True
        self.end()

    def end(self) -> None:
        self._over.set()
        os.write(self._writer, b"x")
        self._program.kill()

    def close(self) -> None:
        self._rescue.cancel()
        self.end()
        self._program.communicate()
        os.close(self._reader)
        os.close(self._writer)


@pytest.fixture
def wait() -> Iterator[Wait]:
    one = Wait()
    yield one
    one.close()


def _hears(wait: Wait, act: Callable[[], object]) -> bool:
    """Whether Ctrl+C ended what `act` waits for."""
    try:
        with interruptible():
            act()
    except KeyboardInterrupt:
        return not wait.rescued
    return False


def _interrupted_elsewhere() -> None:
    """Ctrl+C, taken by a thread that does nothing else."""
    late = threading.Timer(0.05, lambda: signal.pthread_kill(threading.get_ident(), signal.SIGINT))
    late.start()


@pytest.mark.parametrize("kind", ["event", "pipe", "program"])
def test_ctrl_c_ends_a_wait_that_the_signal_did_not_interrupt(wait: Wait, kind: str) -> None:
    def act() -> None:
        _interrupted_elsewhere()
        getattr(wait, kind)()

    assert _hears(wait, act)


def test_ctrl_c_that_a_finalizer_swallows_is_heard_after_it(
    wait: Wait, capfd: pytest.CaptureFixture[str]
) -> None:
    class Finalized:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    def act() -> None:
        Finalized()
        wait.event()

    assert _hears(wait, act)
    assert capfd.readouterr().err == ""


def test_other_errors_of_finalizers_are_told_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda what: told.append(what.exc_type))

    class Broken:
        def __del__(self) -> None:
            raise ValueError

    with interruptible():
        Broken()
    assert told == [ValueError]


def test_everything_is_left_as_it_was_found() -> None:
    def found() -> tuple[Any, ...]:
        descriptor = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(descriptor)
        hook = sys.unraisablehook
        return signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGURG), descriptor, hook

    before = found()
    with interruptible():
        assert found() != before
    assert found() == before
    assert "interrupts" not in [thread.name for thread in threading.enumerate()]


def test_the_first_ctrl_c_calls_the_function_and_the_second_is_raised() -> None:
    calls: list[str] = []
    with interruptible():
        with calling(lambda: calls.append("first")):
            signal.raise_signal(signal.SIGINT)
            assert calls == ["first"]
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        assert calls == ["first"]


def test_a_deferred_ctrl_c_calls_the_function() -> None:
    calls: list[str] = []
    with interruptible(), deferred():
        signal.raise_signal(signal.SIGINT)
        assert calls == []
        with calling(lambda: calls.append("deferred")):
            assert calls == ["deferred"]


def test_an_ignored_ctrl_c_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interruptible():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_another_thread_hears_nothing_and_does_no_harm() -> None:
    went: list[bool] = []

    def run() -> None:
        with interruptible():
            went.append(True)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert went == [True]


_AT_THE_PROMPT = """
import signal, sys, threading
from localchat.cli.signals import interruptible
from localchat.cli.chat.line_input import TerminalKeyboard
from localchat.cli.streams import Terminal
late = lambda: signal.pthread_kill(threading.get_ident(), signal.SIGINT)
try:
    with interruptible():
        threading.Timer(0.2, late).start()
        TerminalKeyboard(Terminal({})).read()
except KeyboardInterrupt:
    print("heard")
"""


@pytest.mark.parametrize("editing", ["", "sys.modules['readline'] = None\n"])
def test_the_prompt_of_a_conversation_hears_it(
    on_terminal: Callable[..., Screen], editing: str
) -> None:
    page = on_terminal("-c", "import sys\n" + editing + _AT_THE_PROMPT)
    page.wait_for("> ")
    page.wait_for("heard")
    assert page.finish()[0] == 0


def test_while_the_program_loads_ctrl_c_ends_it_without_a_traceback() -> None:
    """Held where the command line is imported, by a module that stands in for a part of it."""
    code = (
        "import sys, os, signal\n"
        "class Held:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'localchat.cli.main':\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Held())\n"
        "from localchat.cli import main\n"
        "main(['--version'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")
