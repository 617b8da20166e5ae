"""Threads of the screen that the end of the program does not wait for."""

import asyncio
import threading

import pytest

from localchat.tui.daemon_threads import DaemonThreads


def test_the_end_of_an_event_loop_does_not_wait_for_a_thread() -> None:
    released, begun = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        released.wait(60)

    async def leave() -> None:
        asyncio.get_running_loop().set_default_executor(DaemonThreads())
        waiting = asyncio.ensure_future(asyncio.to_thread(wait))
        while not begun.is_set():
            await asyncio.sleep(0)
        waiting.cancel()

    asyncio.run(leave())  # a thread that were waited for would never end: `released` comes after it
    assert not released.is_set()
    released.set()


def test_results_and_errors_come_back() -> None:
    async def ask() -> int:
        asyncio.get_running_loop().set_default_executor(DaemonThreads())
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 // 0)
        return await asyncio.to_thread(lambda: 7)

    assert asyncio.run(ask()) == 7
