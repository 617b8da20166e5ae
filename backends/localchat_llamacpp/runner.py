"""Executes step plans with llama_decode.

On a CPU `launch` only stores the plan, and `collect` computes. So the engine core sends the events of the last
step between the two, without a thread that would compete with llama.cpp's own for a core.

On a GPU llama_decode returns early, and only the logits wait for it. So `launch` begins a step if no other is
in flight, and `collect` begins the next one as soon as it has sampled the previous one. The engine core's work
in between costs the GPU no time.
"""

import ctypes
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localchat.backend_api.interface import (
    LAST,
    Capabilities,
    Enter,
    LogitsPosition,
    MemoryReport,
    Sample,
    SamplingParams,
    StepPlan,
    StepResult,
    StepRow,
    StepStatus,
)
from localchat.backend_api.media import MediaChunk, MediaSpan
from localchat.backend_api.sampling.reference import GREEDY_BELOW, Sampler
from localchat.backend_api.sampling.token_counts import TokenCounts
from localchat.errors import LocalchatError
from localchat_llamacpp.adapters import LoadedAdapters
from localchat_llamacpp.batch import Batch, EmbeddingBatch, float_array
from localchat_llamacpp.drafter import LlamaDrafter
from localchat_llamacpp.head_states import PROMPT_STATES, HeadStates
from localchat_llamacpp.media_api import media_library
from localchat_llamacpp.media_reader import Chunk, MediaEncoder
from localchat_llamacpp.native import library
from localchat_llamacpp.native_model import ContextSpec, Weights, outputs_max
from localchat_llamacpp.positions import NO_TABLE, PositionTable
from localchat_llamacpp.slots import Slots
from localchat_llamacpp.thread_count import ThreadWatch


class StopFlag:
    """Abort flag that llama.cpp reads after every node of its graph, without the interpreter's lock.

    llama.cpp reads it 190 times per step of the guide, and a thousand times in a larger model. A Python
    callback would take the lock each time while other threads wait at the barrier (measured: 70 to 140 of the
    guide's 1,400 µs per step). So the callback is C's `strlen`: it gets the address of a text with one or no
    character, and returns 1 or 0. Any thread may call `set`, which lasts until `clear`.
    """

    def __init__(self) -> None:
        self._text = ctypes.create_string_buffer(2)

    def set(self) -> None:
        self._text[0] = b"\1"

    def clear(self) -> None:
        self._text[0] = b"\0"

    def callback(self, kind: Any) -> tuple[Any, ctypes.c_void_p]:  # noqa: ANN401 - a type of the binding
        """Return a `bool (*)(void *)` of this `kind` and its argument. Both must outlive their use."""
        pointer = ctypes.cast(ctypes.CDLL(None).strlen, kind)
        return pointer, ctypes.c_void_p(ctypes.addressof(self._text))


_NO_ROOM = 1
_ABORTED = 2


@dataclass(slots=True)
class _SequenceState:
    """State of a sequence in the runner."""

    tokens: list[int]
    sampling: SamplingParams
    counts: TokenCounts | None
    """Token counts. None without penalties."""
    prompt_tokens: int

    def counts_before(self, position: int, since: int) -> TokenCounts | None:
        """Return the counts of the tokens before `position`. Tokens from `since` on may have changed."""
        if self.counts is not None:
            begin = min(since, len(self.counts))
            self.counts.write(begin, self.tokens[begin:position])
        return self.counts


@dataclass(slots=True, eq=False)
class _DecodePart:
    """A call of llama_decode: stretches of rows, and the index of each requested row of logits."""

    stretches: list[tuple[int, int, int]]
    """(row, first offset, end offset)."""
    outputs: dict[tuple[int, int], int]
    """(row, offset) -> index of its logits."""
    media: MediaSpan | None = None
    """Picture or recording that the only stretch belongs to."""
    adapters: tuple[float, ...] = ()
    """Scales of the LoRA adapters, which are the same for all rows."""
    stores_states: bool = False
    """Whether the prediction head needs the states of these tokens."""


@dataclass(slots=True)
class _LaunchedStep:
    """A launched step."""

    plan: StepPlan
    parts: list[_DecodePart]
    started_s: float = 0.0
    void: bool = False
    """Whether the previous step returned fewer tokens than planned."""
    status: StepStatus = "ok"
    tokens: list[tuple[int, ...]] = field(default_factory=list)
    """Tokens of each row. Empty if the step was not computed."""


class LlamaCppRunner:
    """Runner over one native context."""

    def __init__(
        self,
        weights: Weights,
        context: int,
        capabilities: Capabilities,
        *,
        spec: ContextSpec,
        batch: Batch,
        vocab_size: int,
        report: MemoryReport,
        drafter: LlamaDrafter | None = None,
        on_gpu: bool = False,
        mrope: bool = False,
        media: MediaEncoder | None = None,
        adapters: LoadedAdapters | None = None,
    ) -> None:
        """Take ownership of `weights`, `context`, `drafter` and `media`.

        spec: parameters of the context. on_gpu: llama_decode returns early. mrope: the tokens of a picture
        share positions. media: reads attachments. adapters: LoRA adapters of the weights.
        """
        self._api: Any = library().api
        self.capabilities = capabilities
        self._weights = weights
        self._context = context
        self._batch = batch
        self._outputs_max = outputs_max(spec)
        self._vocab_size = vocab_size
        self._report = report
        self._drafter = drafter
        self._head_states: HeadStates | None = None
        if drafter is not None:
            self._head_states = drafter.states
        self._outputs_states = False
        """Whether the native context outputs the states of all tokens."""
        self._slots = Slots(
            context,
            capabilities.max_slots + 1,
            can_truncate=capabilities.rewind != "checkpoint",
            window_tokens=capabilities.rewind_tokens if spec.window_only else 0,
            mrope=mrope,
        )
        self._media = media
        self._adapters = adapters
        self._scales: dict[int, tuple[float, ...]] = {}
        """Scales of the LoRA adapters, of the sequences that have any."""
        self._spans: dict[int, tuple[MediaSpan, ...]] = {}
        """Pictures and recordings of the sequences that have any."""
        self._tables: dict[int, PositionTable] = {}
        self._sampler = Sampler(vocab_size)
        self._sequences: dict[int, _SequenceState] = {}
        self._watch = ThreadWatch(spec.threads)
        self._flash_attention = spec.flash_attention
        self._threads = spec.threads
        """Threads of the native context."""
        self._on_gpu = on_gpu
        self._launched: deque[_LaunchedStep] = deque()
        """Launched steps that have not begun."""
        self._begun: _LaunchedStep | None = None
        self._written: tuple[_DecodePart, int] | None = None
        """Part in the batch and how far its rows moved, except for tokens that the previous step samples."""
        self._run: tuple[tuple[StepRow, ...], list[_DecodePart]] = ((), [])
        """Rows of the last plan, which later plans may move on, and their parts."""
        self._logits: NDArray[np.float32] = np.empty((0, vocab_size), np.float32)
        self._logits_address = 0
        self._states: NDArray[np.float32] = np.empty((0, 0), np.float32)
        """View of the native states of the last decode, for the prediction head."""
        self._states_address = 0
        self._stop = StopFlag()
        # An aborted step is undone by truncation, which recurrent models cannot do.
        if capabilities.rewind != "checkpoint":
            self._callback = self._stop.callback(self._api.ggml_abort_callback)
            self._api.llama_set_abort_callback(context, *self._callback)

    @property
    def drafter(self) -> LlamaDrafter:
        """See DraftingRunner."""
        assert self._drafter is not None, "the capabilities say that there is no draft model"
        return self._drafter

    def launch(self, plan: StepPlan) -> None:
        """Store the plan for `collect`. On a GPU, begin it if no other step is in flight."""
        in_flight = len(self._launched) + (self._begun is not None)
        assert in_flight < self.capabilities.depth, f"{in_flight} steps are in flight"
        width = sum(row.width for row in plan.rows)
        assert width <= self.capabilities.max_step_tokens, f"a step of {width} tokens"
        for entry in plan.enter:
            # The step is divided before it begins.
            self._enter_division(entry)
        if plan.rows is not self._run[0] or not plan.moved:
            self._run = (plan.rows, self._parts(plan))
        step = _LaunchedStep(plan, self._run[1])
        if self._on_gpu and self._begun is None:
            self._begun = self._begin(step)
            return
        self._launched.append(step)
        if self._on_gpu and step.parts:
            self._write(plan, step.parts[0])

    def collect(self) -> StepResult:
        """Finish the oldest step and begin the next one.

        Raises RuntimeError if llama.cpp fails for a reason other than the plan.
        """
        step = self._begun or self._begin(self._launched.popleft())
        plan = step.plan
        samples = self._draw(step)
        elapsed_s = time.perf_counter() - step.started_s
        earliest = self._earliest(plan)
        computed = self._computed(step)
        follows = None
        if self._launched:
            follows = self._launched.popleft()
        short = step.status != "ok" and not step.void
        self._begun = self._begin(follows, void=short) if follows else None
        if step.status != "ok":
            lost = tuple(sorted(self._slots.lost))
            return StepResult(
                plan.number, (), computed, earliest, step.status, elapsed_s, lost_slots=lost
            )
        tokens: tuple[int, ...] = ()
        if plan.moved:
            tokens = tuple(sample.token for sample in samples)
            samples = []
        samples.sort(key=lambda sample: sample.index)
        notes = self._thread_notes(plan, sum(computed), elapsed_s)
        return StepResult(
            plan.number, tuple(samples), computed, earliest, "ok", elapsed_s, notes, tokens
        )

    def abort(self) -> None:
        """End the running step at its next operation (milliseconds on a CPU). From any thread."""
        self._stop.set()

    def warm_up_next(self) -> bool:
        """Return False: the load has warmed up."""
        return False

    def encode(
        self, chunks: Sequence[MediaChunk], then: Callable[[LocalchatError | None], None]
    ) -> Callable[[], None]:
        """See MediaRunner."""
        assert self._media is not None, "this model reads no attachments"
        return self._media.encode(chunks, then)

    def export_slot(self, slot: int, start: int, end: int) -> memoryview:
        """See ExportingRunner."""
        return self._slots.export_slot(slot, start, end)

    def export_saved(self, key: int, start: int, end: int) -> memoryview | None:
        """See ExportingRunner."""
        return self._slots.export_saved(key, start, end)

    def memory(self) -> MemoryReport:
        """Return the allocations of the load. Saved slots count as other bytes."""
        other = self._report.other_bytes + self._slots.saved_bytes
        report = self._report._replace(other_bytes=other)
        if self._media is not None:
            return self._media.memory(report)
        return report

    def close(self) -> None:
        """Release context and weights. Idempotent."""
        if self._drafter is not None:
            self._drafter.close()
        if self._media is not None:
            self._media.close()
        if self._context:
            self._logits = np.empty((0, self._vocab_size), np.float32)
            self._states = np.empty((0, 0), np.float32)
            self._api.llama_free(self._context)
            self._context = 0
            self._weights.close()

    def _begin(self, step: _LaunchedStep, *, void: bool = False) -> _LaunchedStep:
        """Apply a plan's memory operations, and begin to compute it."""
        plan = step.plan
        step.started_s = time.perf_counter()
        step.void = void
        self._stop.clear()
        # Apply every operation even if one had no room: the KV cache manager relies on it.
        done = [self._slots.apply(operation, behind_short=void) for operation in plan.memory]
        self._enter(plan)
        if void or not all(done):
            step.status = "aborted" if all(done) else "out_of_memory"
            return step
        step.tokens = [self._row_tokens(row, plan.moved) for row in plan.rows]
        if step.parts:
            step.status = self._decode(step, step.parts[0])
        return step

    def _draw(self, step: _LaunchedStep) -> list[Sample]:
        """Wait for the logits of a step, sample them, and set the step's status."""
        samples: list[Sample] = []
        stopped: set[tuple[int, int]] = set()
        for number, part in enumerate(step.parts):
            if number:
                step.status = self._decode(step, part)
            if step.status != "ok":
                break
            self._view_logits(len(part.outputs))
            if part.stores_states:
                self._store_states(step.plan, part)
            samples += self._sample(step.plan, part, step.tokens, stopped)
        return samples

    def _computed(self, step: _LaunchedStep) -> tuple[int, ...]:
        """Return how many tokens of each row the cache stores."""
        if step.status == "ok":
            return tuple(map(len, step.tokens))
        if not step.tokens:
            return (0,) * len(step.plan.rows)
        return tuple(
            min(max(self._slots.measure(row.slot) - row.start - step.plan.moved, 0), width)
            for row, width in zip(step.plan.rows, map(len, step.tokens), strict=True)
        )

    def _enter(self, plan: StepPlan) -> None:
        if self._head_states is not None:
            self._head_states.forget(plan.leave)
        for seq in plan.leave:
            self._sequences.pop(seq, None)
            self._spans.pop(seq, None)
            self._tables.pop(seq, None)
            self._scales.pop(seq, None)
            if self._drafter is not None:
                self._drafter.forget(seq)
        for entry in plan.enter:
            self._sequences[entry.seq] = _sequence_state(entry)
            # A sequence may leave and enter with the same plan.
            self._enter_division(entry)

    def _row_tokens(self, row: StepRow, moved: int) -> tuple[int, ...]:
        """Return the token ids that a row computes, and store them in its sequence."""
        state = self._sequences[row.seq]
        if moved:
            return (state.tokens[row.start + moved],)
        new_tokens = (state.tokens[row.start],) if row.tokens is LAST else row.tokens
        assert isinstance(new_tokens, tuple)
        tokens = new_tokens + row.drafts
        state.tokens[row.start : row.start + len(tokens)] = tokens
        return tokens

    def _parts(self, plan: StepPlan) -> list[_DecodePart]:
        """Divide a plan into decodes, each with at most `outputs_max` rows of logits."""
        offsets: list[set[int]] = [set() for _ in plan.rows]
        for target in plan.positions:
            offsets[target.row].add(target.offset)
        rows = list(enumerate(plan.rows))
        if self._scales:
            # Each change of the adapters is a decode of its own.
            rows.sort(key=lambda numbered: self._scales.get(numbered[1].seq, ()))
        part = _DecodePart([], {})
        parts = [part] if plan.rows else []
        for number, row in rows:
            scales = self._scales.get(row.seq, ())
            begin = 0
            for end, span in self._stretches(row):
                if span is not None or part.media is not None or part.adapters != scales:
                    # A decode has token ids or embeddings, never both, and one set of adapters.
                    part = _DecodePart([], {}, span, scales)
                    parts.append(part)
                for offset in sorted(o for o in offsets[number] if begin <= o < end):
                    if len(part.outputs) == self._outputs_max:
                        if begin < offset:
                            part.stretches.append((number, begin, offset))
                        begin = offset
                        part = _DecodePart([], {}, span, scales)
                        parts.append(part)
                    part.outputs[number, offset] = len(part.outputs)
                part.stretches.append((number, begin, end))
                begin = end
        return [part for part in parts if part.stretches]

    def _stretches(self, row: StepRow) -> Iterator[tuple[int, MediaSpan | None]]:
        """Yield the end of each stretch of a row, as an offset, and the picture that it belongs to."""
        begin = 0
        for span in self._spans.get(row.seq, ()):
            start = max(span.start - row.start, begin)
            end = min(span.end - row.start, row.width)
            if start < end:
                if start > begin:
                    yield start, None
                yield end, span
                begin = end
        if begin < row.width:
            yield row.width, None

    def _enter_division(self, entry: Enter) -> None:
        """Remember the adapters and pictures of a sequence, by which its rows are divided."""
        if entry.adapters:
            self._scales[entry.seq] = entry.adapters
        if entry.media:
            self._spans[entry.seq] = entry.media
        if entry.media and self._slots.mrope:
            self._tables[entry.seq] = PositionTable.of(
                (span.start, len(chunk.ids), chunk.positions)
                for span in entry.media
                if isinstance(chunk := span.chunk, Chunk) and chunk.positions != len(chunk.ids)
            )

    def _position(self, seq: int, token: int) -> int:
        """Return the position of a token that begins a stretch."""
        if seq in self._tables:
            return self._tables[seq].position(token)
        return token

    def _write(self, plan: StepPlan, part: _DecodePart) -> None:
        """Write a part into the batch, with placeholders for tokens not sampled yet."""
        before = self._written
        self._written = (part, plan.moved)
        if part.media is not None:
            return
        if before == (part, plan.moved - 1):
            self._batch.advance()
            return
        self._batch.clear()
        for number, begin, end in part.stretches:
            row = plan.rows[number]
            tokens = row.tokens if isinstance(row.tokens, tuple) else (0,)
            offsets = [o - begin for n, o in part.outputs if n == number]
            start = self._position(row.seq, row.start + plan.moved + begin)
            self._batch.add(row.slot, start, (tokens + row.drafts)[begin:end], offsets)

    def _decode(self, step: _LaunchedStep, part: _DecodePart) -> StepStatus:
        moved = step.plan.moved
        if self._written != (part, moved):
            self._write(step.plan, part)
        slots = self._slots
        first_output = 0
        for number, begin, end in part.stretches:
            row = step.plan.rows[number]
            start = row.start + moved + begin
            assert slots.lengths[row.slot] == start, (
                f"row at {start} of slot {row.slot}, which holds {slots.lengths[row.slot]} tokens"
            )
            slots.lengths[row.slot] = start + end - begin
            if slots.mrope:
                slots.shared_positions[row.slot] = self._tables.get(row.seq, NO_TABLE)
            if (moved or row.tokens is LAST) and not begin:
                self._batch.replace(first_output, step.tokens[number][0])
            first_output += end - begin
        self._use_threads(self._step_threads(step.plan))
        if self._adapters is not None:
            self._adapters.apply(self._context, part.adapters)
        if part.media is not None:
            status = self._decode_media(step, part, part.media)
        else:
            self._output_states(step.plan, part)
            with self._turn():
                status = self._api.llama_decode(self._context, self._batch.native)
        if status == 0:
            return "ok"
        if slots.mrope:
            for number, begin, _ in part.stretches:
                row = step.plan.rows[number]
                slots.lengths[row.slot] = row.start + moved + begin
        if status in (_NO_ROOM, _ABORTED):
            if status == _NO_ROOM:
                return "out_of_memory"
            return "aborted"
        raise RuntimeError(f"llama_decode failed with status {status}: {library().log.tail()}")

    def _output_states(self, plan: StepPlan, part: _DecodePart) -> None:
        """Make the next decode output the states that the prediction head needs.

        Sequences in exact mode or at temperature 0 have no drafts. Their steps output none, and so compute the
        bits of a load without the head.
        """
        if self._head_states is None:
            return
        may_draft = not plan.exact and any(
            self._may_draft(plan.rows[number], plan.moved + end)
            for number, _, end in part.stretches
        )
        part.stores_states = may_draft and self.drafter.active
        # A change makes llama.cpp reserve its graphs again, which takes as long as ten steps of a small model.
        if may_draft and not part.stores_states:
            return
        if may_draft != self._outputs_states:
            self._outputs_states = may_draft
            self._api.llama_set_embeddings_nextn(self._context, may_draft, False)

    def _may_draft(self, row: StepRow, end: int) -> bool:
        """Return whether drafts may follow the tokens of a row before the offset `end`."""
        sequence = self._sequences[row.seq]
        is_near = row.start + end > sequence.prompt_tokens - PROMPT_STATES
        return is_near and sequence.sampling.temperature >= GREEDY_BELOW

    def _store_states(self, plan: StepPlan, part: _DecodePart) -> None:
        """Store the states of the tokens of the last decode."""
        states = self._head_states
        assert states is not None
        address = self._api.llama_get_embeddings_nextn(self._context)
        # Creating a view takes longer than copying the states of a decode step.
        if address != self._states_address or self._batch.size > len(self._states):
            self._states = float_array(address, (self._batch.size, states.width))
            self._states_address = address
        first = 0
        for number, begin, end in part.stretches:
            row = plan.rows[number]
            last = first + end - begin
            states.write(row.seq, row.start + plan.moved + begin, self._states[first:last])
            first = last

    def _turn(self) -> AbstractContextManager[None]:
        """Wait until the encoder leaves the cores to this step."""
        if self._media is None or self._on_gpu:
            return nullcontext()
        return self._media.turns.step()

    def _decode_media(self, step: _LaunchedStep, part: _DecodePart, span: MediaSpan) -> int:
        """Compute a stretch of a picture. Return the status of llama_decode."""
        ((number, begin, end),) = part.stretches
        row = step.plan.rows[number]
        chunk = span.chunk
        assert isinstance(chunk, Chunk), "a chunk of another backend"
        assert chunk.embeddings is not None, "a picture was not encoded before its row"
        first = row.start + begin - span.start
        last = row.start + end - span.start
        assert not chunk.whole or (first, last) == (0, len(chunk.ids)), "a picture is divided"
        positions = chunk.token_positions(self._position(row.seq, span.start))
        batch = EmbeddingBatch(row.slot, positions[:, first:last], chunk.embeddings[first:last])
        for _, offset in part.outputs:
            batch.keep_logits(offset - begin)
        api = media_library()
        if chunk.whole:
            api.llama_set_causal_attn(self._context, False)
        # After an abort, llama.cpp removes a position, and with it what earlier steps computed of this picture.
        unstoppable = self._slots.mrope and self.capabilities.rewind != "checkpoint"
        if unstoppable:
            self._api.llama_set_abort_callback(self._context, self._api.ggml_abort_callback(), None)
        try:
            with self._turn():
                status = int(self._api.llama_decode(self._context, batch.native))
                # The batch must outlive the step.
                self._api.llama_synchronize(self._context)
        finally:
            if chunk.whole:
                api.llama_set_causal_attn(self._context, True)
            if unstoppable:
                self._api.llama_set_abort_callback(self._context, *self._callback)
        return status

    def _view_logits(self, rows: int) -> None:
        """Wait for the last decode, and view its logits (rows or more, V)."""
        if not rows:
            self._api.llama_synchronize(self._context)
            return
        address = self._api.llama_get_logits(self._context)
        if address != self._logits_address or rows > len(self._logits):
            self._logits = float_array(address, (rows, self._vocab_size))
            self._logits_address = address

    def _earliest(self, plan: StepPlan) -> tuple[int, ...]:
        if self.capabilities.rewind != "last_n":
            return (0,) * len(plan.rows)
        return tuple(self._slots.earliest(row.slot) for row in plan.rows)

    def _step_threads(self, plan: StepPlan) -> int:
        """Return the threads of a step. Flash attention divides the keys of a lone row among them.

        So its bits depend on their number. Those of plain attention do not.
        """
        if plan.exact and self._flash_attention:
            return self._watch.most
        return self._watch.threads

    def _use_threads(self, threads: int) -> None:
        if threads != self._threads:
            self._threads = threads
            self._api.llama_set_n_threads(self._context, threads, threads)

    def _thread_notes(self, plan: StepPlan, tokens: int, elapsed_s: float) -> tuple[str, ...]:
        if self._step_threads(plan) != self._watch.threads:
            return ()
        note = self._watch.step(tokens, self._slots.cells, elapsed_s, time.monotonic())
        if not note:
            return ()
        return (note,)

    def _sample(
        self,
        plan: StepPlan,
        part: _DecodePart,
        tokens: list[tuple[int, ...]],
        stopped: set[tuple[int, int]],
    ) -> list[Sample]:
        """Sample the positions whose logits this part computed.

        stopped: (row, sequence) whose last sample differs from its draft. Their later positions are skipped.
        """
        masks = {mask.index: mask.words for mask in plan.masks}
        samples = []
        for number, target in enumerate(plan.positions):
            output = part.outputs.get((target.row, target.offset))
            if output is None or (target.row, target.seq) in stopped:
                continue
            logits = self._logits[output]
            if target.kind == "prompt":
                logprobs = self._sampler.logprobs(logits, target.token, target.top)
                all_logprobs = b""
                if target.all:
                    all_logprobs = self._sampler.all_logprobs(logits)
                samples.append(
                    Sample(number, logprobs.token, logprobs.logprob, logprobs.top, all_logprobs)
                )
                continue
            row = plan.rows[target.row]
            following = target.offset + 1
            position = row.start + plan.moved + following
            sample = self._sample_token(number, target, position, logits, masks.get(number))
            samples.append(sample)
            if not row.drafts:
                continue
            drafted = row.width - len(row.drafts) <= following < row.width
            if drafted and tokens[target.row][following] != sample.token:
                stopped.add((target.row, target.seq))
        return samples

    def _sample_token(
        self,
        number: int,
        target: LogitsPosition,
        position: int,
        logits: NDArray[np.float32],
        mask: bytes | None,
    ) -> Sample:
        """Draw the token at a position of its sequence."""
        state = self._sequences[target.seq]
        counts = state.counts_before(position, position - 1 - target.offset)
        drawn = self._sampler.draw(logits, state.sampling, position, counts, mask)
        state.tokens[position : position + 1] = (drawn.token,)
        return Sample(number, drawn.token, drawn.logprob, drawn.top)


def _sequence_state(entry: Enter) -> _SequenceState:
    counts = None
    if entry.sampling.penalised:
        counts = TokenCounts(entry.tokens, entry.prompt_tokens)
    return _SequenceState(list(entry.tokens), entry.sampling, counts, entry.prompt_tokens)
