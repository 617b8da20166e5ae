"""Context managers for Ctrl+C. No interrupt is lost, and none strikes at a wrong place.

Python runs signal handlers between two instructions of the main thread. Two kinds of interrupts would be lost:

- A signal that arrives after the last check and before a wait (for an event, a key or a program) is handled
  when that wait ends, which may be never. At the prompt of a conversation, that was every third Ctrl+C that was
  pressed as soon as the prompt appeared.
- An interrupt that is raised in a finalizer, or in a callback of the garbage collector or of an import, is
  printed there and dropped.

In `interruptible`, a thread therefore learns of each signal from the wakeup descriptor. It sends the main
thread a signal without effect a few times, which ends the system call that the main thread waits in, and Python
checks again. It also repeats an interrupt that was dropped.

`deferred`, `immediate`, `calling` and `left_to_program` choose where Ctrl+C takes effect.
`terminate_gracefully` makes SIGTERM and SIGHUP act in the same way.
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
"""Signal without effect. Programs ignore it by default, and only sockets with urgent data send it."""
_TERMINATING: Final = (signal.SIGTERM, signal.SIGHUP)
_DROPPED: Final = b"\0"
"""Byte in the pipe, among the numbers of signals, that reports a dropped interrupt."""
_FIRST_PAUSE_S: Final = 0.01
_MAX_PAUSE_S: Final = 60.0
"""Longest interval between nudges. Intervals double, because the system may delay the process."""


@contextmanager
def interruptible() -> Iterator[None]:
    """Lose no Ctrl+C until the block ends.

    Has no effect outside the main thread, or if SIGINT is ignored or has another handler.
    """
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
    previous_hook = sys.unraisablehook

    def report_dropped(error: "sys.UnraisableHookArgs") -> None:
        if error.exc_type is not KeyboardInterrupt:
            previous_hook(error)
            return
        with suppress(OSError):  # the pipe is full, so the thread wakes up anyway
            os.write(writer, _DROPPED)

    previous_nudge_handler = signal.signal(_NUDGE, _do_nothing)
    previous_wakeup_fd = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    sys.unraisablehook = report_dropped
    watcher.start()
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        sys.unraisablehook = previous_hook
        signal.set_wakeup_fd(previous_wakeup_fd)
        os.close(writer)
        watcher.join()
        signal.signal(_NUDGE, previous_nudge_handler)
        os.close(reader)


@contextmanager
def deferred() -> Iterator[None]:
    """Postpone Ctrl+C until the block ends or `immediate` or `calling` is entered.

    A second Ctrl+C is raised at once, because something hangs. Has no effect outside the main thread.
    """
    handler = _Deferred()
    with _handled_by(handler) as before:
        yield
    if handler.arrived and before is not None:
        signal.raise_signal(signal.SIGINT)


@contextmanager
def terminate_gracefully() -> Iterator[None]:
    """Let SIGTERM and SIGHUP act as Ctrl+C, so that the answer is saved.

    The process then ends by the signal. Has no effect outside the main thread, or on signals that are ignored
    or have another handler.
    """
    received: list[int] = []

    def interrupt(number: int, frame: "FrameType | None") -> None:
        received.append(number)
        handler = signal.getsignal(signal.SIGINT)
        if not isinstance(handler, _Deferred):
            raise KeyboardInterrupt
        handler(number, frame)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [number for number in _TERMINATING if signal.getsignal(number) is signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)
        if received:
            with suppress(OSError, ValueError, AttributeError):  # stdout was closed by its reader
                sys.stdout.flush()
            signal.raise_signal(received[0])


@contextmanager
def immediate() -> Iterator[None]:
    """Raise Ctrl+C at once until the block ends, even if it was deferred."""
    with _handled_by(signal.default_int_handler) as before:
        if isinstance(before, _Deferred) and before.arrived:
            before.arrived = False
            raise KeyboardInterrupt
        yield


@contextmanager
def calling(function: Callable[[], object]) -> Iterator[None]:
    """Call `function` for the first Ctrl+C until the block ends, even if deferred. Raise the second."""
    call = _CallOnce(function)
    with _handled_by(call) as before:
        if isinstance(before, _Deferred) and before.arrived:
            before.arrived = False
            call(signal.SIGINT, None)
        yield


@contextmanager
def left_to_program() -> Iterator[None]:
    """Leave Ctrl+C to a program that runs in the foreground, until the block ends.

    A program inherits an ignored signal, but not a handler.
    """
    with _handled_by(_do_nothing):
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
    """Handler that stores the first Ctrl+C for later and raises the second."""

    def __init__(self) -> None:
        self.arrived = False

    def __call__(self, number: int, frame: "FrameType | None") -> None:
        if self.arrived:
            self.arrived = False
            raise KeyboardInterrupt
        self.arrived = True


@contextmanager
def _handled_by(handler: "Callable[[int, FrameType | None], object]") -> Iterator[object]:
    """Install a handler. Yield the previous one, or None if that must not be replaced."""
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
    """Nudge the main thread after each signal, until the pipe is closed."""
    pause_s = _MAX_PAUSE_S
    next_signal = _NUDGE
    while True:
        timeout_s = pause_s if pause_s < _MAX_PAUSE_S else None
        if select.select([reader], [], [], timeout_s)[0]:
            received = os.read(reader, 4096)
            if not received:
                return
            if _DROPPED in received:
                # Repeat the interrupt after a pause. At once it would hit the same callback.
                pause_s = _FIRST_PAUSE_S
                next_signal = signal.SIGINT
            elif received.strip(bytes([_NUDGE])):
                pause_s = _FIRST_PAUSE_S
        else:
            signal.pthread_kill(thread, next_signal)
            pause_s *= 2
            next_signal = _NUDGE
