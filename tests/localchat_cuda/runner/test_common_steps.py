"""Which steps are prepared before they come."""

import random
from dataclasses import replace

from localchat.backend_api.interface import Capabilities
from localchat_cuda.runner.common_steps import DRAFT_ROWS, common_steps, covering_steps
from localchat_cuda.runner.cuda_graphs import GRAPHS
from localchat_cuda.runner.input_batch import (
    DRAFT_STEP_TOKENS,
    MAX_DECODE_WIDTH,
    BatchConfig,
    StepShape,
    TokenSpan,
    build_input_batch,
)

CONFIG = BatchConfig(
    heads=28, key_heads=4, head_dim=128, page_tokens=64, sms=132, context_tokens=8192
)
CAN = Capabilities(
    context_tokens=8192, kv_tokens=1 << 17, max_slots=128, max_rows=128, max_step_tokens=8192,
    draft_rows=DRAFT_ROWS, draft_step_tokens=DRAFT_STEP_TOKENS,
)  # fmt: skip


PREPARED = {
    build_input_batch(spans, CONFIG, CAN.max_slots).shape
    for steps in (covering_steps, common_steps)
    for spans in steps(CAN, CAN.max_slots)
}


def shape(spans: list[TokenSpan]) -> StepShape:
    return build_input_batch(spans, CONFIG, CAN.max_slots).shape


def test_every_step_with_drafts_is_prepared() -> None:
    """Launched kernel by kernel, one of them takes as long as ten others."""
    dice = random.Random(5)
    for _ in range(3000):
        rows = dice.randint(1, DRAFT_ROWS)
        widths = [1] * rows
        for _ in range(dice.randint(1, DRAFT_STEP_TOKENS - rows)):
            at = dice.randrange(rows)
            widths[at] = min(widths[at] + 1, MAX_DECODE_WIDTH)
        history = dice.randint(1, 7000)
        spans = [
            TokenSpan(slot, dice.randint(1, history), width) for slot, width in enumerate(widths)
        ]
        assert shape(spans) in PREPARED, widths


def test_steps_of_a_burst_are_prepared() -> None:
    """Also while the first texts are short, and whatever the prompts' parts."""
    dice = random.Random(6)
    for _ in range(2000):
        history = int(2 ** dice.uniform(4, 11.5))
        rows = dice.randint(1, CAN.max_rows)
        decoding = [TokenSpan(slot, dice.randint(1, history), 1) for slot in range(rows)]
        assert shape(decoding) in PREPARED, (rows, history)
        prompts = [
            TokenSpan(slot, dice.choice((0, 700)), dice.randint(33, 220))
            for slot in range(rows, rows + dice.randint(1, 4))
        ]
        mixed = shape([*decoding, *prompts])
        assert mixed.tokens > 1024 or mixed in PREPARED, mixed


def test_many_prompts_at_once_run_in_a_prepared_graph() -> None:
    dice = random.Random(8)
    covers = {shape(spans) for spans in covering_steps(CAN, CAN.max_slots)}
    for _ in range(500):
        rows = dice.choice((0, 0, dice.randint(1, 64)))
        spans = [TokenSpan(slot, dice.randint(1, 250), 1) for slot in range(rows)]
        spans += [
            TokenSpan(slot, dice.choice((0, 30)), dice.randint(20, 40))
            for slot in range(rows, rows + dice.randint(8, 45))
        ]
        found = [
            cover
            for cover in covers
            if cover.may_cover(shape(spans))
            and build_input_batch(spans, CONFIG, CAN.max_slots, cover).shape == cover
        ]
        assert found, shape(spans)


def test_what_is_prepared_leaves_room_for_other_graphs() -> None:
    assert len(PREPARED) < 0.75 * GRAPHS


def test_a_model_without_drafts_prepares_none() -> None:
    states = replace(CAN, rewind="checkpoint")
    narrow = [
        shape(each) for each in common_steps(states, CAN.max_slots) if len(each) <= DRAFT_ROWS
    ]
    assert narrow
    assert all(each.widest <= 1 for each in narrow if not each.tiles)


def test_a_covered_step_has_the_tokens_of_its_rows_and_the_shape_of_the_graph() -> None:
    dice = random.Random(7)
    covered = 0
    for _ in range(3000):
        rows = dice.randint(0, 100)
        spans = [TokenSpan(slot, dice.randint(1, 600), 1) for slot in range(rows)]
        spans += [
            TokenSpan(slot, dice.choice((0, 512)), dice.randint(33, 512))
            for slot in range(rows, rows + dice.randint(not rows, 5))
        ]
        own = shape(spans)
        for cover in PREPARED:
            if not cover.may_cover(own):
                continue
            batch = build_input_batch(spans, CONFIG, CAN.max_slots, cover)
            if batch.shape != cover:
                continue
            covered += 1
            assert sum(span.width for span in batch.spans) == cover.tokens
            assert len(batch.spans) == cover.decode_sequences + cover.prefill_sequences
            for span, token in zip(spans, batch.first, strict=True):
                index = batch.spans.index(span)
                assert sum(other.width for other in batch.spans[:index]) == token
    assert covered > 1000
