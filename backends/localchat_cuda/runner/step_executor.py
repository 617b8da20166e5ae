"""Runs one step on the device: forward pass, sampling, and the copies of results to the host.

If a plan only decodes or verifies drafts, one graph holds everything from the token ids to the sampled tokens
(one sampled position per token at most, no masks); otherwise it ends at the logits of all tokens. With prompt
chunks in the step it ends at the last states of a fixed number of tokens: those take milliseconds, in which the
host queues the rest. Logits are computed only where the plan asks for them, a few rows at a time: 2,048 rows of
152k logits would take 1.2 GB.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from localchat.backend_api.interface import LogitsPosition, Mask, SamplingParams, StepPlan
from localchat_cuda.kernels.sampling.publish import publish
from localchat_cuda.kernels.sampling.rescore import Rescoring, decides
from localchat_cuda.runner.cuda_graphs import CudaGraphs, ResultBuffer
from localchat_cuda.runner.device_state import SequenceSlot, StateTable
from localchat_cuda.runner.input_batch import (
    BatchConfig,
    BatchSlices,
    InputBatch,
    StepShape,
    TokenSpan,
    build_input_batch,
    model_inputs,
    write_batch,
)
from localchat_cuda.runner.kv_pages import ModelInputs
from localchat_cuda.runner.model import DeviceModel
from localchat_cuda.runner.sampler import DeviceSampler, SampleBatch, SampledTokens
from localchat_cuda.runner.step_buffer import ALIGNED_WORDS, BufferSlice, StepBuffer
from localchat_cuda.runner.step_output import PendingStep, ResultRing, TopLogprobs

_GREEDY = SamplingParams(temperature=0.0)
_PENALISED = SamplingParams(temperature=0.0, presence_penalty=1.0)
_LOGITS_KINDS = ("logits", "approximate logits")
"""Graphs that end at the logits of all tokens; the second ones at those of the int8 copy of the head."""
_PENALISED_KIND = "penalised"
_APPROXIMATE = " from approximate logits"
_PROMPT_ENDS = 8
"""Positions that the graph of a step with prompt chunks has room for, besides one for each decoding row."""


class PreparedStep(NamedTuple):
    """A step whose arrays are in the step buffer."""

    batch: InputBatch
    slices: BatchSlices
    logits_indices: BufferSlice
    """Tokens whose logits are computed; unused if those of all are."""
    samples: list[SampleBatch]
    logits_rows: dict[int, int]
    """By number of a position in the plan, its row of the logits."""
    graph_kind: str
    """Of the graph that holds the whole step, one sample batch included; empty: none can."""
    padded: bool = False
    """`logits_indices` has the length that graphs of this shape have, and no fewer entries than are needed."""
    approximate: bool = False
    """The int8 copy of the head gives the logits, and the sampler makes those exact that matter."""


class StepExecutor:
    """Prepares and queues steps."""

    def __init__(
        self,
        model: DeviceModel,
        table: StateTable,
        buffer: StepBuffer,
        sampler: DeviceSampler,
        config: BatchConfig,
        graphs: CudaGraphs,
        max_rows: int,
        results: int,
    ) -> None:
        """`max_rows`: rows of logits at once, and positions of one sample batch. `results`: of so many steps
        lie on the host at once."""
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
        self._results = ResultRing(results, words, pinned=self._gpu) if model.kernels else None

    # ------------------------------------------------------------------------ into the buffer

    def prepare(self, step: PendingStep) -> PreparedStep:
        """Lay the step out. Must be the first to write into the buffer: graphs look for a shape's arrays at
        its beginning."""
        plan = step.plan
        table = self._table
        if self._results is not None:
            self._results.begin_step()
        spans = [TokenSpan(row.slot, row.start, row.width) for row in plan.rows]
        batch = build_input_batch(spans, self._config, table.scratch)
        slices = write_batch(batch, self._buffer, table.columns, table.scratch, table.padding_index)
        tokens = [batch.first[position.row] + position.offset for position in plan.positions]
        sampled = [n for n, position in enumerate(plan.positions) if position.kind == "sample"]
        step.top_counts = {
            n: table.sequences[plan.positions[n].seq].sampling.top_logprobs for n in sampled
        }
        if self._fits_graph(plan, batch, [tokens[n] for n in sampled]):
            return self._write_for_graph(plan, batch, slices, {tokens[n]: n for n in sampled})
        if batch.all_logits:
            rows = dict(enumerate(tokens))
            indices: list[int] = []
            total = batch.shape.tokens
        else:
            indices = sorted(set(tokens))
            rank = {token: i for i, token in enumerate(indices)}
            rows = {number: rank[token] for number, token in enumerate(tokens)}
            total = len(indices)
        logits_indices, padded = self._write_logits_indices(batch, indices)
        sampled.sort(key=rows.__getitem__)
        samples = self._write_samples(plan, sampled, rows, total, all_logits=batch.all_logits)
        approximate = (
            batch.all_logits
            and all(position.kind == "sample" for position in plan.positions)
            and self._decided([table.sequences[each.seq] for each in plan.positions], total)
        )
        return PreparedStep(batch, slices, logits_indices, samples, rows, "", padded, approximate)

    def prepare_padding(self, spans: Sequence[TokenSpan], kind: str = "") -> PreparedStep:
        """Lay out a step of padding alone, with the shape of a plan that has such spans; as `prepare`.

        `kind`: of its graph, one of `kinds`; empty: the usual one."""
        batch = build_input_batch(spans, self._config, self._table.scratch)
        table = self._table
        slices = write_batch(batch, self._buffer, table.columns, table.scratch, table.padding_index)
        plan = StepPlan(0, ())
        if kind not in _LOGITS_KINDS and self._fits_graph(plan, batch, []):
            return self._write_for_graph(plan, batch, slices, {}, kind)
        logits_indices, padded = self._write_logits_indices(batch, [])
        approximate = kind == _LOGITS_KINDS[True]
        return PreparedStep(batch, slices, logits_indices, [], {}, "", padded, approximate)

    def kinds(
        self, spans: Sequence[TokenSpan], numbers: Sequence[int], *, masked: bool
    ) -> tuple[StepShape, set[str]]:
        """The shape of a step that only decodes, and the kinds of graphs that it may run as.

        `numbers`: of its sequences. `masked`: it may have masks.
        """
        batch = build_input_batch(spans, self._config, self._table.scratch)
        count = batch.shape.tokens
        sequences = [self._table.sequences[number] for number in numbers]
        approximate = self._decided(sequences, count)
        fits = batch.all_logits and count <= self._max_rows
        kinds = {_whole_step_kind(sequences, approximate=approximate)} if fits else set()
        return batch.shape, kinds | ({_LOGITS_KINDS[approximate]} if masked or not fits else set())

    def _write_logits_indices(
        self, batch: InputBatch, indices: list[int]
    ) -> tuple[BufferSlice, bool]:
        """Write them before all that follows the layout, and whether they were padded for a graph."""
        room = batch.shape.decode_tokens + _PROMPT_ENDS
        padded = batch.captured and not batch.all_logits and len(indices) <= room
        missing = room - len(indices) if padded else 0
        if not (padded or indices or batch.all_logits):
            missing = 1  # the layers behind the last attention have a row, though nobody wants it
        return self._buffer.write(indices + [0] * missing, int64=True), padded

    def _decided(self, sequences: Sequence[SequenceSlot], rows: int) -> bool:
        """True if the sampled tokens of a step with so many rows of logits depend on the logits of likely
        tokens alone, and those of all are not reported."""
        return rows <= self._model.approximate_rows and all(
            decides(one.sampling) for one in sequences
        )

    def _fits_graph(self, plan: StepPlan, batch: InputBatch, sampled: list[int]) -> bool:
        return (
            batch.all_logits
            and batch.shape.tokens <= self._max_rows
            and not plan.masks
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
        """One sample batch: every token of a step that only decodes, those in `numbers` (position in the plan
        by token) among them. The others are padding, and discarded. `kind`: of the graph, for padding alone."""
        table = self._table
        count = batch.shape.tokens
        padding = self._penalised_padding if kind.startswith(_PENALISED_KIND) else self._padding
        sequences = []
        positions = []
        targets = []
        slots = []
        for token in range(count):
            number = numbers.get(token, -1)
            if number < 0:
                sequences.append(padding)
                positions.append(0)
                targets.append(table.discard_index)
                slots.append(table.scratch)
                continue
            logits_position = plan.positions[number]
            row = plan.rows[logits_position.row]
            sequences.append(table.sequences[logits_position.seq])
            position = row.start + logits_position.offset + 1
            positions.append(position + sequences[-1].offset)
            targets.append(self._target(plan, logits_position, sequences[-1], position))
            slots.append(row.slot)
        results = {number: token for token, number in numbers.items()}
        penalised = any(one.sampling.penalised for one in sequences)
        samples = self._write_sample_batch(
            (0, count),
            results,
            range(count),
            sequences,
            positions,
            [None] * count,
            targets,
            slots if penalised else (),
        )
        unused = BufferSlice(slices.ids.device, 0, 0, int64=True)
        approximate = kind.endswith(_APPROXIMATE) if kind else self._decided(sequences, count)
        kind = _whole_step_kind(sequences, approximate=approximate)
        return PreparedStep(
            batch, slices, unused, [samples], results, kind, approximate=approximate
        )

    def _write_samples(
        self,
        plan: StepPlan,
        sampled: Sequence[int],
        rows: dict[int, int],
        total: int,
        *,
        all_logits: bool,
    ) -> list[SampleBatch]:
        """Sample batches of at most `max_rows` positions, from at most as many rows of logits; `sampled` is
        sorted by rows."""
        masks = {mask.index: mask for mask in plan.masks}
        batches: list[SampleBatch] = []
        at = 0
        while at < len(sampled):
            low = 0 if all_logits else rows[sampled[at]] // self._max_rows * self._max_rows
            high = total if all_logits else min(low + self._max_rows, total)
            end = at
            while end < len(sampled) and rows[sampled[end]] < high and end - at < self._max_rows:
                end += 1
            numbers = sampled[at:end]
            chosen = [plan.positions[n] for n in numbers]
            sequences = [self._table.sequences[one.seq] for one in chosen]
            positions = [plan.rows[one.row].start + one.offset + 1 for one in chosen]
            each = zip(chosen, sequences, positions, strict=True)
            targets = [self._target(plan, *one) for one in each]
            drawn_at = [at + one.offset for at, one in zip(positions, sequences, strict=True)]
            slots: list[int] = []
            if any(one.sampling.penalised for one in sequences):
                slots = [plan.rows[one.row].slot for one in chosen]
            results = {n: at + i for i, n in enumerate(numbers)}
            batches.append(
                self._write_sample_batch(
                    (low, high),
                    results,
                    [rows[n] - low for n in numbers],
                    sequences,
                    drawn_at,
                    [masks.get(n) for n in numbers],
                    targets,
                    slots,
                )
            )
            at = end
        return batches

    def _write_sample_batch(
        self,
        logits: tuple[int, int],
        results: dict[int, int],
        rows: Sequence[int],
        sequences: Sequence[SequenceSlot],
        positions: Sequence[int],
        masks: Sequence[Mask | None],
        targets: Sequence[int],
        slots: Sequence[int],
    ) -> SampleBatch:
        write = self._buffer.write
        return SampleBatch(
            logits_range=logits,
            results=results,
            rows=rows,
            sequences=sequences,
            positions=positions,
            masks=masks,
            slots=slots,
            row_slice=write(rows),
            sequence_slice=write([one.row for one in sequences]),
            position_slice=write(positions),
            slot_slice=write(slots) if slots else None,
            target_slice=write(targets, int64=True),
            host_slice=None
            if self._results is None
            else write([self._results.address], int64=True),
        )

    def _target(
        self, plan: StepPlan, logits_position: LogitsPosition, sequence: SequenceSlot, position: int
    ) -> int:
        """Entry of the token table that the next step reads as LAST. Tokens after drafts and those of forks
        are discarded: no next step reads them."""
        row = plan.rows[logits_position.row]
        if logits_position.seq != row.seq or row.drafts or position >= self._table.columns:
            return self._table.discard_index
        return sequence.row * self._table.columns + position

    # ------------------------------------------------------------------------ compute

    def captured(self, prepared: PreparedStep) -> bool:
        """True if the step's graph is there already, or no graph holds such a step."""
        kind = prepared.graph_kind or ("last states" if prepared.padded else "")
        if prepared.batch.all_logits and not kind:
            kind = _LOGITS_KINDS[prepared.approximate]
        return not kind or self.graphs.has(kind, prepared.batch.shape)

    def compute(self, step: PendingStep, prepared: PreparedStep) -> None:
        """Queue the forward pass, the sampling and the copies to the host. May run out of memory
        (cuda_errors.is_out_of_memory)."""
        batch = prepared.batch
        table = self._table
        model = self._model

        def inputs(logits_indices: torch.Tensor | None) -> ModelInputs:
            return model_inputs(
                batch,
                prepared.slices,
                table.token_table,
                table.block_tables,
                logits_indices,
                table.window_tables,
            )

        def logits_of_all() -> tuple[torch.Tensor, Rescoring | None]:
            states = model.hidden_states(inputs(None))
            out = self._graph_logits.rows(states.shape[0])
            if prepared.approximate:
                return model.approximate_logits(states, out)
            return model.logits(states, out), None

        def all_logits() -> tuple[torch.Tensor, ...]:
            logits, rescoring = logits_of_all()
            return (logits,) if rescoring is None else (logits, *rescoring)

        def whole_step() -> tuple[torch.Tensor, torch.Tensor]:
            logits, rescoring = logits_of_all()
            return logits, self._sample(prepared.samples[0], logits, rescoring)

        if prepared.graph_kind:
            logits, results = self.graphs.run(prepared.graph_kind, batch.shape, whole_step)
            self._queue_top_logprobs(step, prepared.samples[0], logits, results)
            self._queue_results(step, prepared, results)
            return
        source: partial[torch.Tensor]
        rescoring: Rescoring | None = None
        if batch.all_logits:
            kind = _LOGITS_KINDS[prepared.approximate]
            logits, *exact = self.graphs.run(kind, batch.shape, all_logits)
            rescoring = Rescoring(*exact) if exact else None
            source = partial(_part, logits)
        else:
            source = partial(_logits_part, model, self._selected_states(prepared, inputs))
        self._sample_all(step, prepared, source, rescoring)
        self._queue_prompt_logprobs(step, prepared, source)

    def _selected_states(
        self, prepared: PreparedStep, inputs: Callable[[torch.Tensor | None], ModelInputs]
    ) -> torch.Tensor:
        """Last states [P, hidden] of the tokens whose logits are computed."""
        indices = prepared.logits_indices.view()
        if not prepared.batch.captured:
            return self._model.hidden_states(inputs(indices))

        def last_states() -> tuple[torch.Tensor]:
            states = self._model.hidden_states(inputs(indices))
            return (self._graph_states.rows(states.shape[0]).copy_(states),)

        if prepared.padded:
            return self.graphs.run("last states", prepared.batch.shape, last_states)[0]

        def all_states() -> tuple[torch.Tensor]:
            states = self._model.hidden_states(inputs(None))
            return (self._graph_states.rows(states.shape[0]).copy_(states),)

        (states,) = self.graphs.run("states", prepared.batch.shape, all_states)
        return torch.index_select(states, 0, indices)

    def _sample_all(
        self,
        step: PendingStep,
        prepared: PreparedStep,
        source: partial[torch.Tensor],
        rescoring: Rescoring | None,
    ) -> None:
        results = []
        # Batches of the same range share its logits.
        held: tuple[tuple[int, int], torch.Tensor] | None = None
        for samples in prepared.samples:
            if held is None or held[0] != samples.logits_range:
                held = (samples.logits_range, source(*samples.logits_range))
            results.append(self._sample(samples, held[1], rescoring))
            self._queue_top_logprobs(step, samples, held[1], results[-1])
        if len(results) == 1:
            self._queue_results(step, prepared, results[0])
        elif results:
            each = zip(results, prepared.samples, strict=True)
            used = [result[:, : len(samples.rows)] for result, samples in each]
            self._queue_results(step, prepared, torch.cat(used, 1))

    def _sample(
        self, samples: SampleBatch, logits: torch.Tensor, rescoring: Rescoring | None
    ) -> torch.Tensor:
        """Sample, and write the tokens where the next step looks for them: [3, P and more], tokens int32, and
        the bits of logprobs and normalizers. Each row begins at 16 bytes, as arrays of the step buffer do: so
        one compiled kernel serves all."""
        count = len(samples.rows)
        width = count + -count % ALIGNED_WORDS
        results = torch.empty(3, width, dtype=torch.int32, device=logits.device)
        tokens, *floats = results[:, :count]
        out = SampledTokens(tokens, *(each.view(torch.float32) for each in floats))
        self._sampler.sample(logits, samples, out, rescoring)
        # A position without usable logits gives -1, and the next step may be queued already.
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
        else:  # of several batches together; each alone was written over the one before
            values = self._to_host(results[:2])
        step.sampled = {n: at for each in prepared.samples for n, at in each.results.items()}
        step.tokens = values[0]
        step.logprobs = values[1].view(torch.float32)

    # ------------------------------------------------------------------------ log probabilities

    def _queue_top_logprobs(
        self, step: PendingStep, samples: SampleBatch, logits: torch.Tensor, results: torch.Tensor
    ) -> None:
        """The best candidates of sampled positions that asked for them."""
        numbers = tuple(n for n in samples.results if step.top_counts[n] > 0)
        if not numbers:
            return
        # Results are numbered through all batches of a step; a padded batch is the only one.
        base = min(samples.results.values())
        padded = len(samples.rows) != len(samples.results)
        at = [samples.results[n] - (0 if padded else base) for n in numbers]
        rows = self._to_device([samples.rows[i] for i in at])
        normalizers = results[2].view(torch.float32)[self._to_device(at)]
        most = max(step.top_counts[n] for n in numbers)
        step.top_logprobs.append(self._top_logprobs(numbers, logits[rows], normalizers, most, None))

    def _queue_prompt_logprobs(
        self, step: PendingStep, prepared: PreparedStep, source: partial[torch.Tensor]
    ) -> None:
        """Log probabilities of the prompt's own tokens."""
        positions = step.plan.positions
        numbers = [n for n, position in enumerate(positions) if position.kind == "prompt"]
        numbers.sort(key=prepared.logits_rows.__getitem__)
        for at in range(0, len(numbers), self._max_rows):
            some = tuple(numbers[at : at + self._max_rows])
            rows = [prepared.logits_rows[n] for n in some]
            low = rows[0]
            high = rows[-1] + 1
            logits = source(low, high)[self._to_device([row - low for row in rows])]
            tokens = self._to_device([positions[n].token for n in some])
            most = max(positions[n].top for n in some)
            found = self._top_logprobs(some, logits, torch.logsumexp(logits, 1), most, tokens)
            step.prompt_logprobs.append(found)

    def _top_logprobs(
        self,
        numbers: tuple[int, ...],
        logits: torch.Tensor,
        normalizers: torch.Tensor,
        most: int,
        tokens: torch.Tensor | None,
    ) -> TopLogprobs:
        """`tokens`: compute their own log probabilities, too; None: the sampler did."""
        own = normalizers
        if tokens is not None:
            own = logits.gather(1, tokens[:, None])[:, 0] - normalizers
        top, ids = logits.topk(min(most, logits.shape[1]), 1)
        return TopLogprobs(
            numbers,
            self._to_host(own),
            self._to_host(top - normalizers[:, None]),
            self._to_host(ids),
        )

    def _to_device(self, values: Sequence[int]) -> torch.Tensor:
        found = torch.tensor(values)
        if not self._gpu:
            return found
        return found.pin_memory().to(self._table.device, non_blocking=True)

    def _to_host(self, values: torch.Tensor) -> torch.Tensor:
        """A copy in host memory, complete once the step's event is."""
        if not self._gpu:
            return values.clone()
        held = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        return held.copy_(values, non_blocking=True)


def _whole_step_kind(sequences: Sequence[SequenceSlot], *, approximate: bool) -> str:
    penalised = any(one.sampling.penalised for one in sequences)
    return (_PENALISED_KIND if penalised else "sampled") + (_APPROXIMATE if approximate else "")


def _part(logits: torch.Tensor, low: int, high: int) -> torch.Tensor:
    return logits[low:high]


def _logits_part(model: DeviceModel, states: torch.Tensor, low: int, high: int) -> torch.Tensor:
    return model.logits(states[low:high])
