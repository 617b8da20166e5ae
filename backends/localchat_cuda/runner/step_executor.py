"""Runs one step on the device: forward pass, sampling, and the copies of results to the host.

If a plan only decodes or verifies drafts, one graph contains everything from the token ids to the sampled
tokens. That requires at most one sampled position per token and no masks. Otherwise the graph ends at the
logits of all tokens. With prompt chunks in the step, it ends at the last states of a fixed number of tokens.
Such a step takes milliseconds, in which the host queues the rest. Logits are computed only where the plan
requests them, a few rows at a time, because 2,048 rows of 152k logits would take 1.2 GB.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from localchat.backend_api.interface import LogitsPosition, SamplingParams, StepPlan, StepRow
from localchat_cuda.kernels.sampling.publish import publish
from localchat_cuda.kernels.sampling.rescore import Rescoring, decides
from localchat_cuda.runner.cuda_graphs import CudaGraphs, ResultBuffer
from localchat_cuda.runner.device_state import SequenceSlot, StateTable
from localchat_cuda.runner.input_batch import (
    MAX_DECODE_WIDTH,
    BatchConfig,
    BatchSlices,
    InputBatch,
    ModelInputs,
    StepShape,
    TokenSpan,
    build_input_batch,
    model_inputs,
    moved_shape,
    write_batch,
)
from localchat_cuda.runner.model import DeviceModel
from localchat_cuda.runner.sampler import (
    ReferenceSampler,
    SampleBatch,
    SampledTokens,
    TritonSampler,
)
from localchat_cuda.runner.step_buffer import ALIGNED_WORDS, BufferSlice, StepBuffer, upload
from localchat_cuda.runner.step_output import PendingStep, ResultRing, TopLogprobs

_GREEDY = SamplingParams(temperature=0.0)
_PENALISED = SamplingParams(temperature=0.0, presence_penalty=1.0)
_LAST_STATES_KIND = "last states"
"""Graphs of steps with prompt chunks, which end at the last states of some tokens."""
_MAX_COVERS = 2
"""Graphs of larger shapes to try for a step."""
_LOGITS_KINDS = ("logits", "approximate logits")
"""Graphs that end at all logits, from the head and from its int8 copy."""
_PENALISED_KIND = "penalised"
_APPROXIMATE = " from approximate logits"
_PROMPT_ENDS = 8
"""Positions in graphs of steps with prompt chunks, besides one per decoding row."""


class PreparedStep(NamedTuple):
    """Step whose arrays are in the step buffer."""

    batch: InputBatch
    slices: BatchSlices
    logits_indices: BufferSlice
    """Tokens whose logits are computed; unused if all tokens have logits."""
    samples: list[SampleBatch]
    logits_rows: dict[int, int]
    """Row of the logits for each position in the plan."""
    graph_kind: str
    """Kind of the graph that contains the whole step with one sample batch; empty: not possible."""
    padded: bool = False
    """`logits_indices` is padded to the length that graphs of this shape use."""
    approximate: bool = False
    """Logits come from the head's int8 copy. The sampler recomputes those that matter."""


@dataclass(frozen=True, eq=False)
class _DecodeTemplate:
    """Step of single tokens, from which the arrays of the next ones are derived."""

    rows: tuple[StepRow, ...]
    prepared: PreparedStep
    words: NDArray[np.int32]
    """Arrays in the step buffer."""
    longest: int
    """Tokens of the longest text after the step."""

    @cached_property
    def steps(self) -> NDArray[np.int32]:
        """Growth of each word when the rows move by one token."""
        steps = np.zeros_like(self.words)
        count = len(self.rows)
        slices = self.prepared.slices
        samples = self.prepared.samples[0]
        for array in (slices.positions, slices.lengths, samples.position_slice):
            steps[array.start : array.start + count] = 1
        for array in (slices.ids, samples.target_slice):
            # The low words: indices have less than 31 bits.
            steps[array.start : array.start + 2 * count : 2] = 1
        return steps


class StepExecutor:
    """Prepare and queue steps."""

    def __init__(
        self,
        model: DeviceModel,
        table: StateTable,
        buffer: StepBuffer,
        sampler: ReferenceSampler | TritonSampler,
        config: BatchConfig,
        graphs: CudaGraphs,
        max_rows: int,
    ) -> None:
        """`max_rows`: rows of logits at once, and positions of one sample batch."""
        self._model = model
        self._table = table
        self._buffer = buffer
        self._sampler = sampler
        self._config = config
        self.graphs = graphs
        self._max_rows = max_rows
        self._gpu = table.device.type == "cuda"
        self._padding = SequenceSlot(table.scratch, _GREEDY, 0)
        self._penalised_padding = SequenceSlot(table.scratch, _PENALISED, 0)
        self._graph_logits = ResultBuffer(model.config.vocabulary, torch.float32, table.device)
        self._graph_states = ResultBuffer(model.config.hidden, model.pages.dtype, table.device)
        words = 2 * (max_rows + ALIGNED_WORDS)
        self._template: _DecodeTemplate | None = None
        """Last step, if the next plan may move its rows."""
        self.max_decode_width = MAX_DECODE_WIDTH
        """Wider spans are prompt chunks."""
        self._results: ResultRing | None = None
        if model.kernels:
            self._results = ResultRing(words, pinned=self._gpu)

    def prepare(self, step: PendingStep) -> PreparedStep:
        """Write the arrays of a step to the buffer.

        Call this before any other write, because graphs read a shape's arrays at the start of the buffer."""
        if self._results is not None:
            self._results.begin_step()
        plan = step.plan
        if plan.moved:
            template = self._template
            if template is not None and template.rows is plan.rows:
                return self._prepare_moved(template, plan.moved)
            plan = plan.unmoved()
        self._template = None
        table = self._table
        batch = self._build_batch(plan)
        slices = write_batch(batch, self._buffer, table)
        tokens = [batch.first[position.row] + position.offset for position in plan.positions]
        sampled = [n for n, position in enumerate(plan.positions) if position.kind == "sample"]
        step.top_counts = {
            n: table.sequences[plan.positions[n].seq].sampling.top_logprobs for n in sampled
        }
        if self._fits_graph(plan, batch, [tokens[n] for n in sampled]):
            prepared = self._write_for_graph(plan, batch, slices, {tokens[n]: n for n in sampled})
            self._template = self._template_of(plan, prepared)
            return prepared
        if batch.all_logits:
            rows = dict(enumerate(tokens))
            indices: list[int] = []
            total_rows = batch.shape.tokens
        else:
            indices = sorted(set(tokens))
            row_of_token = {token: row for row, token in enumerate(indices)}
            rows = {number: row_of_token[token] for number, token in enumerate(tokens)}
            total_rows = len(indices)
        logits_indices, padded = self._write_logits_indices(batch, indices)
        sampled.sort(key=rows.__getitem__)
        samples = self._write_samples(plan, sampled, rows, total_rows, all_logits=batch.all_logits)
        approximate = (
            batch.all_logits
            and all(position.kind == "sample" for position in plan.positions)
            and self._likely_tokens_decide(
                [table.sequences[position.seq] for position in plan.positions], total_rows
            )
        )
        return PreparedStep(batch, slices, logits_indices, samples, rows, "", padded, approximate)

    def _build_batch(self, plan: StepPlan) -> InputBatch:
        """Return the layout of a step: that of a captured graph if the step's own shape has none.

        A step of one sequence always has its own shape, because its text must not depend on what was captured
        before. Neighbors change it anyway. Ranks could have different graphs."""
        scratch = self._table.scratch
        spans = [TokenSpan(row.slot, row.start, row.width) for row in plan.rows]
        batch = build_input_batch(
            spans, self._config, scratch, max_decode_width=self.max_decode_width
        )
        kind = self._kind_to_cover(plan, batch)
        if kind:
            for shape in self.graphs.covers(kind, batch.shape)[:_MAX_COVERS]:
                covered = build_input_batch(spans, self._config, scratch, shape)
                fits = covered.all_logits or len(plan.positions) <= _max_indices(shape)
                if covered.shape == shape and fits:
                    return covered
        return batch

    def _kind_to_cover(self, plan: StepPlan, batch: InputBatch) -> str:
        """Return the kind of a step's graph. Empty: only a graph of its own shape may run it."""
        count = len(plan.rows)
        if count == 1 or not batch.captured or self._model.collective is not None:
            return ""
        if not batch.all_logits:
            return _LAST_STATES_KIND
        sequences = [self._table.sequences[row.seq] for row in plan.rows]
        sampled = [n for n, position in enumerate(plan.positions) if position.kind == "sample"]
        if len(sampled) != count or not self._fits_graph(plan, batch, sampled):
            return ""
        approximate = self._likely_tokens_decide(sequences, batch.shape.tokens)
        return _whole_step_kind(sequences, approximate=approximate)

    def _template_of(self, plan: StepPlan, prepared: PreparedStep) -> "_DecodeTemplate | None":
        """Return the template of a step whose rows a later plan may move.

        None: it has drafts or logprobs, or a shape that it should not keep."""
        shape = prepared.batch.shape
        count = len(plan.rows)
        if shape.widest != 1 or len(plan.positions) != count or prepared.batch.covered:
            return None
        samples = prepared.samples[0]
        slices = prepared.slices
        if not all(map(self._buffer.holds, (slices.ids, samples.target_slice))):
            return None
        return _DecodeTemplate(
            plan.rows, prepared, self._buffer.words.copy(), max(row.start + 1 for row in plan.rows)
        )

    def _prepare_moved(self, template: "_DecodeTemplate", moved: int) -> PreparedStep:
        """Write the arrays of a step whose rows moved by `moved` tokens."""
        prepared = template.prepared
        words = self._buffer.fill(len(template.words))
        np.multiply(template.steps, moved, out=words)
        words += template.words
        samples = prepared.samples[0]
        if samples.host_slice is not None:
            assert self._results is not None
            start = samples.host_slice.start
            words[start : start + 2].view(np.int64)[0] = self._results.address
        else:
            # The reference reads the positions on the host.
            first = samples.position_slice.start
            positions = words[first : first + len(samples.rows)].tolist()
            prepared = prepared._replace(samples=[replace(samples, positions=positions)])
        shape = moved_shape(prepared.batch.shape, template.longest + moved, self._config)
        batch = replace(prepared.batch, shape=shape)
        if len(template.rows) > 1 and prepared.batch.shape in self.graphs.covers(
            prepared.graph_kind, shape
        ):
            # The graph of the step before divides the histories into another number of ranges.
            batch = replace(prepared.batch, covered=True)
        return prepared._replace(batch=batch)

    def prepare_padding(self, spans: Sequence[TokenSpan], kind: str = "") -> PreparedStep:
        """Write a step of padding with these spans; otherwise like `prepare`.

        `kind`: of its graph, one of `kinds`; empty: the usual kind."""
        batch = build_input_batch(spans, self._config, self._table.scratch)
        table = self._table
        slices = write_batch(batch, self._buffer, table)
        plan = StepPlan(0, ())
        if kind not in _LOGITS_KINDS and self._fits_graph(plan, batch, []):
            return self._write_for_graph(plan, batch, slices, {}, kind)
        logits_indices, padded = self._write_logits_indices(batch, [])
        approximate = kind == _LOGITS_KINDS[True]
        return PreparedStep(batch, slices, logits_indices, [], {}, "", padded, approximate)

    def kinds(
        self, spans: Sequence[TokenSpan], numbers: Sequence[int], *, masked: bool
    ) -> tuple[StepShape, set[str]]:
        """Return the shape of a step that only decodes, and its possible kinds of graphs.

        `numbers`: of its sequences. `masked`: the step may have masks."""
        batch = build_input_batch(spans, self._config, self._table.scratch)
        count = batch.shape.tokens
        sequences = [self._table.sequences[number] for number in numbers]
        approximate = self._likely_tokens_decide(sequences, count)
        fits = batch.all_logits and count <= self._max_rows and not _rare(sequences)
        kinds = set()
        if fits:
            kinds.add(_whole_step_kind(sequences, approximate=approximate))
        if masked or not fits:
            kinds.add(_LOGITS_KINDS[approximate])
        return batch.shape, kinds

    def _write_logits_indices(
        self, batch: InputBatch, indices: list[int]
    ) -> tuple[BufferSlice, bool]:
        """Write the indices, and return True with them if they were padded for a graph.

        Call this right after `write_batch`, because graphs read the indices at a fixed address."""
        room = _max_indices(batch.shape)
        padded = batch.captured and not batch.all_logits and len(indices) <= room
        padding = 0
        if padded:
            padding = room - len(indices)
        elif not indices and not batch.all_logits:
            # Layers after the last attention need at least one row, even without logits.
            padding = 1
        return self._buffer.write(indices + [0] * padding, int64=True), padded

    def _likely_tokens_decide(self, sequences: Sequence[SequenceSlot], rows: int) -> bool:
        """Return True if sampling depends only on likely tokens, and other logits are not reported.

        `rows`: of logits."""
        return rows <= self._model.approximate_rows and all(
            decides(sequence.sampling) for sequence in sequences
        )

    def _fits_graph(self, plan: StepPlan, batch: InputBatch, sampled: list[int]) -> bool:
        table = self._table
        return (
            batch.all_logits
            and batch.shape.tokens <= self._max_rows
            and not plan.masks
            and not _rare(table.sequences[position.seq] for position in plan.positions)
            and len(sampled) == len(plan.positions) == len(set(sampled))
        )

    def _write_for_graph(
        self,
        plan: StepPlan,
        batch: InputBatch,
        slices: BatchSlices,
        numbers: dict[int, int],
        kind: str = "",
    ) -> PreparedStep:
        """Write a step as one sample batch with every token. Tokens that the plan does not sample are padding.

        `numbers`: position in the plan by token. `kind`: of the graph, for a step of padding."""
        count = batch.shape.tokens
        padding = self._penalised_padding if kind.startswith(_PENALISED_KIND) else self._padding
        samples = self._write_sample_batch(
            plan, (0, count), range(count), [numbers.get(n, -1) for n in range(count)], padding
        )
        unused = BufferSlice(slices.ids.device, 0, 0, int64=True)
        if kind:
            approximate = kind.endswith(_APPROXIMATE)
        else:
            approximate = self._likely_tokens_decide(samples.sequences, count)
        kind = _whole_step_kind(samples.sequences, approximate=approximate)
        return PreparedStep(
            batch, slices, unused, [samples], samples.results, kind, approximate=approximate
        )

    def _write_samples(
        self,
        plan: StepPlan,
        sampled: Sequence[int],
        rows: dict[int, int],
        total_rows: int,
        *,
        all_logits: bool,
    ) -> list[SampleBatch]:
        """Write sample batches of at most `max_rows` positions and rows of logits.

        `sampled`: positions in the plan, sorted by their row."""
        batches: list[SampleBatch] = []
        first = 0
        while first < len(sampled):
            low = 0
            high = total_rows
            if not all_logits:
                low = rows[sampled[first]] // self._max_rows * self._max_rows
                high = min(low + self._max_rows, total_rows)
            end = first
            while end < len(sampled) and rows[sampled[end]] < high and end - first < self._max_rows:
                end += 1
            numbers = sampled[first:end]
            logits_rows = [rows[n] - low for n in numbers]
            batches.append(
                self._write_sample_batch(
                    plan, (low, high), logits_rows, numbers, self._padding, first
                )
            )
            first = end
        return batches

    def _write_sample_batch(
        self,
        plan: StepPlan,
        logits: tuple[int, int],
        rows: Sequence[int],
        numbers: Sequence[int],
        padding: SequenceSlot,
        first: int = 0,
    ) -> SampleBatch:
        """Write a sample batch over a range of the step's logits.

        `rows`: of that range. `numbers`: position in the plan for each row; -1: `padding`. `first`: number of
        the first result."""
        table = self._table
        sequences = []
        positions = []
        targets = []
        slots = []
        for number in numbers:
            if number < 0:
                sequences.append(padding)
                positions.append(0)
                targets.append(table.discard_index)
                slots.append(table.scratch)
                continue
            logits_position = plan.positions[number]
            row = plan.rows[logits_position.row]
            sequences.append(table.sequences[logits_position.seq])
            # Position in the text of the token to sample.
            position = row.start + logits_position.offset + 1
            positions.append(position + sequences[-1].offset)
            targets.append(self._target(plan, logits_position, sequences[-1], position))
            slots.append(row.slot)
        if not any(sequence.sampling.penalised for sequence in sequences):
            slots = []
        masks = {mask.index: mask for mask in plan.masks}
        write = self._buffer.write
        host_slice = None
        if self._results is not None:
            host_slice = write([self._results.address], int64=True)
        return SampleBatch(
            logits_range=logits,
            results={n: first + index for index, n in enumerate(numbers) if n >= 0},
            rows=rows,
            sequences=sequences,
            positions=positions,
            masks=[masks.get(n) for n in numbers],
            slots=slots,
            row_slice=write(rows),
            sequence_slice=write([sequence.row for sequence in sequences]),
            position_slice=write(positions),
            slot_slice=write(slots) if slots else None,
            target_slice=write(targets, int64=True),
            host_slice=host_slice,
        )

    def _target(
        self, plan: StepPlan, logits_position: LogitsPosition, sequence: SequenceSlot, position: int
    ) -> int:
        """Return the entry of the token table that the next step reads as LAST.

        No step reads the tokens after drafts and those of forks, so they go to the discarded entry."""
        row = plan.rows[logits_position.row]
        if logits_position.seq != row.seq or row.drafts or position >= self._table.columns:
            return self._table.discard_index
        return sequence.row * self._table.columns + position

    def captured(self, prepared: PreparedStep) -> bool:
        """Return True if the step's graph is captured, or no graph can run it."""
        kind = prepared.graph_kind
        if not kind and prepared.padded:
            kind = _LAST_STATES_KIND
        elif not kind and prepared.batch.all_logits:
            kind = _LOGITS_KINDS[prepared.approximate]
        return not kind or self.graphs.has(kind, prepared.batch.shape)

    def compute(self, step: PendingStep, prepared: PreparedStep) -> None:
        """Queue the forward pass, sampling and the copies to the host.

        Out-of-memory errors are possible; see cuda_errors.is_out_of_memory."""
        batch = prepared.batch
        table = self._table
        model = self._model

        def inputs(logits_indices: torch.Tensor | None) -> ModelInputs:
            return model_inputs(batch, prepared.slices, table, logits_indices)

        def logits_of_all() -> tuple[torch.Tensor, Rescoring | None]:
            states = model.hidden_states(inputs(None))
            out = self._graph_logits.rows(states.shape[0])
            if prepared.approximate:
                return model.approximate_logits(states, out)
            return model.logits(states, out), None

        def all_logits() -> tuple[torch.Tensor, ...]:
            logits, rescoring = logits_of_all()
            return (logits, *(rescoring or ()))

        def whole_step() -> tuple[torch.Tensor, torch.Tensor]:
            logits, rescoring = logits_of_all()
            return logits, self._sample(prepared.samples[0], logits, rescoring)

        if prepared.graph_kind:
            logits, results = self.graphs.run(prepared.graph_kind, batch.shape, whole_step)
            self._queue_top_logprobs(step, prepared.samples[0], logits, results)
            self._queue_results(step, prepared, results)
            return
        rescoring: Rescoring | None = None
        if batch.all_logits:
            kind = _LOGITS_KINDS[prepared.approximate]
            logits, *rescoring_tensors = self.graphs.run(kind, batch.shape, all_logits)
            if rescoring_tensors:
                rescoring = Rescoring(*rescoring_tensors)
        else:
            states = self._selected_states(prepared, inputs)

        def source(low: int, high: int) -> torch.Tensor:
            """Return the logits of a range of rows."""
            if batch.all_logits:
                return logits[low:high]
            return model.logits(states[low:high])

        self._sample_all(step, prepared, source, rescoring)
        self._queue_prompt_logprobs(step, prepared, source)

    def _selected_states(
        self, prepared: PreparedStep, inputs: Callable[[torch.Tensor | None], ModelInputs]
    ) -> torch.Tensor:
        """Return the last states [P, hidden] of the tokens whose logits are computed."""
        indices = prepared.logits_indices.view()
        if not prepared.batch.captured:
            return self._model.hidden_states(inputs(indices))

        def last_states() -> tuple[torch.Tensor]:
            states = self._model.hidden_states(inputs(indices))
            return (self._graph_states.rows(states.shape[0]).copy_(states),)

        if prepared.padded:
            return self.graphs.run(_LAST_STATES_KIND, prepared.batch.shape, last_states)[0]

        def all_states() -> tuple[torch.Tensor]:
            states = self._model.hidden_states(inputs(None))
            return (self._graph_states.rows(states.shape[0]).copy_(states),)

        (states,) = self.graphs.run("states", prepared.batch.shape, all_states)
        return torch.index_select(states, 0, indices)

    def _sample_all(
        self,
        step: PendingStep,
        prepared: PreparedStep,
        source: Callable[[int, int], torch.Tensor],
        rescoring: Rescoring | None,
    ) -> None:
        results = []
        # Consecutive batches of the same range share its logits.
        logits_range: tuple[int, int] | None = None
        for samples in prepared.samples:
            if samples.logits_range != logits_range:
                logits_range = samples.logits_range
                logits = source(*logits_range)
            results.append(self._sample(samples, logits, rescoring))
            self._queue_top_logprobs(step, samples, logits, results[-1])
        if len(results) == 1:
            self._queue_results(step, prepared, results[0])
        elif results:
            used = [
                result[:, : len(samples.rows)]
                for result, samples in zip(results, prepared.samples, strict=True)
            ]
            self._queue_results(step, prepared, torch.cat(used, 1))

    def _sample(
        self, samples: SampleBatch, logits: torch.Tensor, rescoring: Rescoring | None
    ) -> torch.Tensor:
        """Sample, and write the tokens to the token table for the next step.

        Returns int32 [3, P or more]: tokens, and the bits of logprobs and normalizers. Rows are aligned to 16
        bytes like arrays of the step buffer, so that one compiled kernel serves all."""
        count = len(samples.rows)
        width = count + -count % ALIGNED_WORDS
        results = torch.empty(3, width, dtype=torch.int32, device=logits.device)
        tokens, logprobs, normalizers = results[:, :count]
        out = SampledTokens(tokens, logprobs.view(torch.float32), normalizers.view(torch.float32))
        collective = self._model.collective
        if collective is None or collective.rank == 0:
            self._sampler.sample(logits, samples, out, rescoring)
        if collective is not None:
            # Masks and log probabilities are needed on rank 0 only. All ranks store the same settings, so that
            # their steps have the same graphs.
            collective.copy_from_first(tokens)
        # A position without usable logits results in -1, and the next step may already be queued.
        targets = samples.target_slice.view()
        table = self._table.token_table
        if samples.host_slice is None:
            table.index_copy_(0, targets, tokens.clamp(min=0))
        else:
            publish(results, targets, table, samples.host_slice.view())
        return results

    def _queue_results(
        self, step: PendingStep, prepared: PreparedStep, results: torch.Tensor
    ) -> None:
        if self._results is not None and len(prepared.samples) == 1:
            values = self._results.rows(results.shape[1])
        else:
            # Each of several batches overwrote the results of the one before in the ring.
            values = self._to_host(results[:2])
        step.sampled = {}
        for samples in prepared.samples:
            step.sampled |= samples.results
        step.tokens = values[0]
        step.logprobs = values[1].view(torch.float32)

    def _queue_top_logprobs(
        self, step: PendingStep, samples: SampleBatch, logits: torch.Tensor, results: torch.Tensor
    ) -> None:
        """Queue the most likely tokens of sampled positions that request them."""
        if not step.top_counts:
            return
        numbers = tuple(n for n in samples.results if step.top_counts[n] > 0)
        if not numbers:
            return
        # Results are numbered through all batches of a step; a padded batch is the only one.
        first = 0
        if len(samples.rows) == len(samples.results):
            first = min(samples.results.values())
        indices = [samples.results[n] - first for n in numbers]
        rows = self._to_device([samples.rows[index] for index in indices])
        normalizers = results[2].view(torch.float32)[self._to_device(indices)]
        count = max(step.top_counts[n] for n in numbers)
        top = self._top_logprobs(numbers, logits[rows], normalizers, count, None)
        step.top_logprobs.append(top)

    def _queue_prompt_logprobs(
        self, step: PendingStep, prepared: PreparedStep, source: Callable[[int, int], torch.Tensor]
    ) -> None:
        """Queue the log probabilities of the prompt's tokens."""
        positions = step.plan.positions
        numbers = [n for n, position in enumerate(positions) if position.kind == "prompt"]
        numbers.sort(key=prepared.logits_rows.__getitem__)
        for first in range(0, len(numbers), self._max_rows):
            part = tuple(numbers[first : first + self._max_rows])
            rows = [prepared.logits_rows[n] for n in part]
            low = rows[0]
            high = rows[-1] + 1
            logits = source(low, high)[self._to_device([row - low for row in rows])]
            tokens = self._to_device([positions[n].token for n in part])
            count = max(positions[n].top for n in part)
            normalizers = torch.logsumexp(logits, 1)
            step.prompt_logprobs.append(
                self._top_logprobs(part, logits, normalizers, count, tokens)
            )

    def _top_logprobs(
        self,
        numbers: tuple[int, ...],
        logits: torch.Tensor,
        normalizers: torch.Tensor,
        count: int,
        tokens: torch.Tensor | None,
    ) -> TopLogprobs:
        """Return the `count` most likely tokens of each row.

        `tokens`: compute also their log probabilities; None: the sampler has computed them."""
        logprobs = normalizers
        if tokens is not None:
            logprobs = logits.gather(1, tokens[:, None])[:, 0] - normalizers
        top, ids = logits.topk(min(count, logits.shape[1]), 1)
        return TopLogprobs(
            numbers,
            self._to_host(logprobs),
            self._to_host(top - normalizers[:, None]),
            self._to_host(ids),
        )

    def _to_device(self, values: Sequence[int]) -> torch.Tensor:
        return upload(torch.tensor(values), self._table.device)

    def _to_host(self, values: torch.Tensor) -> torch.Tensor:
        """Return a copy in host memory, which is complete once the step's event is."""
        if not self._gpu:
            return values.clone()
        copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        return copy.copy_(values, non_blocking=True)


def _rare(sequences: Iterable[SequenceSlot]) -> bool:
    """Return True if a sequence uses a rare sampler. Graphs contain no kernels of rare samplers."""
    return any(sequence.sampling.rare for sequence in sequences)


def _whole_step_kind(sequences: Sequence[SequenceSlot], *, approximate: bool) -> str:
    penalised = any(sequence.sampling.penalised for sequence in sequences)
    kind = _PENALISED_KIND if penalised else "sampled"
    return kind + _APPROXIMATE if approximate else kind


def _max_indices(shape: StepShape) -> int:
    """Return how many tokens' last states a graph of this shape ends with."""
    return shape.decode_tokens + _PROMPT_ENDS
