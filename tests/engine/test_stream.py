"""A stream is read event by event, or in batches of what has come."""

import asyncio
import signal
import threading
import time

import pytest

from localchat.engine.events import Event, Text
from localchat.engine.stream import Stream
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
