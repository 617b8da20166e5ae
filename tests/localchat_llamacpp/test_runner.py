"""The runner executes plans: rows, points, drafts, forks, padding, aborts, lack of room."""

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from localchat.backend_api.interface import (
    LAST,
    Alias,
    Drop,
    Enter,
    LogitsPosition,
    Mask,
    SamplingParams,
    StepPlan,
    StepRow,
    Truncate,
    Widths,
)
from localchat_llamacpp.runner import LlamaCppRunner
from tests.support.llamacpp_driver import GREEDY, Driver, Start, asking_to_abort, with_logprobs
from tests.support.llamacpp_models import VOCAB

PROMPT = tuple(int(t) for t in np.random.default_rng(5).integers(0, VOCAB - 3, 150))
CLOSE = 0.02
"""Logits differ that much, and less, between steps of different widths (f16 KV, float weights)."""


def _log_softmax(row: NDArray[np.float32]) -> NDArray[np.float64]:
    wide = row.astype(np.float64)
    wide -= wide.max()
    result: NDArray[np.float64] = wide - np.log(np.exp(wide).sum())
    return result


def _logits_of_last(driver: Driver) -> NDArray[np.float32]:
    assert isinstance(driver.runner, LlamaCppRunner)
    logits: NDArray[np.float32] = driver.runner._logits[0].copy()
    return logits


@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize(("kv_type", "flash"), [("f16", False), ("q8_0", True)])
def test_a_prompt_in_chunks_gives_the_logits_of_the_whole(
    start: Start, chunk: int, kv_type: str, flash: bool
) -> None:
    whole = start(step=256, kv_type=kv_type, flash=flash)
    whole.prefill(PROMPT)
    pieces = start(step=64, kv_type=kv_type, flash=flash)
    pieces.prefill(PROMPT, chunk=chunk)
    tolerance = CLOSE if kv_type == "f16" else 0.5
    assert np.abs(_logits_of_last(whole) - _logits_of_last(pieces)).max() < tolerance


@pytest.mark.parametrize("name", ["llama", "gemma3", "mamba"])
def test_plain_attention_gives_the_same_bits_with_any_number_of_threads(
    start: Start, name: str
) -> None:
    rows = []
    for threads in (1, 2, 3):
        driver = start(name, threads=threads)
        driver.prefill(PROMPT, chunk=64)
        rows.append(_logits_of_last(driver))
    assert np.array_equal(rows[0], rows[1]) and np.array_equal(rows[0], rows[2])


@pytest.mark.parametrize(("flash", "threads"), [(False, 1), (True, 2)])
def test_steps_whose_bits_count_give_up_a_thread_only_without_flash_attention(
    start: Start, flash: bool, threads: int
) -> None:
    runner = start(flash=flash, threads=2).runner
    assert isinstance(runner, LlamaCppRunner)
    runner._watch.threads = 1
    assert runner._step_threads(StepPlan(0, (), (), exact=True)) == threads
    assert runner._step_threads(StepPlan(0, (), ())) == 1


@pytest.mark.parametrize(
    ("kv_type", "flash", "widths"),
    [
        ("f16", True, Widths(prefill=(128, 192), mixed=(64, 128, 192))),
        ("f16", False, Widths()),
        ("q8_0", True, Widths()),
    ],
)
def test_prompts_fill_tiles_where_attention_has_them(
    start: Start, kv_type: str, flash: bool, widths: Widths
) -> None:
    assert start(step=192, kv_type=kv_type, flash=flash).runner.capabilities.widths == widths


def test_architecture_that_the_library_computes_one_by_one_gets_one_row(start: Start) -> None:
    can = start(architecture="plamo2").runner.capabilities
    assert (can.max_rows, can.max_slots) == (1, 4)
    assert "one text" in can.limits[0]
    assert start(architecture="plamo3").runner.capabilities.max_rows == 4


def test_rows_of_several_sequences_do_not_mix(start: Start) -> None:
    driver = start(step=128)
    alone = [driver.prefill(p, seq=i, slot=i).samples[0].token for i, p in enumerate(_three())]
    driver.step(memory=[Drop(0), Drop(1), Drop(2)], leave=[0, 1, 2])
    prompts = _three()
    rows = [StepRow(i, i, 0, p) for i, p in enumerate(prompts)]
    together = driver.step(
        *rows,
        positions=[LogitsPosition(i, len(p) - 1, i) for i, p in enumerate(prompts)],
        enter=[Enter(i, i, p, len(p), GREEDY) for i, p in enumerate(prompts)],
    )
    assert [s.token for s in together.samples] == alone
    assert together.computed == tuple(map(len, prompts))
    assert together.earliest == (0, 0, 0)


def _three() -> list[tuple[int, ...]]:
    return [PROMPT[:20], PROMPT[30:61], PROMPT[70:80]]


def test_drafts_change_nothing_but_the_number_of_steps(start: Start) -> None:
    sampling = with_logprobs(GREEDY, 0)
    plain = start()
    first = plain.prefill(PROMPT, sampling=sampling).samples[0]
    expected = [(first.token, first.logprob)]
    for offset in range(8):
        row = StepRow(0, 0, len(PROMPT) + offset, LAST)
        sample = plain.step(row, positions=[LogitsPosition(0, 0, 0)]).samples[0]
        expected.append((sample.token, sample.logprob))
    text = [token for token, _ in expected]

    drafted = start()
    drafted.prefill(PROMPT, sampling=sampling)
    position, got = len(PROMPT), expected[:1]
    wrong = (text[3] + 1) % VOCAB
    for drafts in [(text[1], text[2], wrong, text[4]), (text[4], text[5]), ()]:
        row = StepRow(0, 0, position, LAST, drafts)
        memory = [Truncate(0, position)]
        points = [LogitsPosition(0, offset, 0) for offset in range(len(drafts) + 1)]
        result = drafted.step(row, positions=points, memory=memory)
        assert [s.index for s in result.samples] == list(range(len(result.samples)))
        assert result.computed == (len(drafts) + 1,)
        position += len(result.samples)
        got += [(s.token, s.logprob) for s in result.samples]
    # Two accepted and the true token in place of the wrong one; two and one more; one.
    expected = expected[: 1 + 3 + 3 + 1]
    assert [token for token, _ in got] == [token for token, _ in expected]
    assert [logprob for _, logprob in got] == pytest.approx([p for _, p in expected], abs=CLOSE)


def test_penalties_count_what_stands_before_each_point_and_no_rejected_draft(start: Start) -> None:
    """The bias says in which order the tokens come, and each comes once: the count of output forbids it."""
    text = [40, 30, 20, 10, 50, 60, 70]
    bias = tuple((token, 9000.0 - 1000.0 * place) for place, token in enumerate(text))
    sampling = replace(GREEDY, presence_penalty=1e6, logit_bias=bias)
    driver = start()
    assert driver.prefill([1, 2, 3], sampling=sampling).samples[0].token == text[0]
    row = StepRow(0, 0, 3, LAST, (text[1], text[4], text[5]))
    result = driver.step(row, positions=[LogitsPosition(0, o, 0) for o in range(4)])
    assert [s.token for s in result.samples] == text[1:3]
    rest = StepRow(0, 0, 5, LAST, tuple(text[3:5]))
    result = driver.step(
        rest, positions=[LogitsPosition(0, o, 0) for o in range(3)], memory=[Truncate(0, 5)]
    )
    assert [s.token for s in result.samples] == text[3:6]


def test_dry_sees_the_drafts_before_each_point_and_no_rejected_draft(start: Start) -> None:
    """The bias prefers low tokens, and a harsh DRY forbids each that would continue a repetition."""
    bias = ((1, 9000.0), (2, 8000.0), (3, 7000.0), (4, 6000.0))
    sampling = replace(
        GREEDY, dry_multiplier=1e4, dry_base=1.0, dry_allowed_length=1, logit_bias=bias
    )
    driver = start()
    text = [1, 2, 1]
    assert driver.prefill(text, sampling=sampling).samples[0].token == 1
    # After 1, 2, 1, 1 both 2 and 1 have followed 1 before. 3 has not, and 1 has not followed 3.
    row = StepRow(0, 0, 3, LAST, (3, 2, 4))
    result = driver.step(row, positions=[LogitsPosition(0, o, 0) for o in range(4)])
    assert [s.token for s in result.samples] == [3, 1]
    # After 1, 2, 1, 1, 3, 1: 2, 1 and 3 have followed 1.
    rest = StepRow(0, 0, 5, LAST, (4, 1))
    result = driver.step(
        rest, positions=[LogitsPosition(0, o, 0) for o in range(3)], memory=[Truncate(0, 5)]
    )
    *first, last = [s.token for s in result.samples]
    assert first == [4, 1]
    assert last not in {1, 2, 3, 4}


def test_choices_are_drawn_from_one_row_and_go_on_alone(start: Start) -> None:
    driver = start()
    warm = SamplingParams(temperature=1.5, top_p=1.0, min_p=0.0, seed=9)
    enter = [Enter(i, i, PROMPT[:40], 40, replace(warm, choice=i)) for i in range(3)]
    result = driver.step(
        StepRow(0, 0, 0, PROMPT[:40]),
        positions=[LogitsPosition(0, 39, i) for i in range(3)],
        enter=enter,
    )
    firsts = [s.token for s in result.samples]
    assert len(set(firsts)) > 1
    seconds = driver.step(
        *(StepRow(i, i, 40, LAST) for i in range(3)),
        positions=[LogitsPosition(i, 0, i) for i in range(3)],
        memory=[Alias(0, 1, 40), Alias(0, 2, 40)],
    )
    # Each as if it had been alone.
    lone = start()
    for choice in range(3):
        sampling = replace(warm, choice=choice)
        begun = lone.prefill(PROMPT[:40], seq=choice, sampling=sampling, memory=[Drop(0)]).samples[
            0
        ]
        assert begun.token == firsts[choice]
        assert lone.go_on(40, 1, seq=choice) == [seconds.samples[choice].token]


def test_prompt_logprobs_are_the_log_softmax_of_the_rows(start: Start) -> None:
    """More rows with logits than one decode may bring: the step is split."""
    driver = start(step=128)
    prompt = PROMPT[:100]
    enter = [Enter(0, 0, prompt, 100, with_logprobs(GREEDY, 2))]
    points = [LogitsPosition(0, i, 0, "prompt", prompt[i + 1], 3) for i in range(99)]
    result = driver.step(
        StepRow(0, 0, 0, prompt), positions=[*points, LogitsPosition(0, 99, 0)], enter=enter
    )
    assert [s.index for s in result.samples] == list(range(100))
    reference = start(step=128)
    for offset in (0, 1, 63, 64, 65, 98):
        reference.prefill(prompt[: offset + 1], memory=[Drop(0)])
        expected = _log_softmax(_logits_of_last(reference))
        sample = result.samples[offset]
        assert sample.token == prompt[offset + 1]
        assert sample.logprob == pytest.approx(expected[sample.token], abs=CLOSE)
        assert [lp for _, lp in sample.top] == pytest.approx(np.sort(expected)[:-4:-1], abs=CLOSE)
    drawn = result.samples[99]
    assert drawn.logprob is not None
    assert len(drawn.top) == 2
    assert drawn.top[0][0] == drawn.token
    assert drawn.top[0][1] == pytest.approx(drawn.logprob)


def test_a_mask_leaves_only_its_tokens(start: Start) -> None:
    driver = start()
    allowed = np.zeros(-(-VOCAB // 32) * 32, np.uint8)
    allowed[[7, 31, 200]] = 1
    words = np.packbits(allowed, bitorder="little").tobytes()
    enter = [Enter(0, 0, PROMPT[:10], 10, GREEDY)]
    row = StepRow(0, 0, 0, PROMPT[:10])
    result = driver.step(
        row, positions=[LogitsPosition(0, 9, 0)], enter=enter, masks=[Mask(0, words)]
    )
    best = max([7, 31, 200], key=lambda t: _logits_of_last(driver)[t])
    assert result.samples[0].token == best


def test_no_room_is_a_result_and_the_cache_works_on(start: Start) -> None:
    driver = start(context=200, step=250, slots=2)
    assert driver.runner.capabilities.kv_tokens == 200  # the cache itself has 240 cells
    driver.prefill(PROMPT, seq=0, slot=0)
    known = PROMPT[:120]
    full = driver.step(
        StepRow(0, 0, 150, LAST),
        StepRow(1, 1, 0, known),
        positions=[LogitsPosition(0, 0, 0), LogitsPosition(1, 119, 1)],
        enter=[Enter(1, 1, known, 120, GREEDY)],
    )
    assert (full.status, full.computed, full.samples) == ("out_of_memory", (0, 0), ())
    result = driver.step(
        StepRow(1, 1, 0, known), positions=[LogitsPosition(0, 119, 1)], memory=[Drop(0)], leave=[0]
    )
    assert result.status == "ok"
    assert len(result.samples) == 1


def test_an_aborted_step_says_what_holds_and_is_continued(start: Start) -> None:
    driver = start(context=4096, step=2048)
    long = PROMPT * 13
    fresh = driver.prefill(long).samples[0].token
    driver.step(memory=[Drop(0)])
    driver.step(StepRow(0, 0, 0, long[:5]))
    with asking_to_abort(driver):
        result = driver.step(
            StepRow(0, 0, 5, long[5:]), positions=[LogitsPosition(0, len(long) - 6, 0)]
        )
    assert (result.status, result.computed, result.samples) == ("aborted", (0,), ())
    again = driver.step(StepRow(0, 0, 5, long[5:]), positions=[LogitsPosition(0, len(long) - 6, 0)])
    assert again.samples[0].token == fresh


def test_a_closed_runner_can_be_closed_again(start: Start) -> None:
    driver = start()
    driver.runner.close()
    driver.runner.close()


def test_memory_says_what_was_taken_and_counts_parked_state(start: Start) -> None:
    report = start().runner.memory()
    assert report.weights_bytes > 400_000
    assert report.kv_bytes > 200_000
    assert report.compute_bytes > 0


def test_layers_for_a_card_that_this_build_cannot_use_stay_on_the_cpu(start: Start) -> None:
    from localchat_llamacpp.native import library

    if library().api.llama_supports_gpu_offload():
        pytest.skip("this build can offload")
    says: list[str] = []
    start(gpu_layers=-1, says=says)
    assert says == []  # the plan says it
