"""Coalescing of events: some wait, urgent ones do not, none is lost or overtaken."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localchat.core.event_sender import EventSender
from localchat.core.kv_cache.manager import KVUsage
from localchat.core.sequence import RequestState, Sequence
from localchat.engine.events import Done, Event, Finished, MetricsSnapshot, Text, ToolCall
from localchat.errors import EngineClosed
from tests.support.engine_core_bench import Bench, capabilities, peaked, periodic, request

ALPHABET = "abcdefghijklmnopqrstuvwxyz"
FOR_EVER = 1e9
AHEAD: dict[str, Any] = {"block_tokens": 4, "depth": 2}
KINDS: tuple[dict[str, Any], ...] = ({}, AHEAD, {"depth": 2})


class SenderBench:
    """An event sender, and the frames that it sent."""

    def __init__(self, coalesce_s: float = 0.015) -> None:
        self.frames: list[list[Event]] = []
        self.event_sender = EventSender(
            lambda items: self.frames.append([event for _, event in items]),
            lambda id_, error: None,
            lambda: KVUsage(0, 0, 0, 0, 0, 0, 0),
            "",
            coalesce_s,
        )
        bench = Bench(logits=periodic)
        self.request_state: RequestState = bench.requests[bench.ask(request("ab", max_tokens=1000))]
        self.sequence: Sequence = self.request_state.sequences[0]

    def token(self, number: int, now_s: float, next_s: float, event: Event | None = None) -> None:
        """A turn that says the `number`th token of the text."""
        self.sequence.tokens[2:] = [97] * number
        self.event_sender.text(self.sequence, [event or Text(0, f"{number} ")], now_s)
        self.event_sender.end_step(now_s, next_s)


def test_events_of_slow_steps_are_sent_one_by_one() -> None:
    sender_bench = SenderBench()
    for number in range(100, 120):
        sender_bench.token(number, number * 0.01, 0.01)
    assert [len(frame) for frame in sender_bench.frames] == [1] * 20


def test_events_of_fast_steps_are_sent_together_within_the_limit() -> None:
    sender_bench = SenderBench()
    for number in range(100, 148):
        sender_bench.token(number, number * 0.001, 0.001)
    texts = [
        event.text for frame in sender_bench.frames for event in frame if isinstance(event, Text)
    ]
    assert len(texts) == len(sender_bench.frames)
    assert {text.count(" ") for text in texts[1:]} == {15}
    numbers = [int(number) for number in "".join(texts).split()]
    assert numbers == list(range(100, 100 + len(numbers)))


def test_first_words_never_wait() -> None:
    sender_bench = SenderBench()
    for number in range(1, 12):
        sender_bench.token(number, number * 0.001, 0.001)
    assert [len(frame) for frame in sender_bench.frames] == [1] * 8


@pytest.mark.parametrize("next_s", [0.2, float("inf")])
def test_waiting_events_are_sent_before_a_long_step(next_s: float) -> None:
    sender_bench = SenderBench()
    sender_bench.token(100, 1.0, 0.001)
    sender_bench.token(101, 1.001, 0.001)
    sender_bench.token(102, 1.002, next_s)
    assert sender_bench.frames == [[Text(0, "100 ")], [Text(0, "101 102 ")]]


@pytest.mark.parametrize(
    "tell",
    [
        lambda sender_bench: sender_bench.token(102, 1.002, 0.001, ToolCall(0, 0, "id", "name")),
        lambda sender_bench: sender_bench.event_sender.queued(sender_bench.request_state, 3),
        lambda sender_bench: sender_bench.event_sender.prefill(sender_bench.request_state, 2),
        lambda sender_bench: sender_bench.event_sender.finished(
            sender_bench.sequence.request_state, Finished(0, "stop")
        ),
        lambda sender_bench: sender_bench.event_sender.done(
            sender_bench.request_state, KVUsage(0, 0, 0, 0, 0, 0, 0), 1.002
        ),
        lambda sender_bench: sender_bench.event_sender.send_metrics(
            sender_bench.request_state, 1, 0, 1.002
        ),
    ],
)
def test_urgent_events_flush_the_waiting_ones(tell: Callable[[SenderBench], None]) -> None:
    sender_bench = SenderBench()
    sender_bench.token(100, 1.0, 0.001)
    sender_bench.token(101, 1.001, 0.001)
    tell(sender_bench)
    sender_bench.event_sender.end_step(1.002, 0.001)
    assert [len(frame) for frame in sender_bench.frames] == [1, 2]
    assert sender_bench.frames[1][0] == Text(0, "101 ")


def test_metrics_of_the_same_phase_wait_with_the_text() -> None:
    sender_bench = SenderBench()
    sender_bench.token(100, 1.0, 0.001)
    sender_bench.event_sender.send_metrics(sender_bench.request_state, 1, 0, 1.0)
    sender_bench.event_sender.end_step(1.0, 0.001)
    received = len(sender_bench.frames)
    sender_bench.event_sender.send_metrics(sender_bench.request_state, 1, 0, 2.0)
    sender_bench.event_sender._sent_s = 2.0
    sender_bench.event_sender.end_step(2.0, 0.001)
    assert len(sender_bench.frames) == received
    sender_bench.event_sender.flush()
    assert isinstance(sender_bench.frames[-1][0], MetricsSnapshot)


def test_waiting_events_of_a_cancelled_request_are_dropped() -> None:
    bench = Bench(logits=periodic, coalesce_s=FOR_EVER)
    gone, stays = (
        bench.ask(request(ALPHABET, max_tokens=60)),
        bench.ask(request("bcd", max_tokens=60)),
    )
    bench.step(40)
    received = len(bench.received[gone].events)
    bench.core.cancel(gone)
    bench.run_until_idle()
    assert len(bench.received[gone].events) == received
    assert bench.received[stays].text() == ((ALPHABET * 4)[4:])[:60]


def test_a_closed_engine_sends_waiting_events_first() -> None:
    bench = Bench(logits=periodic, coalesce_s=FOR_EVER, speculation=False)
    id_ = bench.ask(request(ALPHABET, max_tokens=200))
    bench.step(60)
    assert len(bench.received[id_].text()) < bench.requests[id_].completion_tokens
    bench.core.stop()
    bench.core.run()
    assert len(bench.received[id_].text()) == bench.requests[id_].completion_tokens > 50
    assert isinstance(bench.received[id_].error, EngineClosed)


@pytest.mark.parametrize("kind", KINDS)
@given(
    asked=st.lists(
        st.tuples(st.integers(1, 3), st.integers(1, 60), st.booleans()), min_size=1, max_size=4
    )
)
@settings(max_examples=15, deadline=None)
def test_waiting_changes_only_how_events_are_bundled(
    kind: dict[str, Any], asked: list[tuple[int, int, bool]]
) -> None:
    def events(coalesce_s: float) -> tuple[list[list[Event]], int]:
        bench = Bench(capabilities(**kind), peaked, coalesce_s=coalesce_s, speculation=False)
        ids = [
            bench.ask(
                request(f"prompt {n}", n=n, max_tokens=most, seed=7, stop=("ab",) if stop else ())
            )
            for n, most, stop in asked
        ]
        bench.run_until_idle()
        received = [bench.received[id_].events for id_ in ids]
        return [_without_times(one) for one in received], len(bench.frames)

    (at_once, frames), (together, fewer) = events(0.0), events(FOR_EVER)
    assert together == at_once
    assert fewer <= frames


def _without_times(events: list[Event]) -> list[Event]:
    assert isinstance(events[-1], Done)
    kept: list[Event] = []
    for event in events[:-1]:
        last = kept[-1] if kept else None
        if isinstance(event, Text) and isinstance(last, Text) and event.choice == last.choice:
            kept[-1] = Text(event.choice, last.text + event.text)
        elif not isinstance(event, MetricsSnapshot):
            kept.append(event)
    return [*kept, Finished(0, "stop")]
