"""Blocks in host memory as the scheduler uses them: copied back where that is faster, and in nobody's way."""

from typing import Any

import pytest

from localchat.backend_api.interface import LoadBlock
from tests.support.engine_core_bench import Bench, capabilities, check_received, peaked, request

PAGED: dict[str, Any] = {"block_tokens": 4, "depth": 2, "host_blocks": 200, "bytes_per_token": 8}
TEXT = "A text that is evicted by another one and asked again. " * 2


def loads(bench: Bench) -> int:
    return sum(isinstance(op, LoadBlock) for plan in bench.runner.steps for op in plan.memory)


@pytest.mark.parametrize(("load_s", "copied"), [(0.0, True), (1e-9, True), (10.0, False)])
def test_blocks_are_copied_back_unless_computing_them_is_faster(
    load_s: float, copied: bool
) -> None:
    bench = Bench(capabilities(**PAGED, kv_tokens=160, context_tokens=160, host_block_s=load_s))
    bench.say(request(TEXT))
    bench.say(request(TEXT.upper()))
    id_ = bench.ask(request(TEXT))
    bench.run_until_idle()
    check_received(bench, id_, peaked)
    assert (loads(bench) > 0) is copied
    assert ("faster" in bench.requests[id_].why_missed) is not copied


@pytest.mark.parametrize(("load_s", "copied"), [(1e-9, True), (10.0, False)])
def test_a_preempted_sequence_comes_back_by_copies_unless_that_is_slower(
    load_s: float, copied: bool
) -> None:
    bench = Bench(capabilities(**PAGED, kv_tokens=160, context_tokens=160, host_block_s=load_s))
    texts = [request(letter * 50, max_tokens=60, ignore_eos=True) for letter in "abc"]
    numbers = [bench.ask(text) for text in texts]
    bench.run_until_idle()
    assert bench.core.stats().preemptions
    for number in numbers:
        check_received(bench, number, peaked)
    assert (loads(bench) > 0) is copied


def test_others_decode_on_while_a_prefix_is_copied_back(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("localchat.core.scheduler.scheduler.time.perf_counter", lambda: clock[0])
    can = capabilities(**PAGED, kv_tokens=240, context_tokens=240, host_block_s=1e-9)
    bench = Bench(can)
    bench.core._scheduler._load_token_s = 1.0
    monkeypatch.setattr(type(bench.core._scheduler._token_budget), "token_s", 2.0)
    bench.say(request(TEXT))
    bench.say(request(TEXT.upper() * 2, max_tokens=4))
    other = bench.ask(request("b", max_tokens=40, ignore_eos=True))
    bench.step(4)
    id_ = bench.ask(request(TEXT))
    bench.step(10)
    first, second = (bench.requests[one].sequences[0] for one in (other, id_))
    assert loads(bench) and second.state.name == "RUNNING"
    assert first.known > 8
    assert second.known == len(TEXT) and not second.steps_in_flight
    clock[0] = 1e6
    bench.step(4)
    assert second.known > len(TEXT)
    bench.run_until_idle()
    check_received(bench, id_, peaked)
