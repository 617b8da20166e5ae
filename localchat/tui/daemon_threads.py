"""Executor of the screen's event loop whose threads do not delay the exit.

Quitting must not wait for a speed probe, a model that is still loading, or a folder on a slow disk. What must
be complete before the program ends is closed by `launch`, outside the event loop.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class DaemonThreads(ThreadPoolExecutor):
    """Runs each call in a daemon thread of its own. asyncio accepts only subclasses of ThreadPoolExecutor."""

    def submit(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        future: Future[R] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = fn(*args, **kwargs)
            except BaseException as error:  # noqa: BLE001 - the future raises it
                future.set_exception(error)
            else:
                future.set_result(result)

        threading.Thread(target=run, name="screen work", daemon=True).start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Return at once: there is no pool."""
