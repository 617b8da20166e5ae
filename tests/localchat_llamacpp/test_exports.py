"""KV that leaves the process and comes back into another context: the next logits are the same."""

from dataclasses import replace
from typing import cast

import numpy as np
import pytest

from localchat.backend_api.interface import (
    LAST,
    Drop,
    Import,
    LogitsPosition,
    Restore,
    Sample,
    SamplingParams,
    Save,
    StateRange,
    StepRow,
)
from localchat.backend_api.kv_transfer import ExportingRunner
from tests.support.llamacpp_driver import GREEDY, Driver, Start, with_logprobs
from tests.support.llamacpp_models import VOCAB

TEXT = tuple(int(t) for t in np.random.default_rng(9).integers(0, VOCAB - 3, 300))
SAMPLINGS = [
    with_logprobs(GREEDY, 20),
    with_logprobs(replace(GREEDY, temperature=1.0, seed=11), 20),
]


def taken(driver: Driver, cuts: list[int]) -> tuple[StateRange, ...]:
    """The KV of slot 0 in ranges that end at `cuts`, as bytes that outlive their context."""
    runner = cast(ExportingRunner, driver.runner)
    ranges = zip([0, *cuts[:-1]], cuts, strict=True)
    return tuple(
        StateRange(start, end, memoryview(bytes(runner.export_slot(0, start, end))))
        for start, end in ranges
    )


def continued(
    driver: Driver, tokens: tuple[int, ...], sampling: SamplingParams, start: int = 0
) -> list[Sample]:
    """The samples of a text's end and of 12 tokens after it, with their log probabilities."""
    begun = driver.prefill(tokens, seq=9, start=start, sampling=sampling)
    samples = list(begun.samples)
    for offset in range(12):
        row = StepRow(9, 0, len(tokens) + offset, LAST)
        samples += driver.step(row, positions=(LogitsPosition(0, 0, 9),)).samples
    return samples


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "seeded"])
@pytest.mark.parametrize("cuts", [[250], [64, 128, 200, 250], [1, 250]])
@pytest.mark.parametrize(
    ("kv_type", "flash"), [("f16", False), ("f16", True), ("q8_0", True), ("q4_0", True)]
)
def test_a_text_that_was_imported_goes_on_bit_for_bit_as_where_it_was_computed(
    start: Start, kv_type: str, flash: bool, cuts: list[int], sampling: SamplingParams
) -> None:
    first = start(kv_type=kv_type, flash=flash)
    first.prefill(TEXT[:250])
    ranges = taken(first, cuts)
    expected = continued(first, TEXT[:251], sampling, start=250)
    second = start(kv_type=kv_type, flash=flash)
    second.step(memory=[Import(7, ranges), Restore(7, 0, 250)])
    assert continued(second, TEXT[:251], sampling, start=250) == expected


@pytest.mark.parametrize("name", ["gemma3", "mamba"])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "seeded"])
def test_models_that_cannot_rewind_export_whole_states(
    start: Start, name: str, sampling: SamplingParams
) -> None:
    first = start(name)
    assert first.runner.capabilities.exports == "whole"
    first.prefill(TEXT[:250])
    ranges = taken(first, [250])
    expected = continued(first, TEXT[:251], sampling, start=250)
    second = start(name)
    second.step(memory=[Import(7, ranges), Restore(7, 0, 250)])
    assert continued(second, TEXT[:251], sampling, start=250) == expected


def test_ranges_are_restored_up_to_a_branch(start: Start) -> None:
    first = start()
    assert first.runner.capabilities.exports == "range"
    first.prefill(TEXT[:250])
    ranges = taken(first, [64, 128, 200, 250])
    branch = (*TEXT[:150], *TEXT[260:280])
    second = start()
    second.step(memory=[Import(7, ranges), Restore(7, 0, 150)])
    fresh = start()
    # The same steps, so that the shapes of the batches are the same.
    fresh.prefill(TEXT[:250])
    fresh.step(memory=[Save(0, 1), Drop(0), Restore(1, 0, 150)])
    sampling = SAMPLINGS[0]
    assert continued(second, branch, sampling, 150) == continued(fresh, branch, sampling, 150)


def test_an_export_leaves_its_slot_and_the_others_alone(start: Start) -> None:
    driver, fresh = start(), start()
    for one in (driver, fresh):
        one.prefill(TEXT[:250])
        one.prefill(TEXT[100:140], seq=1, slot=1)
    taken(driver, [100, 200, 250])
    driver.step(memory=[Save(0, 5)])
    assert cast(ExportingRunner, driver.runner).export_saved(5, 100, 200) is not None
    expected = continued(fresh, TEXT[:251], SAMPLINGS[0], 250)
    assert continued(driver, TEXT[:251], SAMPLINGS[0], 250) == expected


def test_a_saved_state_is_taken_apart_as_its_slot(start: Start) -> None:
    driver = start()
    driver.prefill(TEXT[:250])
    slot = [bytes(one.data) for one in taken(driver, [100, 200, 250])]
    driver.step(memory=[Save(0, 5), Drop(0)])
    export = cast(ExportingRunner, driver.runner).export_saved
    saved = [
        bytes(cast(memoryview, export(5, *ends))) for ends in ((0, 100), (100, 200), (200, 250))
    ]
    assert saved == slot
