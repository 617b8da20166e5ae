"""The buffer that carries the integers of a step: slices, alignment, limits."""

import numpy as np
import pytest
import torch

from localchat_cuda.runner.step_buffer import ALIGNED_WORDS, StepBuffer

CPU = torch.device("cpu")


def test_slices_give_what_was_written_in_its_own_type() -> None:
    buffer = StepBuffer(64, 1, CPU)
    buffer.begin_step()
    narrow = buffer.write([1, -2, 3])
    wide = buffer.write(np.array([1 << 40, -5]), int64=True)
    empty = buffer.write([])
    buffer.send()
    assert (narrow.view().tolist(), narrow.view().dtype) == ([1, -2, 3], torch.int32)
    assert (wide.view().tolist(), wide.view().dtype) == ([1 << 40, -5], torch.int64)
    assert (empty.size, empty.view().tolist()) == (0, [])


def test_every_slice_begins_at_16_bytes_and_a_step_repeats_the_places_of_the_last() -> None:
    buffer = StepBuffer(64, 1, CPU)
    places = []
    for _ in range(2):
        buffer.begin_step()
        slices = [buffer.write(range(count), int64=count == 3) for count in (1, 3, 5, 4)]
        assert all(one.start % ALIGNED_WORDS == 0 for one in slices)
        assert all(one.view().data_ptr() % 16 == 0 for one in slices)
        places.append([one.start for one in slices])
    assert places[0] == places[1] == [0, 4, 12, 20]


@pytest.mark.parametrize("int64", [False, True])
def test_an_array_without_room_gets_memory_of_its_own(int64: bool) -> None:
    buffer = StepBuffer(8, 1, CPU)
    buffer.begin_step()
    first = buffer.write([1] * 5)
    apart = buffer.write(np.arange(300), int64=int64)
    last = buffer.write([2])
    buffer.send()
    assert (first.view().tolist(), last.view().tolist()) == ([1] * 5, [2])
    assert apart.view().tolist() == list(range(300))
    assert apart.view().dtype == (torch.int64 if int64 else torch.int32)
    assert apart.view().data_ptr() % 16 == 0
