"""Steps laid out on the host: padding, tiles, shapes."""

import pytest
import torch

from localchat.backend_api.interface import Capabilities
from localchat_cuda.runner.device_state import StateTable
from localchat_cuda.runner.input_batch import (
    BatchConfig,
    ModelInputs,
    TokenSpan,
    build_input_batch,
    model_inputs,
    write_batch,
)
from localchat_cuda.runner.step_buffer import StepBuffer

CPU = torch.device("cpu")
SCRATCH_PAGE = 99


def inputs(spans: list[TokenSpan], context: int = 8192) -> tuple[ModelInputs, StateTable]:
    config = BatchConfig(4, 2, 64, 64, 4, context_tokens=context)
    can = Capabilities(context, SCRATCH_PAGE * 64, 4, 4, context, block_tokens=64)
    table = StateTable(can, CPU)
    buffer = StepBuffer(100_000, 1, CPU)
    buffer.begin_step()
    batch = build_input_batch(spans, config, table.scratch)
    slices = write_batch(batch, buffer, table)
    buffer.send()
    return model_inputs(batch, slices, table, None), table


@pytest.mark.parametrize("count", [17, 65, 257, 1025, 2904, 4096])
@pytest.mark.parametrize("others", [0, 3])
def test_padding_of_prompt_chunks_writes_to_the_scratch_page_alone(count: int, others: int) -> None:
    step, table = inputs(
        [TokenSpan(0, 64, count), *[TokenSpan(1 + i, 9, 1) for i in range(others)]]
    )
    padding = step.slots == table.scratch
    pages = table.block_tables[step.slots.long(), step.positions.long() // 64][padding]
    assert set(pages.tolist()) <= {SCRATCH_PAGE}
    assert int(step.batch.counts.sum()) == step.ids.shape[0]
    assert int((~padding).sum()) == count + others


def test_padding_is_one_text_as_far_as_its_block_table_goes() -> None:
    """More of them would be other shapes, and so other graphs."""
    step, _ = inputs([TokenSpan(0, 0, 2900)])
    assert step.batch.counts[:2].tolist() == [2900, 3072 - 2900]
    short, table = inputs([TokenSpan(0, 0, 70), TokenSpan(1, 0, 69)], context=70)
    assert short.batch.counts[:3].tolist() == [70, 69, 192 - 139]
    assert int(short.positions.max()) < table.columns
    shorter, table = inputs([TokenSpan(slot, 0, 40) for slot in range(4)], context=40)
    assert shorter.batch.counts[:5].tolist() == [*[40] * 4, 192 - 160]
    shorter, table = inputs([TokenSpan(slot, 0, 40) for slot in range(3)], context=40)
    assert shorter.batch.counts[:4].tolist() == [*[40] * 3, 8]
    single, table = inputs([TokenSpan(0, 0, 35)], context=20)
    assert max(single.batch.counts[1:].tolist()) == 20


def test_short_prompts_are_chunks_in_a_step_too_large_for_drafts() -> None:
    config = BatchConfig(4, 2, 64, 64, 4)
    few = build_input_batch([TokenSpan(slot, 30, 12) for slot in range(5)], config, 9)
    assert few.all_logits
    many = build_input_batch([TokenSpan(slot, 30, 12) for slot in range(8)], config, 9)
    assert not many.all_logits
    assert (many.shape.decode_tokens, many.shape.tokens) == (0, 128)
    mixed = [*[TokenSpan(slot, 30, 1) for slot in range(60)], TokenSpan(60, 30, 12)]
    batch = build_input_batch(mixed, config, 99)
    assert (batch.shape.decode_tokens, batch.shape.tokens) == (64, 128)


def test_all_arrays_are_aligned_as_kernels_were_compiled_for() -> None:
    """Triton compiles a kernel once more for a pointer that is not aligned to 16 bytes: seconds, in a step."""
    writers = [TokenSpan(slot, 90 + slot, 1) for slot in range(3)]
    for spans in (
        [*writers, TokenSpan(3, 0, 300)],
        [*writers, TokenSpan(3, 0, 5000)],
        [TokenSpan(0, 50, 17), TokenSpan(3, 0, 5000)],
        [TokenSpan(3, 0, 300)],
    ):
        step, _ = inputs(spans)
        assert step.prefill is not None
        arrays = [step.positions, step.slots, step.prefill.tiles]
        for part in (step.batch, step.prefill.batch, *([step.decode] if step.decode else [])):
            arrays += [part.starts, part.counts, part.lengths, part.slots]
        assert {each.data_ptr() % 16 for each in arrays} == {0}


def test_histories_have_fewer_split_counts_in_steps_with_prompts() -> None:
    """Each way is a graph, of every number of writers and width."""
    config = BatchConfig(28, 4, 128, 64, 132, context_tokens=8192)
    alone, beside = set(), set()
    for length in (10, 100, 300, 700, 1500, 3000, 6000, 8000):
        writer = TokenSpan(0, length, 1)
        alone.add(build_input_batch([writer], config, 3).shape.splits)
        beside.add(build_input_batch([writer, TokenSpan(1, 0, 500)], config, 3).shape.splits)
    assert beside <= {1, 4, 16, 64} and len(beside) < len(alone)


def test_a_lone_long_sequence_is_cut_into_more_ranges() -> None:
    config = BatchConfig(28, 4, 128, 64, 132, context_tokens=40_960)
    cut = [build_input_batch([TokenSpan(0, n, 1)], config, 3).shape.splits for n in (7000, 20_000)]
    assert cut == [16, 32]


def test_short_histories_have_a_range_for_every_page() -> None:
    """A range of two pages would take as long as if all had two."""
    config = BatchConfig(28, 4, 128, 64, 132, context_tokens=8192)
    cut = [
        build_input_batch([TokenSpan(0, n, 1)], config, 3).shape.splits
        for n in (63, 130, 300, 600, 1000)
    ]
    assert cut == [1, 4, 8, 16, 16]


def test_many_sequences_have_two_programs_on_a_multiprocessor() -> None:
    """Few have one: their kernels leave no shared memory for a second."""
    config = BatchConfig(28, 4, 128, 64, 132, context_tokens=8192)
    cut = [
        build_input_batch([TokenSpan(n, 1000, 1) for n in range(many)], config, 99).shape.splits
        for many in (8, 16, 32, 64)
    ]
    assert cut == [4, 2, 2, 1]


def test_latents_are_cut_into_more_ranges() -> None:
    """They have one key head, and so one program for each range."""
    config = BatchConfig(20, 1, 576, 64, 132, context_tokens=8192, latents=True)
    cut = [
        build_input_batch([TokenSpan(0, n, 1)], config, 3).shape.splits for n in (60, 1000, 7000)
    ]
    assert cut == [1, 16, 64]
    many = [TokenSpan(n, 7000, 1) for n in range(32)]
    assert build_input_batch(many, config, 40).shape.splits == 4
    drafts = TokenSpan(0, 7000, 9)  # padded to two texts of 16 rows for each head, in tiles of 32
    assert build_input_batch([drafts], config, 3).shape.splits == 4


def test_few_sequences_whose_ranges_are_pages_are_told_apart() -> None:
    config = BatchConfig(28, 4, 128, 64, 132, context_tokens=8192)

    def one_page(*spans: TokenSpan) -> bool:
        shape = build_input_batch(spans, config, 9).shape
        longest = max(each.start + each.width for each in spans)
        assert not shape.one_page or shape.splits * 64 >= longest
        return shape.one_page

    assert all(one_page(TokenSpan(0, n, 1)) for n in (1, 63, 64, 500, 1023))
    assert not one_page(TokenSpan(0, 1024, 1))
    assert one_page(*(TokenSpan(n, 400, 1) for n in range(4)))
    assert not one_page(*(TokenSpan(n, 700, 1) for n in range(4)))  # eight ranges of two pages
    assert not one_page(*(TokenSpan(n, 40, 1) for n in range(5)))
    assert not one_page(TokenSpan(0, 40, 2))  # drafts
    assert not one_page(TokenSpan(0, 40, 1), TokenSpan(1, 0, 100))
