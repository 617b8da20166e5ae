"""Samples the tokens of a step: kernels on a GPU, the numpy reference of the contract on a CPU.

Letters: R rows of logits, P logits positions, V vocabulary. A position samples from one row of logits with
one row of the sampling settings; several positions may share a row of logits.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from localchat.backend_api.sampling.gumbel import REACH, G, mix
from localchat.backend_api.sampling.reference import GREEDY_BELOW, Sampler
from localchat.backend_api.sampling.token_counts import TokenCounts
from localchat.backend_api.step import Mask, SamplingParams
from localchat_cuda.kernels.sampling import sample
from localchat_cuda.kernels.sampling import state as sample_state
from localchat_cuda.kernels.sampling.rescore import DISCARDED, RescoreScratch, Rescoring
from localchat_cuda.runner.device_state import SequenceSlot, StateTable
from localchat_cuda.runner.step_buffer import BufferSlice, StepBuffer

_BIASES = 16
"""Capacity per row to begin with."""


@dataclass(frozen=True, slots=True)
class SampleBatch:
    """P logits positions that one call samples; arrays are on the host, and in the step buffer as slices."""

    logits_range: tuple[int, int]
    """First and end row of the step's logits that `rows` count in."""
    results: dict[int, int]
    """By number of a position in the plan, its index among the sampled tokens of the step."""
    rows: Sequence[int]
    """Of the logits."""
    sequences: Sequence[SequenceSlot]
    positions: Sequence[int]
    """Of the sampled tokens in their sequences."""
    masks: Sequence[Mask | None]
    """Read only while sampling: they may still be computed."""
    slots: Sequence[int]
    """Whose tokens penalties count; empty where no sequence has penalties."""
    row_slice: BufferSlice
    sequence_slice: BufferSlice
    """Rows of the sampling settings."""
    position_slice: BufferSlice
    slot_slice: BufferSlice | None
    target_slice: BufferSlice
    """Entries of the token table for the sampled tokens, int64."""
    host_slice: BufferSlice | None = None
    """Address of the host memory for the results, int64 [1]; None without kernels."""


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """Results on the device [P]: tokens int32, logprobs and normalizers fp32."""

    tokens: torch.Tensor
    logprobs: torch.Tensor
    normalizers: torch.Tensor


class DeviceSampler(Protocol):
    """Holds the sampling settings of all sequences.

    The settings of new sequences stay to be written until `apply_settings` did it, however many steps run out
    of memory before that."""

    reallocated: bool
    """Settings have a new address; the runner resets this once it dropped its graphs."""

    def add(self, added: Sequence[SequenceSlot]) -> None:
        """Note new sequences."""
        ...

    def write_settings(self, buffer: StepBuffer) -> None:
        """Put the settings of new sequences into the buffer, before it is sent."""
        ...

    def apply_settings(self) -> None:
        """Update the settings on the device, after the buffer was sent."""
        ...

    def sample(
        self,
        logits: torch.Tensor,
        batch: SampleBatch,
        out: SampledTokens,
        rescoring: Rescoring | None = None,
    ) -> None:
        """Sample from logits [R, V], which are only read; with `rescoring` they are approximate, and those of
        tokens that can be drawn become exact."""
        ...


class ReferenceSampler:
    """The contract itself, on the CPU."""

    reallocated = False

    def __init__(self, table: StateTable, vocabulary: int) -> None:
        self._table = table
        self._sampler = Sampler(vocabulary)

    def add(self, added: Sequence[SequenceSlot]) -> None:
        """Nothing: a sample batch carries its sequences with their settings."""

    def write_settings(self, buffer: StepBuffer) -> None:
        """Nothing."""

    def apply_settings(self) -> None:
        """Nothing."""

    def sample(
        self,
        logits: torch.Tensor,
        batch: SampleBatch,
        out: SampledTokens,
        rescoring: Rescoring | None = None,
    ) -> None:
        assert rescoring is None, "there are approximate logits with kernels only"
        table = self._table.tokens_by_slot
        each = zip(batch.rows, batch.sequences, batch.positions, batch.masks, strict=True)
        for i, (number, sequence, position, mask) in enumerate(each):
            row = logits[number].numpy()
            counts = None
            if sequence.sampling.penalised:
                tokens = table[batch.slots[i], :position].tolist()
                counts = TokenCounts(tokens, sequence.prompt_tokens)
            words = mask.words if mask is not None else None
            found = self._sampler.draw(row, sequence.sampling, position, counts, words)
            out.tokens[i] = found.token
            out.logprobs[i] = found.logprob if found.logprob is not None else 0.0
            out.normalizers[i] = torch.logsumexp(logits[number], 0)


class TritonSampler:
    """The kernels of kernels/sampling/."""

    def __init__(
        self, table: StateTable, vocabulary: int, max_positions: int, *, rescores: bool = False
    ) -> None:
        """`max_positions`: of one sample batch. `rescores`: logits may be approximate."""
        self._table = table
        self._vocabulary = vocabulary
        self._max_positions = max_positions
        self._device = table.device
        self._settings = sample_state.SamplingTensors.empty(
            table.setting_rows, _BIASES, self._device
        )
        self._scratch = sample_state.Scratch.empty(max_positions, vocabulary, self._device)
        # Padding: nothing is computed again for it, and no penalty divides by 0.
        self._settings.top_k[table.scratch] = DISCARDED
        self._settings.floats[table.scratch, sample_state.FIELDS.index("repetition")] = 1.0
        self._rescore_scratch = (
            RescoreScratch.empty(max_positions, vocabulary, self._device) if rescores else None
        )
        self._counts: torch.Tensor | None = None
        self._new: dict[int, SequenceSlot] = {}
        """Sequences whose settings are not on the device yet, by row."""
        self._written: dict[str, BufferSlice] = {}
        self.reallocated = False

    def add(self, added: Sequence[SequenceSlot]) -> None:
        self._new.update((one.row, one) for one in added)

    def write_settings(self, buffer: StepBuffer) -> None:
        self._written = {}
        new = list(self._new.values())
        if not new:
            return
        self._grow(max(len(one.sampling.logit_bias) for one in new))
        places, values = self._settings.packed(
            [one.row for one in new],
            floats=np.array([_floats(one.sampling) for one in new], np.float32),
            keys=[_key(one.sampling) for one in new],
            top_k=[min(one.sampling.top_k, 2**31 - 1) for one in new],
            bias_counts=[len(one.sampling.logit_bias) for one in new],
            prompt_tokens=[one.prompt_tokens for one in new],
        )
        self._written = {
            "places": buffer.write(places, int64=True),
            "values": buffer.write(values),
            **self._write_biases(new, buffer),
        }

    def _write_biases(
        self, new: Sequence[SequenceSlot], buffer: StepBuffer
    ) -> dict[str, BufferSlice]:
        """Biases are sent once for all choices of a request, which share them; the other choices' rows are
        copied from the first one's."""
        width = self._settings.bias_ids.shape[1]
        first: dict[int, int] = {}
        indices = []
        ids = []
        values = []
        sources = []
        copies = []
        for one in new:
            biases = one.sampling.logit_bias
            if not biases:
                continue
            row = first.setdefault(id(biases), one.row)
            if row != one.row:
                sources.append(row)
                copies.append(one.row)
                continue
            indices.append(np.arange(one.row * width, one.row * width + len(biases)))
            ids += [_bias_token(token, self._vocabulary) for token, _ in biases]
            values += [value for _, value in biases]
        if not indices:
            return {}
        write = buffer.write
        return {
            "bias_indices": write(np.concatenate(indices), int64=True),
            "bias_ids": write(ids),
            "bias_values": write(np.array(values, np.float32).view(np.int32)),
            "bias_sources": write(sources, int64=True),
            "bias_copies": write(copies, int64=True),
        }

    def _grow(self, biases: int) -> None:
        """Follow the state table, and a request with more biases than any before."""
        held = self._settings
        rows, width = held.bias_ids.shape
        wanted_rows = self._table.setting_rows
        if rows >= wanted_rows and width >= biases:
            return
        grown = sample_state.SamplingTensors.empty(
            wanted_rows, max(width, 1 << max(biases - 1, 0).bit_length()), self._device
        )
        for name in ("floats", "top_k", "keys", "bias_counts", "prompt_tokens"):
            getattr(grown, name)[:rows] = getattr(held, name)
        grown.bias_ids[:rows, :width] = held.bias_ids
        grown.bias_values[:rows, :width] = held.bias_values
        self._settings = grown
        self.reallocated = True

    def apply_settings(self) -> None:
        if not self._written:
            return
        new = {name: written.view() for name, written in self._written.items()}
        held = self._settings
        held.words.index_copy_(0, new["places"], new["values"])
        if "bias_ids" in new:
            indices = new["bias_indices"]
            held.bias_ids.view(-1).index_copy_(0, indices, new["bias_ids"])
            values = new["bias_values"].view(torch.float32)
            held.bias_values.view(-1).index_copy_(0, indices, values)
            sources = new["bias_sources"]
            copies = new["bias_copies"]
            if copies.numel():
                held.bias_ids.index_copy_(0, copies, held.bias_ids[sources])
                held.bias_values.index_copy_(0, copies, held.bias_values[sources])
        self._new.clear()

    def sample(
        self,
        logits: torch.Tensor,
        batch: SampleBatch,
        out: SampledTokens,
        rescoring: Rescoring | None = None,
    ) -> None:
        p = len(batch.rows)
        whole = self._scratch
        known = None
        if batch.slot_slice is not None:
            known = sample_state.PenaltyTokens(
                self._table.tokens_by_slot,
                batch.slot_slice.view(),
                self._settings.prompt_tokens,
                self._count_scratch(p),
            )
        masks, mask_rows = self._masks(batch)
        sample.draw(
            logits,
            batch.row_slice.view(),
            batch.sequence_slice.view(),
            batch.position_slice.view(),
            self._settings,
            sample_state.Scratch(
                whole.z[:p], whole.blocks[:p], whole.values[:p], whole.ids[:p], whole.counts[:p]
            ),
            out.tokens,
            out.logprobs,
            out.normalizers,
            known=known,
            masks=masks,
            mask_rows=mask_rows,
            rescoring=rescoring,
            rescore_scratch=None if rescoring is None else self._rescore_part(p),
        )

    def _rescore_part(self, positions: int) -> RescoreScratch:
        assert self._rescore_scratch is not None
        return self._rescore_scratch.part(positions)

    def _count_scratch(self, positions: int) -> torch.Tensor:
        """Scratch for penalty counts, allocated for the first request with penalties."""
        if self._counts is None:
            self._counts = torch.zeros(
                self._max_positions, self._vocabulary, dtype=torch.int32, device=self._device
            )
        return self._counts[:positions]

    def _masks(self, batch: SampleBatch) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        # Reading may wait for the words; the forward pass is queued by now.
        held = [mask.words for mask in batch.masks if mask is not None]
        if not held:
            return None, None
        size = 4 * -(-self._vocabulary // 32)
        words = np.stack([np.frombuffer(mask[:size].ljust(size, b"\0"), np.int32) for mask in held])
        numbers = iter(range(len(held)))
        rows = [next(numbers) if mask is not None else -1 for mask in batch.masks]
        return self._to_device(torch.from_numpy(words)), self._to_device(
            torch.tensor(rows, dtype=torch.int32)
        )

    def _to_device(self, values: torch.Tensor) -> torch.Tensor:
        if self._device.type == "cuda":
            values = values.pin_memory()
        return values.to(self._device, non_blocking=True)


def _floats(p: SamplingParams) -> tuple[float, ...]:
    """Columns of SamplingTensors.floats."""
    return (
        0.0 if p.temperature < GREEDY_BELOW else 1.0 / p.temperature,
        math.inf if p.typical_p < 1 else REACH * p.temperature,
        p.typical_p,
        p.top_p,
        min(0.0, math.log(p.min_p)) if p.min_p > 0 else -math.inf,
        p.repetition_penalty,
        p.frequency_penalty,
        p.presence_penalty,
    )


def _key(p: SamplingParams) -> int:
    """gumbel.draw_key before its last step, as a signed number."""
    key = mix((mix(p.seed + G) ^ p.choice) + G)
    return key - 2**64 if key >= 2**63 else key


def _bias_token(token: int, vocabulary: int) -> int:
    """A biased token id that fits 32 bits; one outside the vocabulary stays outside."""
    return token if 0 <= token < vocabulary else -1
