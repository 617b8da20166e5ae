"""Drawing the tokens of a step's points: by the kernels on a GPU, by the contract itself on a CPU.

Letters: R rows of logits, P points, V vocabulary. A point draws from one row of logits with the settings of
one row of the state table; several points may share a row of logits.
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
from localchat_cuda.runner.device_state import SequenceSlot, StateTable
from localchat_cuda.runner.step_buffer import BufferSlice, StepBuffer

_BIASES = 16


@dataclass(frozen=True, slots=True)
class Points:
    """P points of one draw: `rows` of the logits, `owners` (rows of the state table) and `positions` of the
    drawn tokens, each in the inbox and here; `masks`, None for points without, are read
    only at the draw."""

    rows: Sequence[int]
    known: Sequence[SequenceSlot]
    positions: Sequence[int]
    masks: Sequence[Mask | None]
    row_spot: BufferSlice
    owner_spot: BufferSlice
    position_spot: BufferSlice


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """Results on the device [P]: tokens int32, logprobs and normalizers fp32."""

    tokens: torch.Tensor
    logprobs: torch.Tensor
    normalizers: torch.Tensor


class DeviceSampler(Protocol):
    """Holds the settings of every row of the state table. `moved`: whether they have another address than
    before; who reads them by address sets it back."""

    moved: bool

    def settle(self, entered: Sequence[SequenceSlot], buffer: StepBuffer) -> None:
        """Take settings of sequences that enter: called before the inbox is sent."""
        ...

    def apply(self, buffer: StepBuffer) -> None:
        """The settings that were put take effect: called after the inbox was sent."""
        ...

    def draw(
        self, logits: torch.Tensor, points: Points, buffer: StepBuffer, drawn: SampledTokens
    ) -> None:
        """Draw for `points` from logits [R, V], only read."""
        ...


class ReferenceSampler:
    """The contract, on the CPU."""

    moved = False

    def __init__(self, table: StateTable, vocabulary: int) -> None:
        self._table = table
        self._sampler = Sampler(vocabulary)

    def settle(self, entered: Sequence[SequenceSlot], buffer: StepBuffer) -> None:
        """The points carry their settings."""

    def apply(self, buffer: StepBuffer) -> None:
        """Nothing."""

    def draw(
        self, logits: torch.Tensor, points: Points, buffer: StepBuffer, drawn: SampledTokens
    ) -> None:
        table = self._table.grid
        each = zip(points.rows, points.known, points.positions, points.masks, strict=True)
        for i, (number, known, position, mask) in enumerate(each):
            row = logits[number].numpy()
            tally = None
            if known.sampling.penalised:
                tally = TokenCounts(table[known.row, :position].tolist(), known.prompt_tokens)
            words = mask.words if mask is not None else None
            found = self._sampler.draw(row, known.sampling, position, tally, words)
            drawn.tokens[i] = found.token
            drawn.logprobs[i] = found.logprob if found.logprob is not None else 0.0
            drawn.normalizers[i] = torch.logsumexp(logits[number], 0)


class TritonSampler:
    """The kernels of kernels/sample.py."""

    def __init__(self, table: StateTable, vocabulary: int, points: int) -> None:
        """`points`: most of one draw."""
        self._table, self._vocabulary, self._most = table, vocabulary, points
        self._device = table.device
        self._settings = sample_state.SamplingTensors.empty(table.rows, _BIASES, self._device)
        self._prompts = torch.zeros(table.rows, dtype=torch.int32, device=self._device)
        self._scratch = sample_state.Scratch.empty(points, vocabulary, self._device)
        self._counts: torch.Tensor | None = None
        self._put: dict[str, BufferSlice] = {}
        self.moved = False

    def settle(self, entered: Sequence[SequenceSlot], buffer: StepBuffer) -> None:
        self._put = {}
        if not entered:
            return
        self._make_room(max(len(one.sampling.logit_bias) for one in entered))
        width = self._settings.bias_ids.shape[1]
        floats = np.array([_floats(one.sampling) for one in entered], np.float32)
        biases = [
            (one.row * width + i, token, value)
            for one in entered
            for i, (token, value) in enumerate(one.sampling.logit_bias)
        ]
        values = np.array([value for *_, value in biases], np.float32)
        self._put = {
            "rows": buffer.put([one.row for one in entered], wide=True),
            "keys": buffer.put([_key(one.sampling) for one in entered], wide=True),
            "floats": buffer.put(floats.reshape(-1).view(np.int32)),
            "top_k": buffer.put([min(one.sampling.top_k, 2**31 - 1) for one in entered]),
            "prompts": buffer.put([one.prompt_tokens for one in entered]),
            "bias_counts": buffer.put([len(one.sampling.logit_bias) for one in entered]),
            "bias_places": buffer.put([place for place, *_ in biases], wide=True),
            "bias_ids": buffer.put([_token(token, self._vocabulary) for _, token, _ in biases]),
            "bias_values": buffer.put(values.view(np.int32)),
        }

    def _make_room(self, biases: int) -> None:
        """Grow with the state table, and where a request has more biases than any before."""
        held = self._settings
        rows, width = held.bias_ids.shape
        if rows >= self._table.rows and width >= biases:
            return
        grown = sample_state.SamplingTensors.empty(
            self._table.rows, max(width, 1 << max(biases - 1, 0).bit_length()), self._device
        )
        for name in ("floats", "top_k", "keys", "bias_counts"):
            getattr(grown, name)[:rows] = getattr(held, name)
        grown.bias_ids[:rows, :width] = held.bias_ids
        grown.bias_values[:rows, :width] = held.bias_values
        prompts = torch.zeros(self._table.rows, dtype=torch.int32, device=self._device)
        prompts[:rows] = self._prompts
        self._settings, self._prompts, self.moved = grown, prompts, True

    def apply(self, buffer: StepBuffer) -> None:
        if not self._put:
            return
        found = {name: buffer.view(spot) for name, spot in self._put.items()}
        held, rows = self._settings, found["rows"]
        floats = found["floats"].view(torch.float32).view(-1, len(sample_state.FIELDS))
        held.floats.index_copy_(0, rows, floats)
        held.keys.index_copy_(0, rows, found["keys"])
        held.top_k.index_copy_(0, rows, found["top_k"])
        held.bias_counts.index_copy_(0, rows, found["bias_counts"])
        self._prompts.index_copy_(0, rows, found["prompts"])
        if self._put["bias_ids"].size:
            places = found["bias_places"]
            held.bias_ids.view(-1).index_copy_(0, places, found["bias_ids"])
            values = found["bias_values"].view(torch.float32)
            held.bias_values.view(-1).index_copy_(0, places, values)

    def draw(
        self, logits: torch.Tensor, points: Points, buffer: StepBuffer, drawn: SampledTokens
    ) -> None:
        p = len(points.rows)
        whole = self._scratch
        known = None
        if any(one.sampling.penalised for one in points.known):
            known = sample_state.PenaltyTokens(self._table.grid, self._prompts, self._tally(p))
        masks, mask_rows = self._masks(points)
        sample.draw(
            logits,
            buffer.view(points.row_spot),
            buffer.view(points.owner_spot),
            buffer.view(points.position_spot),
            self._settings,
            sample_state.Scratch(
                whole.z[:p], whole.blocks[:p], whole.values[:p], whole.ids[:p], whole.counts[:p]
            ),
            drawn.tokens,
            drawn.logprobs,
            drawn.normalizers,
            known=known,
            masks=masks,
            mask_rows=mask_rows,
        )

    def _tally(self, points: int) -> torch.Tensor:
        """Scratch for counts, made when a request with penalties comes first."""
        if self._counts is None:
            self._counts = torch.zeros(
                self._most, self._vocabulary, dtype=torch.int32, device=self._device
            )
        return self._counts[:points]

    def _masks(self, points: Points) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        # Reading may wait for the words: the network's work is queued before.
        held = [mask.words for mask in points.masks if mask is not None]
        if not held:
            return None, None
        size = 4 * -(-self._vocabulary // 32)
        words = np.stack([np.frombuffer(mask[:size].ljust(size, b"\0"), np.int32) for mask in held])
        numbers = iter(range(len(held)))
        rows = [next(numbers) if mask is not None else -1 for mask in points.masks]
        return self._sent(torch.from_numpy(words)), self._sent(
            torch.tensor(rows, dtype=torch.int32)
        )

    def _sent(self, values: torch.Tensor) -> torch.Tensor:
        if self._device.type == "cuda":
            values = values.pin_memory()
        return values.to(self._device, non_blocking=True)


def _floats(p: SamplingParams) -> tuple[float, ...]:
    """Columns of sample_state.Settings.floats."""
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
    """noise.draw_key before its last step, as a signed number."""
    key = mix((mix(p.seed + G) ^ p.choice) + G)
    return key - 2**64 if key >= 2**63 else key


def _token(token: int, vocabulary: int) -> int:
    """A biased token id that fits 32 bits; one outside the vocabulary stays outside."""
    return token if 0 <= token < vocabulary else -1
