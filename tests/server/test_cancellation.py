"""Work on threads that outlives a cancelled caller, and the disconnect of a client."""

import asyncio
from collections.abc import Iterator

from starlette.types import Message

from localchat.server.cancellation import disconnected, shielded


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
