"""Events that arrive together leave together, others at once; nothing is lost or counted twice."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from localchat.engine.events import Accepted, Event, Finished, Prefill, Reasoning, Text
from localchat.engine.request import GenerateRequest, Message, Messages
from localchat.engine.stream import Stream
from localchat.errors import EngineDied, LocalchatError
from localchat.server.generation import (
    ChoiceEnd,
    EarlyStop,
    Generation,
    GenerationSpec,
    OutputEvent,
)
from localchat.server.tracker import TrackedRequest
from tests.support.scripted_engine import ScriptedAnswer, ScriptedEngine
from tests.support.tui_stage import DONE

ASKED = GenerateRequest(prompt=Messages((Message("user", "?"),)))
BEGUN = (Accepted(3, 10, 1), Prefill(3, 0, 3))
ENDED = (Finished(0, "stop"), DONE)


class Hand(ScriptedEngine):
    """Answers what a test puts into its streams."""

    def __init__(self) -> None:
        super().__init__(lambda request: ScriptedAnswer())
        self.streams: list[Stream] = []

    def generate(self, request: GenerateRequest) -> Stream:
        self.streams.append(Stream(lambda: None))
        self.streams[-1].put(*BEGUN)
        return self.streams[-1]


def output_of(
    steps: list[tuple[Event | LocalchatError, ...]],
    early_stop: Callable[[], EarlyStop] | None = None,
) -> tuple[list[list[OutputEvent]], TrackedRequest]:
    """Output after each step, whose events arrive together."""

    async def run() -> tuple[list[list[OutputEvent]], TrackedRequest]:
        engine, tracked = Hand(), TrackedRequest(id="f", model="m", user="u")
        generation = Generation(engine, GenerationSpec([[ASKED]], early_stop=early_stop), tracked)
        await generation.start()
        found = []
        batches = generation.events()
        for step in steps:
            engine.streams[0].put(*step)
            if (batch := await anext(batches, None)) is not None:
                found.append(batch)
        await batches.aclose()
        return found, tracked

    return asyncio.run(run())


def test_events_that_arrive_together_leave_together() -> None:
    found, tracked = output_of(
        [(Text(0, "a"),), (Text(0, "b"), Text(0, "c")), (Text(0, "d"), *ENDED), ()]
    )
    assert found == [
        [Text(0, "a")],
        [Text(0, "b"), Text(0, "c")],
        [Text(0, "d"), ChoiceEnd(0, "stop")],
    ]
    assert tracked.done == DONE


class Notes:
    """An AnswerWriter that records what it writes."""

    def __init__(self) -> None:
        self.is_ready = True
        self.written: list[OutputEvent] = []

    def ready(self) -> bool:
        return self.is_ready

    def write(self, events: Sequence[OutputEvent]) -> None:
        self.written += events
        if events[0] == Text(0, "broken"):
            raise ValueError("cannot be written")


def written_and_yielded(
    *steps: tuple[Event, ...], slow_after: int = 99
) -> tuple[list[OutputEvent], list[OutputEvent], TrackedRequest]:
    """Put events while the consumer waits. The writer is not ready after `slow_after` steps."""

    async def run() -> tuple[list[OutputEvent], list[OutputEvent], TrackedRequest]:
        engine, tracked, notes = Hand(), TrackedRequest(id="f", model="m", user="u"), Notes()
        generation = Generation(engine, GenerationSpec([[ASKED]]), tracked)
        await generation.start()
        yielded: list[OutputEvent] = []

        async def consume() -> None:
            async for batch in generation.events(notes):
                yielded.extend(batch)

        task = asyncio.create_task(consume())
        for number, step in enumerate(steps):
            await asyncio.sleep(0.001)
            notes.is_ready = number < slow_after
            engine.streams[0].put(*step)
        await asyncio.wait_for(task, 90)
        return notes.written, yielded, tracked

    return asyncio.run(run())


def test_plain_pieces_go_to_the_writer_and_the_rest_is_yielded() -> None:
    written, yielded, tracked = written_and_yielded(
        (Text(0, "a"),), (Text(0, "b"), Reasoning(0, "c")), (Text(0, "d"), *ENDED)
    )
    assert written == [Text(0, "a"), Text(0, "b"), Reasoning(0, "c")]
    assert yielded == [Text(0, "d"), ChoiceEnd(0, "stop")]
    assert tracked.done == DONE and tracked.first_token_s is not None


def test_a_writer_that_is_not_ready_leaves_all_pieces_in_order() -> None:
    written, yielded, _ = written_and_yielded(
        (Text(0, "a"),), (Text(0, "b"),), (Text(0, "c"),), ENDED, slow_after=1
    )
    assert written == [Text(0, "a")]
    assert yielded == [Text(0, "b"), Text(0, "c"), ChoiceEnd(0, "stop")]


def test_a_piece_that_cannot_be_written_fails_the_request() -> None:
    with pytest.raises(ValueError, match="cannot be written"):
        written_and_yielded((Text(0, "a"),), (Text(0, "broken"),), ENDED)


def test_what_came_with_the_acceptance_is_not_lost() -> None:
    found, _ = output_of([(Text(0, "a"), *ENDED)])
    assert found == [[Text(0, "a"), ChoiceEnd(0, "stop")]]


def test_events_before_a_failure_are_sent_before_it() -> None:
    steps: list[tuple[Event | LocalchatError, ...]] = [
        (Text(0, "a"), Text(0, "b"), EngineDied("gone")),
        (),
    ]
    with pytest.raises(EngineDied):
        output_of(steps)
    assert output_of(steps[:1])[0] == [[Text(0, "a"), Text(0, "b")]]


class Short:
    """Ends a text at its second piece."""

    def __init__(self) -> None:
        self._pieces = 0

    def push(self, text: str) -> tuple[str, bool]:
        self._pieces += 1
        return text, self._pieces == 2

    def flush(self) -> str:
        return ""


def test_nothing_is_sent_or_counted_after_an_early_stop() -> None:
    found, tracked = output_of([tuple(Text(0, letter) for letter in "abcdef"), ()], Short)
    assert found == [[Text(0, "a"), Text(0, "b"), ChoiceEnd(0, "length")]]
    assert tracked.usage is not None and tracked.usage.completion_tokens == 2


def test_concurrent_prompts_keep_their_own_order() -> None:
    async def run() -> list[OutputEvent]:
        engine = Hand()
        generation = Generation(
            engine, GenerationSpec([[ASKED], [ASKED]]), TrackedRequest(id="f", model="m", user="")
        )
        await generation.start()
        one, two = engine.streams
        one.put(Text(0, "a"), Text(0, "b"))
        two.put(Text(0, "1"), *ENDED)
        one.put(Text(0, "c"), *ENDED)
        return [event async for batch in generation.events() for event in batch]

    work: Coroutine[Any, Any, list[OutputEvent]] = run()
    sent = asyncio.run(work)
    assert [one for one in sent if one.choice == 0] == [
        *(Text(0, x) for x in "abc"),
        ChoiceEnd(0, "stop"),
    ]
    assert [one for one in sent if one.choice == 1] == [Text(1, "1"), ChoiceEnd(1, "stop")]


class FirstPiece:
    """An early stop that keeps the first piece of a text."""

    def push(self, text: str) -> tuple[str, bool]:
        return text, True

    def flush(self) -> str:
        return ""


def test_engine_stops_as_the_server_ends_an_answer_and_not_once_its_end_is_sent() -> None:
    async def run() -> int:
        engine = ScriptedEngine(lambda request: ScriptedAnswer(("word ",) * 50, gap_s=0.01))
        spec = GenerationSpec([[ASKED]], early_stop=FirstPiece)
        generation = Generation(engine, spec, TrackedRequest(id="f"))
        await generation.start()
        async for _ in generation.events():
            pass
        return engine.cancelled

    assert asyncio.run(run()) == 1
