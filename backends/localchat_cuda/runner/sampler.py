"""Samples the tokens of a step with kernels or the contract's reference.

Letters: R rows of logits, P logits positions, V vocabulary. A position samples from one row of logits with one
row of the sampling settings. Several positions may share a row of logits.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from localchat.backend_api.sampling.gumbel import G, mix
from localchat.backend_api.sampling.reference import Sampler
from localchat.backend_api.sampling.token_counts import TokenCounts
from localchat.backend_api.step import Mask, SamplingParams
from localchat_cuda.kernels.sampling import sample
from localchat_cuda.kernels.sampling import state as sample_state
from localchat_cuda.kernels.sampling.rare import RareTensors
from localchat_cuda.kernels.sampling.rescore import DISCARDED, RescoreScratch, Rescoring
from localchat_cuda.runner.device_state import SequenceSlot, StateTable
from localchat_cuda.runner.step_buffer import BufferSlice, StepBuffer, upload

_BIASES = 16
"""Initial capacity of logit biases per row."""


@dataclass(frozen=True, slots=True)
class SampleBatch:
    """P logits positions that one call samples.

    Arrays are on the host, and in the step buffer as slices."""

    logits_range: tuple[int, int]
    """First row and end of the range of the step's logits to which `rows` refer."""
    results: dict[int, int]
    """Index among the step's sampled tokens, by number of the plan's position."""
    rows: Sequence[int]
    """Rows of the logits."""
    sequences: Sequence[SequenceSlot]
    positions: Sequence[int]
    """Positions of the sampled tokens in their sequences."""
    masks: Sequence[Mask | None]
    """Masks, which are read only while sampling, because they may still be computed."""
    slots: Sequence[int]
    """Slots whose tokens penalties count; empty if no sequence has penalties."""
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


class ReferenceSampler:
    """Reference implementation of the contract, on the CPU."""

    reallocated = False

    def __init__(self, table: StateTable, vocabulary: int) -> None:
        self._table = table
        self._sampler = Sampler(vocabulary)

    def add(self, added: Sequence[SequenceSlot]) -> None:
        """Do nothing: a sample batch contains the settings of its sequences."""

    def write_settings(self, buffer: StepBuffer) -> None:
        """Do nothing."""

    def apply_settings(self) -> None:
        """Do nothing."""

    def sample(
        self,
        logits: torch.Tensor,
        batch: SampleBatch,
        out: SampledTokens,
        rescoring: Rescoring | None = None,
    ) -> None:
        assert rescoring is None, "only kernels compute approximate logits"
        table = self._table.tokens_by_slot
        columns = zip(batch.rows, batch.sequences, batch.positions, batch.masks, strict=True)
        for index, (row, sequence, position, mask) in enumerate(columns):
            counts = None
            if sequence.sampling.penalised:
                tokens = table[batch.slots[index], :position].tolist()
                counts = TokenCounts(tokens, sequence.prompt_tokens)
            words = mask.words if mask is not None else None
            sampled = self._sampler.draw(
                logits[row].numpy(), sequence.sampling, position, counts, words
            )
            out.tokens[index] = sampled.token
            out.logprobs[index] = sampled.logprob if sampled.logprob is not None else 0.0
            out.normalizers[index] = torch.logsumexp(logits[row], 0)


class TritonSampler:
    """Sampler that runs the kernels of kernels/sampling/, with the sampling settings of all sequences.

    The settings of new sequences stay pending until `apply_settings`, even if steps run out of memory
    before."""

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
        # Padding must not be rescored, and its repetition penalty must not divide by 0.
        self._settings.top_k[table.scratch] = DISCARDED
        self._settings.floats[table.scratch, sample_state.REPETITION.value] = 1.0
        self._rescore_scratch: RescoreScratch | None = None
        if rescores:
            self._rescore_scratch = RescoreScratch.empty(max_positions, vocabulary, self._device)
        self._counts: torch.Tensor | None = None
        self._breakers: torch.Tensor | None = None
        """Tokens that break repetitions, by row of the settings [S, words], from the first request with any."""
        self._new: dict[int, SequenceSlot] = {}
        """Sequences whose settings are not on the device yet, by row."""
        self._written: dict[str, BufferSlice] = {}
        self.reallocated = False
        """Settings have a new address. The runner resets this once it has dropped its graphs."""

    def add(self, added: Sequence[SequenceSlot]) -> None:
        """Add new sequences."""
        self._new.update((sequence.row, sequence) for sequence in added)

    def write_settings(self, buffer: StepBuffer) -> None:
        """Write the settings of new sequences to the buffer, before it is sent."""
        self._written = {}
        new = list(self._new.values())
        if not new:
            return
        settings = [sequence.sampling for sequence in new]
        columns = sample_state.FIELDS.values()
        self._grow(max(len(sampling.logit_bias) for sampling in settings))
        indices, values = self._settings.packed(
            [sequence.row for sequence in new],
            floats=np.array(
                [[column(sampling) for column in columns] for sampling in settings], np.float32
            ),
            keys=[_key(sampling) for sampling in settings],
            top_k=[min(sampling.top_k, 2**31 - 1) for sampling in settings],
            bias_counts=[len(sampling.logit_bias) for sampling in settings],
            prompt_tokens=[sequence.prompt_tokens for sequence in new],
        )
        self._written = {
            "indices": buffer.write(indices, int64=True),
            "values": buffer.write(values),
            **self._write_biases(new, buffer),
        }

    def _write_biases(
        self, new: Sequence[SequenceSlot], buffer: StepBuffer
    ) -> dict[str, BufferSlice]:
        """Write the logit biases of new sequences.

        The choices of a request share their biases, which are sent once. The rows of the other choices are
        copied from the first one."""
        width = self._settings.bias_ids.shape[1]
        first_rows: dict[int, int] = {}
        indices = []
        ids = []
        values = []
        sources = []
        copies = []
        for sequence in new:
            biases = sequence.sampling.logit_bias
            if not biases:
                continue
            first_row = first_rows.setdefault(id(biases), sequence.row)
            if first_row != sequence.row:
                sources.append(first_row)
                copies.append(sequence.row)
                continue
            begin = sequence.row * width
            indices.append(np.arange(begin, begin + len(biases)))
            # A token outside the vocabulary, which may have more than 32 bits, becomes -1.
            ids += [token if 0 <= token < self._vocabulary else -1 for token, _ in biases]
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
        """Grow the settings to the rows of the state table, and to `biases` per row."""
        old = self._settings
        rows, width = old.bias_ids.shape
        new_rows = self._table.setting_rows
        if rows >= new_rows and width >= biases:
            return
        new_width = max(width, 1 << max(biases - 1, 0).bit_length())
        grown = sample_state.SamplingTensors.empty(new_rows, new_width, self._device)
        for name in ("floats", "top_k", "keys", "bias_counts", "prompt_tokens"):
            getattr(grown, name)[:rows] = getattr(old, name)
        grown.bias_ids[:rows, :width] = old.bias_ids
        grown.bias_values[:rows, :width] = old.bias_values
        self._settings = grown
        self.reallocated = True

    def apply_settings(self) -> None:
        """Update the settings on the device, after the buffer is sent."""
        if not self._written:
            return
        new = {name: written.view() for name, written in self._written.items()}
        settings = self._settings
        settings.words.index_copy_(0, new["indices"], new["values"])
        if "bias_ids" in new:
            indices = new["bias_indices"]
            settings.bias_ids.view(-1).index_copy_(0, indices, new["bias_ids"])
            values = new["bias_values"].view(torch.float32)
            settings.bias_values.view(-1).index_copy_(0, indices, values)
            sources = new["bias_sources"]
            copies = new["bias_copies"]
            if copies.numel():
                settings.bias_ids.index_copy_(0, copies, settings.bias_ids[sources])
                settings.bias_values.index_copy_(0, copies, settings.bias_values[sources])
        for row, sequence in self._new.items():
            if sequence.sampling.dry_breakers:
                words = self._mask_words(sequence.sampling.dry_breakers)
                self._breaker_rows()[row] = upload(torch.from_numpy(words), self._device)
        self._new.clear()

    def sample(
        self,
        logits: torch.Tensor,
        batch: SampleBatch,
        out: SampledTokens,
        rescoring: Rescoring | None = None,
    ) -> None:
        """Sample from logits [R, V], which stay unchanged.

        `rescoring`: the logits are approximate, and exact ones are computed for tokens that can be sampled."""
        p = len(batch.rows)
        penalty_tokens = None
        if batch.slot_slice is not None:
            penalty_tokens = sample_state.PenaltyTokens(
                self._table.tokens_by_slot,
                batch.slot_slice.view(),
                self._settings.prompt_tokens,
                self._count_scratch(p),
            )
        rescore_scratch = None
        if rescoring is not None and self._rescore_scratch is not None:
            rescore_scratch = self._rescore_scratch.part(p)
        draws = sample_state.Draws(
            batch.row_slice.view(), batch.sequence_slice.view(), batch.position_slice.view()
        )
        sample.draw(
            logits,
            draws,
            self._settings,
            self._scratch.part(p),
            out.tokens,
            out.logprobs,
            out.normalizers,
            known=penalty_tokens,
            masking=self._masking(batch),
            rescoring=rescoring,
            rescore_scratch=rescore_scratch,
            rare=self._rare(batch),
        )

    def _rare(self, batch: SampleBatch) -> RareTensors | None:
        """Return inputs and workspace of rare samplers, if a sequence of the batch uses one."""
        if not any(sequence.sampling.rare for sequence in batch.sequences):
            return None
        z = self._scratch.z[: len(batch.rows)]
        return RareTensors(
            self._breaker_rows(),
            torch.zeros_like(z, dtype=torch.int32),
            z.new_empty(len(z), self._scratch.blocks.shape[2], 3, dtype=torch.float64),
        )

    def _breaker_rows(self) -> torch.Tensor:
        """Return the breakers of all rows of the settings, allocated or grown when they are first needed."""
        rows = self._settings.top_k.shape[0]
        old = self._breakers
        if old is None or len(old) < rows:
            self._breakers = torch.zeros(
                rows, -(-self._vocabulary // 32), dtype=torch.int32, device=self._device
            )
            if old is not None:
                self._breakers[: len(old)] = old
        assert self._breakers is not None
        return self._breakers

    def _mask_words(self, mask: bytes) -> NDArray[np.int32]:
        """Return a mask as one bit per token of the vocabulary. Missing bits are 0."""
        size = 4 * -(-self._vocabulary // 32)
        return np.frombuffer(mask[:size].ljust(size, b"\0"), np.int32).copy()

    def _count_scratch(self, positions: int) -> torch.Tensor:
        """Return scratch memory for penalty counts, allocated for the first request with penalties."""
        if self._counts is None:
            self._counts = torch.zeros(
                self._max_positions, self._vocabulary, dtype=torch.int32, device=self._device
            )
        return self._counts[:positions]

    def _masking(self, batch: SampleBatch) -> sample_state.Masking | None:
        """Return the masks of a batch, if it has any."""
        words: list[NDArray[np.int32]] = []
        rows = []
        for mask in batch.masks:
            if mask is None:
                rows.append(-1)
                continue
            rows.append(len(words))
            # Reading may wait for the words. The forward pass is already queued.
            words.append(self._mask_words(mask.words))
        if not words:
            return None
        return sample_state.Masking(
            upload(torch.from_numpy(np.stack(words)), self._device),
            upload(torch.tensor(rows, dtype=torch.int32), self._device),
        )


def _key(p: SamplingParams) -> int:
    """Return gumbel.draw_key before its last step, as a signed number."""
    key = mix((mix(p.seed + G) ^ p.choice) + G)
    return key - 2**64 if key >= 2**63 else key
