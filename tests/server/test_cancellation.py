"""Work on threads that outlives a cancelled caller, and the disconnect of a client."""

import asyncio
from collections.abc import Iterator

import pytest
from starlette.types import Message

from localchat.server.cancellation import disconnected, shielded, to_its_end


def test_cancelled_caller_undoes_the_late_result() -> None:
    undone: list[str] = []

    async def run() -> None:
        finish = asyncio.Event()

        async def work() -> str:
            await finish.wait()
            return "late"

        caller = asyncio.create_task(shielded(work(), undone.append))
        await asyncio.sleep(0)
        caller.cancel()
        results = await asyncio.gather(caller, return_exceptions=True)
        assert isinstance(results[0], asyncio.CancelledError) and undone == []
        finish.set()
        while not undone:
            await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(run(), 90))
    assert undone == ["late"]


def test_caller_is_cancelled_once_work_that_must_not_go_on_alone_has_ended() -> None:
    async def run() -> list[str]:
        done: list[str] = []
        begun, go_on = asyncio.Event(), asyncio.Event()

        async def work() -> None:
            begun.set()
            await go_on.wait()
            done.append("work")

        async def caller() -> None:
            try:
                await to_its_end(work())
            finally:
                done.append("caller")

        task = asyncio.create_task(caller())
        await begun.wait()
        task.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        return done

    assert asyncio.run(run()) == ["work", "caller"]


def test_late_failure_after_a_cancelled_caller_is_dropped() -> None:
    complaints: list[object] = []
    undone: list[object] = []

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(
            lambda _, context: complaints.append(context)
        )
        finish = asyncio.Event()

        async def work() -> None:
            await finish.wait()
            raise OSError

        caller = asyncio.create_task(shielded(work(), undone.append))
        await asyncio.sleep(0)
        caller.cancel()
        await asyncio.gather(caller, return_exceptions=True)
        finish.set()
        for _ in range(5):
            await asyncio.sleep(0)

    asyncio.run(run())
    assert (complaints, undone) == ([], [])


def test_disconnect_is_noticed_after_any_other_message() -> None:
    messages: Iterator[Message] = iter(
        [{"type": "http.request"}, {"type": "http.request"}, {"type": "http.disconnect"}]
    )

    async def receive() -> Message:
        return next(messages)

    asyncio.run(disconnected(receive))
    assert list(messages) == []
