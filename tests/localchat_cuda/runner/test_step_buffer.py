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


def test_a_step_that_is_too_long_is_refused() -> None:
    buffer = StepBuffer(8, 1, CPU)
    buffer.begin_step()
    buffer.write([0] * 8)
    with pytest.raises(AssertionError, match="more than 8 words"):
        buffer.write([0])
