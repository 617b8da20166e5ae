"""Drafts of requests with a seed: chosen by nothing that was measured, and of use all the same."""

import random
from dataclasses import replace

import pytest

from tests.core.spec_decode.test_draft_cost import Text, copied, fresh, looping, misleading, partly
from tests.support.engine_core_bench import Bench, capabilities, check_received, periodic, request
from tests.support.timed_core import CPU, Machine, TimedCore

ALPHABET = "abcdefghijklmnopqrstuvwxyz"
SEEDED = replace(CPU.capabilities, seeded_drafts=True)
SLOW_ROWS = {1: 30, 2: 60, 4: 97, 8: 198, 16: 280, 32: 500, 64: 900, 128: 1700, 256: 3300}
"""A processor whose memory is fast for what it computes: a further row costs more than half of a plain step."""


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("n", [1, 3])
def test_no_measured_time_and_no_other_request_changes_the_rows(n: int, depth: int) -> None:
    runs = []
    for busy in (False, True):
        bench = Bench(capabilities(seeded_drafts=True, depth=depth), periodic)
        core = bench.core
        if busy:
            bench.say(request(ALPHABET[1:] + ALPHABET, max_tokens=60))
            core._draft_fund.balance = -9.0
        for _ in range(50):
            core._scheduler._token_budget.observe(16, 9.0 if busy else 1e-4)
            for rows in (1, 4, 8, 16):
                core._step_costs.observe(rows, rows**2 if busy else 1.0)
        before = len(bench.runner.steps)
        id_ = bench.ask(request(ALPHABET, seed=1, temperature=1.0, n=n, max_tokens=150))
        bench.run_until_idle()
        check_received(bench, id_, periodic)
        assert bench.received[id_].done.speculation.accepted > 80 * n
        steps = bench.runner.steps[before:]
        runs.append([[(row.start, row.drafts) for row in plan.rows] for plan in steps if plan.rows])
    assert runs[0] == runs[1]


def test_beside_a_seed_others_have_drafts_too() -> None:
    bench = Bench(capabilities(seeded_drafts=True), periodic)
    ids = [bench.ask(request(ALPHABET * 3, seed=seed, max_tokens=60)) for seed in (1, None)]
    bench.run_until_idle()
    for id_ in ids:
        check_received(bench, id_, periodic)
        assert bench.received[id_].done.speculation.accepted > 20


@pytest.mark.parametrize(
    "machine",
    [CPU._replace(capabilities=SEEDED), CPU._replace(capabilities=SEEDED, decode_ms=SLOW_ROWS)],
    ids=["usual", "slow-rows"],
)
@pytest.mark.parametrize("streams", [1, 4, 8])
@pytest.mark.parametrize(
    "text", [fresh, misleading, copied, looping, partly(0.3), partly(0.7), partly(0.9)]
)
def test_drafts_of_unmeasured_costs_lose_little_and_pay_where_texts_repeat(
    monkeypatch: pytest.MonkeyPatch, text: Text, streams: int, machine: Machine
) -> None:
    spent_s = []
    for speculation in (False, True):
        core = TimedCore(monkeypatch, machine, speculation=speculation)
        outcomes = [
            core.answer(
                [text(random.Random(1000 * burst + each)) for each in range(streams)], seed=7
            )
            for burst in range(3)
        ]
        spent_s.append(sum(1 / each.tokens_per_s for each in outcomes))
    assert spent_s[0] / spent_s[1] > 0.96
    assert text is not copied or spent_s[0] / spent_s[1] > (1.2 if streams == 1 else 1.1)
