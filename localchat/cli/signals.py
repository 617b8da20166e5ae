"""Ctrl+C is heard wherever it comes.

Python notes a signal at once and runs its handler between two instructions of the main thread. One that comes
after the last look and before a wait (for an event, a key, a program) is heard when that wait ends, which may
be never; measured at the prompt of a conversation, every third Ctrl+C that was as quick as the prompt. And one
that is heard within a finalizer or a callback of the collector or of imports is printed there and dropped.

So in `heard` a thread learns of each signal through the wakeup descriptor and nudges the main thread a few
times with a signal that does nothing: it ends the system call that the main thread may have slipped into, and
Python looks again. What was dropped is sent once more.

And it comes where it does no harm: in `held` nothing is torn apart by it but what waits in `opened`. In
`ended` the signals that end a program come the same way.
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
"""In the pipe, beside the numbers of signals: an interrupt was dropped."""
_FIRST_S: Final = 0.01
_LAST_S: Final = 60.0
"""Nudges come at distances that double, so that a process which the system holds up is nudged later too."""


@contextmanager
def interruptible() -> Iterator[None]:
    """Within, no Ctrl+C is lost. For the main thread; elsewhere, and where SIGINT is ignored or somebody
    else's, it does nothing."""
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
        with suppress(OSError):  # full: the thread has enough to wake up for
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
    """Within, Ctrl+C waits for the next `opened` or for the end: what belongs together is done together. A
    second one does not wait: something hangs. Elsewhere than in the main thread it does nothing."""
    note = _Deferred()
    with _handled_by(note) as before:
        yield
    if note.came and before is not None:
        signal.raise_signal(signal.SIGINT)


@contextmanager
def terminate_gracefully() -> Iterator[None]:
    """Within, SIGTERM and SIGHUP do what Ctrl+C does, so that what was said is kept; then the process ends by
    them, as it would have at once. For the main thread. One that is ignored or somebody else's stays so."""
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
            with suppress(OSError, ValueError, AttributeError):  # nobody reads any more
                sys.stdout.flush()
            signal.raise_signal(came[0])


@contextmanager
def immediate() -> Iterator[None]:
    """Within, Ctrl+C is raised at once, also one that came while it was `held`."""
    with _handled_by(signal.default_int_handler) as before:
        if isinstance(before, _Deferred) and before.came:
            before.came = False
            raise KeyboardInterrupt
        yield


@contextmanager
def calling(function: Callable[[], object]) -> Iterator[None]:
    """Call `function` for a Ctrl+C, also for one that was deferred. A second one is raised."""
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
    """A handler that keeps the first Ctrl+C for later."""

    def __init__(self) -> None:
        self.came = False

    def __call__(self, number: int, frame: "FrameType | None") -> None:
        if self.came:
            self.came = False
            raise KeyboardInterrupt
        self.came = True


@contextmanager
def _handled_by(handler: "Callable[[int, FrameType | None], object]") -> Iterator[object]:
    """Gives the handler that was there; None where it is not ours to change."""
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
    rest_s, sent = _LAST_S, _NUDGE
    while True:
        waits_s = rest_s if rest_s < _LAST_S else None
        if select.select([reader], [], [], waits_s)[0]:
            came = os.read(reader, 4096)
            if not came:
                return
            if _AGAIN in came:
                # Not at once: it would find the same callback.
                rest_s, sent = _FIRST_S, signal.SIGINT
            elif came.strip(bytes([_NUDGE])):
                rest_s = _FIRST_S
        else:
            signal.pthread_kill(thread, sent)
            rest_s, sent = rest_s * 2, _NUDGE
