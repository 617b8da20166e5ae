"""Context managers for Ctrl+C: none is lost, and none interrupts at a wrong place.

Python runs the handler of a signal between two instructions of the main thread. A signal that arrives after the
last check and before a wait (for an event, a key, a program) is handled when that wait ends, perhaps never;
measured at the prompt of a conversation: every third Ctrl+C that came as quickly as the prompt. And one that is
raised in a finalizer, or in a callback of the garbage collector or of imports, is printed there and dropped.

So in `interruptible` a thread learns of each signal from the wakeup descriptor and sends the main thread a
signal that does nothing, a few times: it ends the system call that the main thread waits in, and Python checks
again. A dropped interrupt is sent once more.

`deferred`, `immediate` and `calling` choose where Ctrl+C takes effect; `terminate_gracefully` makes SIGTERM and
SIGHUP do the same.
"""

import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from types import FrameType

_NUDGE: Final = signal.SIGURG
"""Ignored by programs that do not ask for it, and sent by nobody but sockets with urgent data."""
_ENDS: Final = (signal.SIGTERM, signal.SIGHUP)
_AGAIN: Final = b"\0"
"""In the pipe, among the numbers of signals: an interrupt was dropped."""
_FIRST_S: Final = 0.01
_LAST_S: Final = 60.0
"""The intervals between nudges double up to this, because the system may delay the process."""


@contextmanager
def interruptible() -> Iterator[None]:
    """Lose no Ctrl+C until the block ends. Does nothing outside the main thread, or if SIGINT is ignored or
    has another handler."""
    before = signal.getsignal(signal.SIGINT)
    ours = before in (signal.SIG_DFL, signal.default_int_handler)
    if not ours or threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    watcher = threading.Thread(
        target=_watch, args=(reader, threading.get_ident()), name="interrupts", daemon=True
    )
    printed = sys.unraisablehook

    def dropped(what: "sys.UnraisableHookArgs") -> None:
        if what.exc_type is not KeyboardInterrupt:
            printed(what)
            return
        with suppress(OSError):  # the pipe is full: the thread wakes up anyway
            os.write(writer, _AGAIN)

    nudged = signal.signal(_NUDGE, _do_nothing)
    woken = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    sys.unraisablehook = dropped
    watcher.start()
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        sys.unraisablehook = printed
        signal.set_wakeup_fd(woken)
        os.close(writer)
        watcher.join()
        signal.signal(_NUDGE, nudged)
        os.close(reader)


@contextmanager
def deferred() -> Iterator[None]:
    """Postpone Ctrl+C until the block ends or `immediate` or `calling` is entered.

    A second one is raised at once: something hangs. Does nothing outside the main thread."""
    note = _Deferred()
    with _handled_by(note) as before:
        yield
    if note.came and before is not None:
        signal.raise_signal(signal.SIGINT)


@contextmanager
def terminate_gracefully() -> Iterator[None]:
    """Let SIGTERM and SIGHUP act as Ctrl+C, so that the answer is saved.

    The process then ends by the signal. For the main thread. A signal that is ignored or has another handler
    stays as it is."""
    came: list[int] = []

    def interrupt(number: int, frame: "FrameType | None") -> None:
        came.append(number)
        note = signal.getsignal(signal.SIGINT)
        if not isinstance(note, _Deferred):
            raise KeyboardInterrupt
        note(number, frame)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ours = [each for each in _ENDS if signal.getsignal(each) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)
        if came:
            with suppress(OSError, ValueError, AttributeError):  # the reader of stdout is gone
                sys.stdout.flush()
            signal.raise_signal(came[0])


@contextmanager
def immediate() -> Iterator[None]:
    """Raise Ctrl+C at once until the block ends, also one that was deferred."""
    with _handled_by(signal.default_int_handler) as before:
        if isinstance(before, _Deferred) and before.came:
            before.came = False
            raise KeyboardInterrupt
        yield


@contextmanager
def calling(function: Callable[[], object]) -> Iterator[None]:
    """Call `function` for Ctrl+C until the block ends, also for one that was deferred. Raise a second one."""
    call = _CallOnce(function)
    with _handled_by(call) as before:
        if isinstance(before, _Deferred) and before.came:
            before.came = False
            call(signal.SIGINT, None)
        yield


class _CallOnce:
    """Handler that calls a function for the first Ctrl+C and raises for the second."""

    def __init__(self, function: Callable[[], object]) -> None:
        self._function = function
        self._called = False

    def __call__(self, number: int, frame: "FrameType | None") -> None:
        if self._called:
            raise KeyboardInterrupt
        self._called = True
        self._function()


class _Deferred:
    """Handler that keeps the first Ctrl+C for later and raises the second."""

    def __init__(self) -> None:
        self.came = False

    def __call__(self, number: int, frame: "FrameType | None") -> None:
        if self.came:
            self.came = False
            raise KeyboardInterrupt
        self.came = True


@contextmanager
def _handled_by(handler: "Callable[[int, FrameType | None], object]") -> Iterator[object]:
    """Install a handler; yields the one before, or None if it must not be replaced."""
    before = signal.getsignal(signal.SIGINT)
    ours = isinstance(before, _Deferred) or before is signal.default_int_handler
    if not ours or threading.current_thread() is not threading.main_thread():
        yield None
        return
    signal.signal(signal.SIGINT, handler)
    try:
        yield before
    finally:
        signal.signal(signal.SIGINT, before)


def _do_nothing(number: int, frame: "FrameType | None") -> None:
    pass


def _watch(reader: int, thread: int) -> None:
    pause_s = _LAST_S
    sent = _NUDGE
    while True:
        waits_s = pause_s if pause_s < _LAST_S else None
        if select.select([reader], [], [], waits_s)[0]:
            came = os.read(reader, 4096)
            if not came:
                return
            if _AGAIN in came:
                # Later: now it would meet the same callback again.
                pause_s = _FIRST_S
                sent = signal.SIGINT
            elif came.strip(bytes([_NUDGE])):
                pause_s = _FIRST_S
        else:
            signal.pthread_kill(thread, sent)
            pause_s = pause_s * 2
            sent = _NUDGE
