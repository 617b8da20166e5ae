"""The sampler over kernels, in Triton's interpreter: settings of many choices on their way to the device."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from localchat.backend_api.interface import Capabilities, Enter, SamplingParams
from localchat.backend_api.sampling.reference import Sampler
from localchat_cuda.kernels.sampling.state import FIELDS, SamplingTensors
from localchat_cuda.runner.device_state import SequenceSlot, StateTable
from localchat_cuda.runner.sampler import SampleBatch, SampledTokens, TritonSampler
from localchat_cuda.runner.step_buffer import StepBuffer
from tests.support.tiny_engine_core import ON_GPU

pytestmark = pytest.mark.skipif(ON_GPU, reason="for the interpreter")

CPU, VOCABULARY = torch.device("cpu"), 1500
SLOTS, CHOICES = 2, 64
rng = np.random.default_rng(5)
CAN = Capabilities(128, 4 * 64, SLOTS, SLOTS, 128, block_tokens=64)


def biased(seed: int) -> SamplingParams:
    """As many biases as a request may have."""
    values = np.random.default_rng(seed).normal(size=1024) * 3
    biases = tuple((int(i), float(v)) for i, v in enumerate(values))
    return SamplingParams(seed=seed, temperature=1.0, top_p=1.0, min_p=0.0, logit_bias=biases)


def entered(table: StateTable, params: SamplingParams, slot: int) -> list[SequenceSlot]:
    """A request and its forks, as the scheduler enters them."""
    return table.add(
        [
            Enter(100 * slot + n, slot if n == 0 else -1, (1, 2), 2, replace(params, choice=n))
            for n in range(CHOICES)
        ]
    )


def samples(
    sampler: TritonSampler, buffer: StepBuffer, sequences: list[SequenceSlot], logits: torch.Tensor
) -> list[int]:
    """A step that samples every sequence from one row of logits."""
    buffer.begin_step()
    count = len(sequences)
    batch = SampleBatch(
        (0, 1), {}, [0] * count, sequences, [2] * count, [None] * count, (),
        buffer.write([0] * count), buffer.write([one.row for one in sequences]),
        buffer.write([2] * count), None, buffer.write([0] * count, int64=True),
    )  # fmt: skip
    sampler.write_settings(buffer)
    buffer.send()
    sampler.apply_settings()
    out = SampledTokens(
        torch.zeros(count, dtype=torch.int32), torch.zeros(count), torch.zeros(count)
    )
    sampler.sample(logits, batch, out)
    return out.tokens.tolist()


def test_64_choices_with_1024_biases_each_are_sampled_whatever_the_buffer_holds() -> None:
    table = StateTable(CAN, CPU)
    buffer, sampler = StepBuffer(2000, 1, CPU), TritonSampler(table, VOCABULARY, 2 * CHOICES)
    asked = biased(1), biased(2)
    sequences = [one for slot in range(SLOTS) for one in entered(table, asked[slot], slot)]
    sampler.add(sequences)
    logits = torch.tensor(rng.normal(size=(1, VOCABULARY)).astype(np.float32) * 2)
    some = sequences[:3] + sequences[CHOICES : CHOICES + 2] + sequences[-2:]
    found = samples(sampler, buffer, some, logits)
    reference = Sampler(VOCABULARY)
    assert found == [reference.draw(logits[0].numpy(), one.sampling, 2).token for one in some]
    assert len(set(found)) > 1


def test_settings_that_found_no_memory_are_written_by_the_next_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = StateTable(CAN, CPU)
    buffer, sampler = StepBuffer(2000, 1, CPU), TritonSampler(table, VOCABULARY, 8)
    (first, *_) = entered(table, biased(3), 0)
    sampler.add([first])

    def full(biases: int) -> None:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(sampler, "_grow", full)
        buffer.begin_step()
        with pytest.raises(torch.OutOfMemoryError):
            sampler.write_settings(buffer)
    (second, *_) = entered(table, biased(4), 1)
    sampler.add([second])
    logits = torch.tensor(rng.normal(size=(1, VOCABULARY)).astype(np.float32) * 2)
    reference = Sampler(VOCABULARY)
    wanted = [reference.draw(logits[0].numpy(), one.sampling, 2).token for one in (first, second)]
    assert samples(sampler, buffer, [first, second], logits) == wanted


def test_settings_are_entries_of_one_array_whose_parts_begin_at_16_bytes() -> None:
    held = SamplingTensors.empty(5, 4, CPU)
    floats = np.arange(2 * len(FIELDS), dtype=np.float32).reshape(2, -1)
    places, values = held.packed(
        [4, 1],
        floats=floats,
        keys=[-3, 2**40],
        top_k=[7, 8],
        bias_counts=[1, 2],
        prompt_tokens=[5, 6],
    )
    held.words.index_copy_(0, torch.from_numpy(places), torch.from_numpy(values))
    rows = torch.tensor([4, 1])
    assert held.floats[rows].tolist() == floats.tolist()
    assert held.keys[rows].tolist() == [-3, 2**40]
    assert held.top_k.tolist() == [0, 8, 0, 0, 7]
    assert held.bias_counts.tolist() == [0, 2, 0, 0, 1]
    assert held.prompt_tokens.tolist() == [0, 6, 0, 0, 5]
    parts = (held.floats, held.keys, held.top_k, held.bias_counts, held.prompt_tokens)
    begin = held.words.data_ptr()
    assert all((part.data_ptr() - begin) % 16 == 0 and part.is_contiguous() for part in parts)
