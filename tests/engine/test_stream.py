"""A stream is read event by event, or in batches of what has come."""

import asyncio
import signal
import threading
import time
from collections.abc import Coroutine
from typing import Any

import pytest

from localchat.engine.events import Event, Text
from localchat.engine.stream import Stream, put_together
from localchat.errors import EngineClosed, EngineDied
from tests.support.tui_stage import DONE


def a_stream() -> Stream:
    return Stream(lambda: None)


def texts(events: list[Event]) -> list[str]:
    return [event.text for event in events if isinstance(event, Text)]


def test_a_batch_is_all_that_came_since_the_last() -> None:
    async def read() -> list[list[str]]:
        stream, seen = a_stream(), []
        stream.put(Text(0, "a"))
        stream.put(Text(0, "b"))
        async for batch in stream.batches():
            seen.append(texts(batch))
            if len(seen) == 1:
                stream.put(Text(0, "c"))
                stream.put(Text(0, "d"))
                stream.put(DONE)
        return seen

    assert asyncio.run(read()) == [["a", "b"], ["c", "d"]]


def test_what_came_before_a_failure_is_told_before_it_is_raised() -> None:
    async def read() -> list[list[str]]:
        stream, seen = a_stream(), []
        stream.put(Text(0, "a"))
        stream.put(EngineDied("it died"))

        async def consume() -> None:
            async for batch in stream.batches():
                seen.append(texts(batch))

        with pytest.raises(EngineDied):
            await consume()
        return seen

    assert asyncio.run(read()) == [["a"]]


@pytest.mark.parametrize("batches", [True, False])
def test_a_consumer_that_waits_is_woken_each_time(batches: bool) -> None:
    async def read() -> list[str]:
        stream, seen = a_stream(), []

        async def consume() -> None:
            if batches:
                async for batch in stream.batches():
                    seen.extend(texts(batch))
            else:
                async for event in stream:
                    seen.extend(texts([event]))

        reading = asyncio.create_task(consume())
        for letter in "abc":
            await asyncio.sleep(0.005)
            await asyncio.to_thread(stream.put, Text(0, letter))
        await asyncio.sleep(0.005)
        await asyncio.to_thread(stream.put, DONE)
        await asyncio.wait_for(reading, 90)
        return seen

    assert asyncio.run(read()) == ["a", "b", "c"]


def test_a_close_ends_a_consumer_that_waits() -> None:
    async def read() -> None:
        stream = a_stream()

        async def consume() -> None:
            async for _ in stream.batches():
                pass

        reading = asyncio.create_task(consume())
        await asyncio.sleep(0.005)
        await asyncio.to_thread(stream.close)
        with pytest.raises(EngineClosed):
            await asyncio.wait_for(reading, 90)

    asyncio.run(read())


def test_a_signal_that_finds_the_consumer_not_yet_waiting_is_heard() -> None:
    """Taken by another thread, a signal interrupts no wait of this one, as one just before the wait."""
    stream = Stream(cancel=lambda: None)

    def late() -> None:
        time.sleep(0.05)
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        time.sleep(5.0)
        stream.put(DONE)

    threading.Thread(target=late, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        list(stream)
    assert not stream.ended


def test_several_events_come_in_order_and_none_behind_the_last() -> None:
    stream = a_stream()
    stream.put(Text(0, "a"), Text(0, "b"), DONE, Text(0, "late"))
    stream.put(Text(0, "later"))
    assert texts(list(stream)) == ["a", "b"]


def test_nothing_of_what_comes_after_a_close_is_kept() -> None:
    stream = a_stream()
    stream.put(Text(0, "a"))
    stream.close()
    stream.put(Text(0, "b"), DONE)
    reading = iter(stream)
    assert texts([next(reading)]) == ["a"]
    with pytest.raises(EngineClosed):
        next(reading)


def test_streams_of_a_step_wake_their_event_loop_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def read() -> tuple[list[list[str]], int]:
        loop, woken = asyncio.get_running_loop(), 0
        wake = loop.call_soon_threadsafe

        def counting(*call: Any) -> asyncio.Handle:
            nonlocal woken
            woken += 1
            return wake(*call)

        monkeypatch.setattr(loop, "call_soon_threadsafe", counting)
        streams = [a_stream() for _ in range(5)]
        readers = [asyncio.ensure_future(stream.batch()) for stream in streams]
        await asyncio.sleep(0)
        step = [(stream, [Text(0, str(at))]) for at, stream in enumerate(streams)]
        thread = threading.Thread(target=put_together, args=(step,))
        thread.start()
        thread.join()
        return [texts(await reader) for reader in readers], woken

    assert asyncio.run(read()) == ([["0"], ["1"], ["2"], ["3"], ["4"]], 1)


def test_consumer_whose_event_loop_is_closed_does_not_stop_the_others() -> None:
    gone, here = a_stream(), a_stream()

    async def wait(reader: Coroutine[Any, Any, list[Event]]) -> None:
        reader.send(None)  # up to where it waits; a task would be pending for ever

    reader = gone.batch()
    asyncio.run(wait(reader))
    put_together([(gone, [Text(0, "a")]), (here, [Text(0, "b")])])
    assert texts(asyncio.run(here.batch())) == ["b"]
    reader.close()
