"""One step on the device: what a plan wants is put into the inbox, then the network runs and points draw.

In the plain case (one sampled point a token at most, no masks, no penalties) one graph holds everything from
the token ids to the drawn tokens. Else, where a plan only decodes or verifies drafts, it ends at the logits of
all tokens; with prompt chunks in the step at the last states, and logits are computed for the wanted tokens
alone, a few rows at a time: 2,048 rows of 152k logits would take 1.2 GB.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from localchat.backend_api.interface import LogitsPosition, Mask, SamplingParams, StepPlan
from localchat_cuda.runner.device_state import SequenceSlot, StateTable
from localchat_cuda.runner.input_batch import (
    BatchConfig,
    InputBatch,
    Places,
    TokenSpan,
    build_input_batch,
    model_inputs,
    put,
)
from localchat_cuda.runner.kv_pages import ModelInputs
from localchat_cuda.runner.model import CudaGraphs, DeviceModel
from localchat_cuda.runner.sampler import DeviceSampler, Points, SampledTokens
from localchat_cuda.runner.step_buffer import ALIGNED, BufferSlice, StepBuffer
from localchat_cuda.runner.step_output import PendingStep, TopLogprobs

MakeInputs = Callable[[torch.Tensor | None], ModelInputs]
_IDLE = SamplingParams(temperature=0.0)
_ENDS = 8
"""Most points of a step with prompt chunks that one graph draws: each graph holds their logits for good."""


class _Draw(NamedTuple):
    """A draw of some points: from rows of logits `low` to `high` of the wanted ones. numbers: by point, its
    place among the drawn. places: where the drawn tokens go in the table of known tokens."""

    low: int
    high: int
    numbers: dict[int, int]
    points: Points
    places: BufferSlice


class Work(NamedTuple):
    """Everything of a step that was put into the inbox. wanted: tokens whose logits are computed. rows: of
    logits, by point. whole: the kind of the graph that holds all of the step, one draw included; empty where
    none can."""

    layout: InputBatch
    places: Places
    wanted: BufferSlice
    draws: list[_Draw]
    rows: dict[int, int]
    whole: str


class StepExecutor:
    """Prepares and queues steps. `most`: rows of logits at once, and points of one draw."""

    def __init__(
        self, model: DeviceModel, table: StateTable, buffer: StepBuffer, sampler: DeviceSampler,
        sizes: BatchConfig, graphs: CudaGraphs, most: int,
    ) -> None:  # fmt: skip
        self._model, self._table, self._buffer = model, table, buffer
        self._sampler, self._sizes, self.graphs, self._most = sampler, sizes, graphs, most
        self._gpu = table.device.type == "cuda"
        self._nobody = SequenceSlot(table.scratch, _IDLE, 0)

    # ------------------------------------------------------------------------ into the inbox

    def prepare(self, step: PendingStep) -> Work:
        """Lay the step out. The inbox is empty before: graphs look for a shape's arrays at its beginning."""
        plan, table = step.plan, self._table
        spans = [TokenSpan(row.slot, row.start, row.width) for row in plan.rows]
        layout = build_input_batch(spans, plan.pad_to, self._sizes, table.scratch)
        places = put(layout, self._buffer, table.columns, table.scratch, table.nothing)
        spots = [layout.first[point.row] + point.offset for point in plan.positions]
        samples = [n for n, point in enumerate(plan.positions) if point.kind == "sample"]
        step.wants = {n: table.of[plan.positions[n].seq].sampling.top_logprobs for n in samples}
        if self._is_plain(plan, layout, [spots[n] for n in samples]):
            return self._put_plain(plan, layout, places, {spots[n]: n for n in samples})
        if layout.every:
            rows = dict(enumerate(spots))
            wanted: list[int] = []
            total = layout.shape.tokens
        else:
            wanted = sorted(set(spots))
            rank = {spot: i for i, spot in enumerate(wanted)}
            rows = {number: rank[spot] for number, spot in enumerate(spots)}
            total = len(wanted)
        samples.sort(key=rows.__getitem__)
        draws = self._put_draws(plan, samples, rows, total, every=layout.every)
        return Work(layout, places, self._buffer.put(wanted, wide=True), draws, rows, "")

    def _is_plain(self, plan: StepPlan, layout: InputBatch, spots: list[int]) -> bool:
        fitting = layout.shape.tokens <= self._most if layout.every else 0 < len(spots) <= _ENDS
        return (
            fitting
            and layout.captured
            and not plan.masks
            and len(spots) == len(plan.positions) == len(set(spots))
            and not any(self._table.of[p.seq].sampling.penalised for p in plan.positions)
        )

    def _put_plain(
        self, plan: StepPlan, layout: InputBatch, places: Places, numbers: dict[int, int]
    ) -> Work:
        """One draw: for each token of a step that only decodes, else for the wanted ones and as many more as
        make a power of two, so that graphs are few. What nobody wants goes nowhere."""
        table = self._table
        cells: list[int] = list(range(layout.shape.tokens)) if layout.every else sorted(numbers)
        kind = "drawn"
        if not layout.every:
            cells += [-1] * ((1 << (len(cells) - 1).bit_length()) - len(cells))
            kind = f"drawn {len(cells)}"
        wanted = self._buffer.put([max(0, spot) for spot in cells], wide=True)
        known, positions, targets = [], [], []
        for spot in cells:
            number = numbers.get(spot, -1)
            if number < 0:
                known.append(self._nobody)
                positions.append(0)
                targets.append(table.nowhere)
                continue
            point = plan.positions[number]
            known.append(table.of[point.seq])
            positions.append(plan.rows[point.row].start + point.offset + 1)
            targets.append(self._place(plan, point, known[-1], positions[-1]))
        points = self._put_points(range(len(cells)), known, positions, [None] * len(cells))
        found = {numbers[spot]: cell for cell, spot in enumerate(cells) if spot in numbers}
        draw = _Draw(0, len(cells), found, points, self._buffer.put(targets, wide=True))
        return Work(layout, places, wanted, [draw], found, kind)

    def _put_draws(
        self, plan: StepPlan, samples: Sequence[int], rows: dict[int, int], total: int, *,
        every: bool,
    ) -> list[_Draw]:  # fmt: skip
        """Draws of at most so many points, from at most so many rows of logits; `samples` by their rows."""
        masks = {mask.index: mask for mask in plan.masks}
        draws: list[_Draw] = []
        at = 0
        while at < len(samples):
            low = 0 if every else rows[samples[at]] // self._most * self._most
            high = total if every else min(low + self._most, total)
            end = at
            while end < len(samples) and rows[samples[end]] < high and end - at < self._most:
                end += 1
            numbers = samples[at:end]
            points = [plan.positions[n] for n in numbers]
            known = [self._table.of[point.seq] for point in points]
            positions = [plan.rows[point.row].start + point.offset + 1 for point in points]
            each = zip(points, known, positions, strict=True)
            places = [self._place(plan, *one) for one in each]
            held = self._put_points(
                [rows[n] - low for n in numbers], known, positions, [masks.get(n) for n in numbers]
            )
            spot = self._buffer.put(places, wide=True)
            draws.append(_Draw(low, high, {n: at + i for i, n in enumerate(numbers)}, held, spot))
            at = end
        return draws

    def _put_points(
        self, rows: Sequence[int], known: Sequence[SequenceSlot], positions: Sequence[int],
        masks: Sequence[Mask | None],
    ) -> Points:  # fmt: skip
        put = self._buffer.put
        owners = [one.row for one in known]
        return Points(rows, known, positions, masks, put(rows), put(owners), put(positions))

    def _place(
        self, plan: StepPlan, point: LogitsPosition, known: SequenceSlot, position: int
    ) -> int:
        """Where a next row looks for this token as LAST; nobody does behind drafts, or for a fork."""
        row = plan.rows[point.row]
        if point.seq != row.seq or row.drafts or position >= self._table.columns:
            return self._table.nowhere
        return known.row * self._table.columns + position

    # ------------------------------------------------------------------------ compute

    def compute(self, step: PendingStep, work: Work) -> None:
        """Queue the network, the draws, and the way home. Raises torch.OutOfMemoryError."""
        layout, buffer, table = work.layout, self._buffer, self._table

        def inputs(wanted: torch.Tensor | None) -> ModelInputs:
            return model_inputs(layout, work.places, buffer, table.known, table.tables, wanted)

        def whole() -> tuple[torch.Tensor]:
            return (self._model.logits(self._model.states(inputs(None))),)

        def drawn() -> tuple[torch.Tensor, torch.Tensor]:
            wanted = None if layout.every else buffer.view(work.wanted)
            logits = self._model.logits(self._model.states(inputs(wanted)))
            return logits, self._draw(work.draws[0], logits)

        if work.whole:
            logits, results = self.graphs.run(work.whole, layout.shape, drawn)
            self._judge(step, work.draws[0], logits, results)
            self._bring(step, work, results)
            return
        source: partial[torch.Tensor]
        if layout.every:
            (logits,) = self.graphs.run("logits", layout.shape, whole)
            source = partial(_part, logits)
        else:
            source = partial(_logits_part, self._model, self._wanted(work, inputs))
        self._draw_all(step, work, source)
        self._judge_prompt(step, work, source)

    def _wanted(self, work: Work, inputs: MakeInputs) -> torch.Tensor:
        """Last states of the wanted tokens [P, hidden]."""
        wanted = self._buffer.view(work.wanted)
        if not work.layout.captured:
            return self._model.states(inputs(wanted))
        (states,) = self.graphs.run(
            "states", work.layout.shape, lambda: (self._model.states(inputs(None)),)
        )
        return torch.index_select(states, 0, wanted)

    def _draw_all(self, step: PendingStep, work: Work, source: partial[torch.Tensor]) -> None:
        results = []
        held: tuple[int, torch.Tensor] | None = None
        for draw in work.draws:
            if held is None or held[0] != draw.low:
                held = (draw.low, source(draw.low, draw.high))
            results.append(self._draw(draw, held[1]))
            self._judge(step, draw, held[1], results[-1])
        if len(results) == 1:
            self._bring(step, work, results[0])
        elif results:
            each = zip(results, work.draws, strict=True)
            found = [result[:, : len(draw.points.rows)] for result, draw in each]
            self._bring(step, work, torch.cat(found, 1))

    def _draw(self, draw: _Draw, logits: torch.Tensor) -> torch.Tensor:
        """Draw, and write what was drawn where the next step looks for it: [3, P and more], tokens int32, and
        the bits of logprobs and normalizers. Each begins at 16 bytes, as in the inbox: for one kernel."""
        points = len(draw.points.rows)
        room = points + -points % ALIGNED
        results = torch.empty(3, room, dtype=torch.int32, device=logits.device)
        tokens, *floats = results[:, :points]
        drawn = SampledTokens(tokens, *(each.view(torch.float32) for each in floats))
        self._sampler.draw(logits, draw.points, self._buffer, drawn)
        # A point without usable logits brings -1, and the next step may be on its way already.
        self._table.known.index_copy_(0, self._buffer.view(draw.places), tokens.clamp(min=0))
        return results

    def _bring(self, step: PendingStep, work: Work, results: torch.Tensor) -> None:
        home = self._home(results[:2])
        step.drawn = {n: at for draw in work.draws for n, at in draw.numbers.items()}
        step.tokens, step.logprobs = home[0], home[1].view(torch.float32)

    # ------------------------------------------------------------------------ log probabilities

    def _judge(
        self, step: PendingStep, draw: _Draw, logits: torch.Tensor, results: torch.Tensor
    ) -> None:
        """The best candidates of sampled points, where they are wanted."""
        asked = tuple(n for n in draw.numbers if step.wants[n] > 0)
        if not asked:
            return
        base = min(draw.numbers.values())
        plain = len(draw.points.rows) != len(draw.numbers)
        at = [draw.numbers[n] - (0 if plain else base) for n in asked]
        rows = self._sent([draw.points.rows[i] for i in at])
        normalizers = results[2].view(torch.float32)[self._sent(at)]
        most = max(step.wants[n] for n in asked)
        step.judged.append(self._judged(asked, logits[rows], normalizers, most, None))

    def _judge_prompt(self, step: PendingStep, work: Work, source: partial[torch.Tensor]) -> None:
        """Log probabilities of the prompt's own tokens."""
        points = step.plan.positions
        numbers = [n for n, point in enumerate(points) if point.kind == "prompt"]
        numbers.sort(key=work.rows.__getitem__)
        for at in range(0, len(numbers), self._most):
            some = tuple(numbers[at : at + self._most])
            low, high = work.rows[some[0]], work.rows[some[-1]] + 1
            logits = source(low, high)[self._sent([work.rows[n] - low for n in some])]
            tokens = self._sent([points[n].token for n in some])
            most = max(points[n].top for n in some)
            judged = self._judged(some, logits, torch.logsumexp(logits, 1), most, tokens)
            step.prompt.append(judged)

    def _judged(
        self, numbers: tuple[int, ...], logits: torch.Tensor, normalizers: torch.Tensor, most: int,
        tokens: torch.Tensor | None,
    ) -> TopLogprobs:  # fmt: skip
        """tokens: whose own log probabilities are wanted; None: they are known already."""
        own = normalizers
        if tokens is not None:
            own = logits.gather(1, tokens[:, None])[:, 0] - normalizers
        top, ids = logits.topk(min(most, logits.shape[1]), 1)
        return TopLogprobs(
            numbers, self._home(own), self._home(top - normalizers[:, None]), self._home(ids)
        )

    def _sent(self, values: Sequence[int]) -> torch.Tensor:
        found = torch.tensor(values)
        if not self._gpu:
            return found
        return found.pin_memory().to(self._table.device, non_blocking=True)

    def _home(self, values: torch.Tensor) -> torch.Tensor:
        """A copy in host memory, complete once the step's event is."""
        if not self._gpu:
            return values.clone()
        held = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        return held.copy_(values, non_blocking=True)


def _part(logits: torch.Tensor, low: int, high: int) -> torch.Tensor:
    return logits[low:high]


def _logits_part(model: DeviceModel, states: torch.Tensor, low: int, high: int) -> torch.Tensor:
    return model.logits(states[low:high])
