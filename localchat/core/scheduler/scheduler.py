"""Scheduler: chooses the tokens of each step. Running sequences first, then prompt chunks, under a budget.

Follows the scheduler of vLLM V1, which treats prefill, decode and draft verification alike, and the state
table of its second model runner: a preempted sequence leaves the runner and enters it again as a new one. The
scheduler handles token ids and bookkeeping only. It never waits and never calls a runner.
"""

import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Container, Iterable
from functools import partial

from localchat.backend_api.interface import (
    LAST,
    Capabilities,
    Enter,
    LogitsPosition,
    MemoryOp,
    NewBlocks,
    PaddedWidth,
    StepPlan,
    StepRow,
)
from localchat.backend_api.media import MediaChunk, MediaSpan, cut_before, span_at
from localchat.core.kv_cache.manager import (
    CacheUpdate,
    KVCacheManager,
    PrefixHit,
    ValidTokens,
)
from localchat.core.scheduler.decode_run import DecodeRun
from localchat.core.scheduler.exact_chunks import (
    TurnCuts,
    chunk_end,
    chunk_floor,
    find_at_cut,
    whole_end,
)
from localchat.core.scheduler.step_builder import ScheduledRow, ScheduledStep, StepBuilder
from localchat.core.scheduler.token_budget import TokenBudget
from localchat.core.sequence import Sequence, State
from localchat.core.spec_decode.draft_planner import DraftPlanner

_MIN_PROMPT_TOKENS = 32
_PROMPTS_PER_STEP = 4
"""Limit of prompts in a step. With more, the first one would finish as late as the last."""
_WATERMARK_TOKENS = 32
"""Free cells that an admission leaves, so that no running sequence is preempted at once."""


def missing_chunks(media: Iterable[MediaSpan], cached: int) -> list[MediaChunk]:
    """Return the chunks after the cached tokens whose embeddings are not in memory."""
    return [span.chunk for span in media if span.end > cached and not span.chunk.encoded]


class PromptShares:
    """Divides the tokens of a step among prompts."""

    def __init__(self, can: Capabilities) -> None:
        widths = can.widths
        narrowest = min((*widths.prefill[:1], *widths.mixed[:1]), default=0)
        self.min_tokens = min(max(_MIN_PROMPT_TOKENS, narrowest), can.max_step_tokens)
        """Smallest prompt chunk, no matter how many sequences decode. The runner pads to it anyway."""
        alone = max((_MIN_PROMPT_TOKENS, *widths.prefill[:1]))
        self.min_tokens_alone = min(alone, can.max_step_tokens)
        """Smallest prompt chunk while no sequence decodes, so that none waits for the step."""

    def prompts_per_step(self, tokens_left: int) -> int:
        """Return how many prompts share `tokens_left`. Other prompts get only what these leave."""
        return max(1, min(_PROMPTS_PER_STEP, tokens_left // max(1, self.min_tokens)))

    def tokens_each(self, tokens_left: int, prompts: int) -> int:
        """Return the tokens of each of `prompts`."""
        return max(self.min_tokens, tokens_left // max(1, prompts))


class Scheduler:
    """Owns the queue and the running set. Used by the engine core's thread alone."""

    def __init__(
        self,
        capabilities: Capabilities,
        kv_cache: KVCacheManager,
        token_budget: TokenBudget,
        draft_planner: DraftPlanner,
        encode: Callable[[Sequence, list[MediaChunk]], None] | None = None,
        turn_ends: Container[int] = (),
    ) -> None:
        """`encode`: computes the embeddings of a sequence's chunks, and then adds the sequence again.

        `turn_ends`: ids of the tokens that end a turn of a conversation.
        """
        self._can = capabilities
        self._turn_ends = turn_ends
        self._encode = encode
        self._draft_planner = draft_planner
        self._kv_cache = kv_cache
        self._token_budget = token_budget
        self._shares = PromptShares(capabilities)
        self._exact_chunk = capabilities.exact_chunk_tokens
        self._moves_rows = (
            capabilities.moves_rows
            and capabilities.window_blocks == 0
            and capabilities.rewind == "any"
        )
        self._growth_tokens = capabilities.block_tokens or 1
        """Tokens by which the room of a sequence grows. Slots grow by single tokens."""
        self._cuts_turns = capabilities.block_tokens == 0 and capabilities.rewind != "checkpoint"
        self.row_limit = capabilities.max_rows
        """Limit of running sequences. If it falls, sequences that already run are not stopped."""
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self._memory_ops: list[MemoryOp] = []
        self._enter: list[Enter] = []
        self._leave: list[int] = []
        self._entered: set[int] = set()
        """Numbers of the sequences that have entered the runner."""
        self._load_token_s = capabilities.host_block_s / max(1, capabilities.block_tokens)
        self.step_number = 0
        self._short_of_memory = False
        self._shrink_pending = False
        self.preemptions = 0
        self._run: DecodeRun | None = None
        """Run of the last launched step, if the next one may repeat its rows."""

    def end_run(self) -> None:
        """Forget the rows that the next step might repeat. A sequence ended or a step failed."""
        self._run = None

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence by priority, then in order of arrival, also after a preemption."""
        insort(self.waiting, sequence, key=lambda waiting: (-waiting.priority, waiting.number))

    def add_memory_ops(self, ops: Iterable[MemoryOp]) -> None:
        """Add operations to the next plan, in the order of the KV cache manager's calls."""
        self._memory_ops.extend(ops)

    def remove(self, sequence: Sequence, *, keep: bool) -> None:
        """Remove a sequence that is not in a launched step. `keep`: its KV stays as a prefix."""
        assert not sequence.steps_in_flight, "a launched step still touches it"
        self._run = None
        if sequence in self.running:
            self.running.remove(sequence)
            if keep and sequence.uncommitted:
                valid = ValidTokens(sequence.computed)
                update = self._kv_cache.commit(sequence.number, sequence.tokens, valid)
                self.add_memory_ops(update.memory)
            sequence.uncommitted = False
            self.add_memory_ops(self._kv_cache.release(sequence.number, keep=keep).memory)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self._remove_from_runner(sequence)

    def _remove_from_runner(self, sequence: Sequence) -> None:
        # An entry that was not launched is dropped. Memory operations stay, because others may depend on them.
        self._enter = [enter for enter in self._enter if enter.seq != sequence.number]
        if sequence.number in self._entered:
            self._entered.remove(sequence.number)
            self._leave.append(sequence.number)

    def leave_runner(self, number: int) -> None:
        """Remove a sequence from the runner that another part of the core entered."""
        self._leave.append(number)

    def start_fork(self, parent: Sequence, child: Sequence) -> None:
        """Start a choice that has its first token: from its parent's prompt, or through the queue."""
        assert child.state is State.FORKING
        update = None
        if len(self.running) < self.row_limit:
            update = self._kv_cache.fork(parent.number, child.number)
        # It entered the runner without a slot, for its first sample.
        self._remove_from_runner(child)
        if update is None:
            child.state = State.WAITING
            self.add(child)
            return
        child.launched = child.computed = parent.computed
        self._start(child, update)

    def handle_out_of_memory(self) -> bool:
        """React to a step that ran out of memory. Return False if only one sequence runs.

        A sequence is preempted as soon as one is not in a launched step. None is admitted until a step
        succeeds.
        """
        self._short_of_memory = True
        self._shrink_pending = len(self.running) > 1
        return self._shrink_pending

    def step_succeeded(self) -> None:
        """Record that a step had enough memory."""
        self._short_of_memory = self._shrink_pending = False

    @property
    def idle(self) -> bool:
        """Whether nothing runs or waits, and the runner has received everything."""
        return not (self.running or self.waiting or self._has_pending)

    @property
    def _has_pending(self) -> bool:
        return bool(self._memory_ops or self._enter or self._leave or self._kv_cache.behind)

    @property
    def _admits(self) -> bool:
        """Whether the first waiting sequence finds a row and may run beside others."""
        if not self.waiting or len(self.running) >= self.row_limit:
            return False
        return not self._excluded(self.waiting[0])

    def _is_alone(self, sequence: Sequence) -> bool:
        """Return whether all running sequences belong to the same request."""
        return all(other.request_state is sequence.request_state for other in self.running)

    def _excluded(self, sequence: Sequence) -> bool:
        """Return whether a waiting sequence cannot share steps with the running ones.

        If neighbors in a step change the bits of a row, a seeded request runs alone.
        """
        if not self._can.seeds_run_alone or self._is_alone(sequence):
            return False
        seeded = (other.request_state.seeded for other in self.running)
        return sequence.request_state.seeded or any(seeded)

    def schedule(self) -> ScheduledStep | None:
        """Build the next step. None if nothing can be launched now."""
        if self._shrink_pending and (victim := self._victim(())) is not None:
            self._shrink_pending = False
            self._preempt(victim)
        self._preempt_for_priority()
        if self._run is not None and (repeated := self._repeat(self._run)) is not None:
            return repeated
        self._run = None
        if not self._admits and self._draft_planner.waits(self.running):
            return None
        # A sequence whose last prompt chunk is in flight already counts as decoding.
        shared = any(
            sequence.launched >= sequence.request_state.prompt_tokens for sequence in self.running
        )
        min_tokens = self._shares.min_tokens if shared else self._shares.min_tokens_alone
        budget = self._token_budget.next_step(shared=shared, min_tokens=min_tokens)
        step = StepBuilder(budget, min_tokens)
        self._schedule_shared(step, shared=shared)
        if step.rows:
            return self._launch(step)
        if self._has_pending and not self.running and not self.waiting:
            # The memory operations of the last sequence must not wait for the next request.
            return self._launch(StepBuilder(0))
        return None

    def _schedule_shared(self, step: StepBuilder, *, shared: bool) -> None:
        """Add decode rows, then prompt chunks (always a few tokens), then admissions, under the budget.

        `shared`: sequences decode in this step or in those in flight.
        """
        max_tokens = self._can.max_step_tokens
        ready = [sequence for sequence in self.running if sequence.needs > 0]
        prompts: list[Sequence] = []
        step.drafts = self._draft_planner.choose(
            self.running, ready, step.tokens_left, admits=self._admits
        )
        for sequence in ready:
            if self._add_plain_row(step, sequence):
                continue
            if sequence.decodes and step.tokens_left >= sequence.needs:
                self._add_row(step, sequence)
            elif sequence.needs > 1 or sequence.in_prompt:
                prompts.append(sequence)
        if not prompts and not self.waiting:
            return
        # The sort is stable, so equal priorities stay in order of arrival.
        prompts.sort(key=lambda sequence: -sequence.priority)
        if not self._short_of_memory:
            guaranteed = min(step.min_prompt_tokens, max_tokens - step.width)
            step.tokens_left = max(step.tokens_left, guaranteed)
            affords = partial(self._token_budget.affords, shared=shared)
            step.round_to_width(self._can.widths, max_tokens, affords)
        at_once = self._shares.prompts_per_step(step.tokens_left)
        if prompts and self.waiting:
            self._admit_before(step, prompts, at_once)
        self._add_prompts(step, prompts[:at_once])
        for sequence in prompts[at_once:]:
            if step.fits_prompt(sequence.needs):
                self._add_row(step, sequence, step.tokens_left)
        self._admit_waiting(step)

    def _add_prompts(self, step: StepBuilder, prompts: list[Sequence]) -> None:
        """Add prompts that share a step: first those that can end in it, then equal parts of the others.

        So most prompts of a burst get their first token long before the last one does. The oldest prompt always
        gets its part, no matter how many shorter ones follow it.
        """
        if not prompts:
            return
        oldest = prompts[0]
        reserved = min(oldest.needs, self._shares.tokens_each(step.tokens_left, len(prompts)))
        ranked = sorted(prompts, key=lambda sequence: (-sequence.priority, sequence.needs))
        for index, sequence in enumerate(ranked):
            if sequence is oldest:
                reserved = 0
            step.tokens_left -= reserved
            if step.fits_prompt(sequence.needs):
                sharing = len(ranked) - index - (reserved > 0)
                fits = sequence.needs <= step.tokens_left
                share = self._shares.tokens_each(step.tokens_left, sharing)
                if fits:
                    share = step.tokens_left
                self._add_row(step, sequence, share)
            step.tokens_left += reserved

    def _admit_before(self, step: StepBuilder, prompts: list[Sequence], at_once: int) -> None:
        """Admit waiting requests before the running prompts take all tokens of the step.

        Urgent requests may take all tokens. Others may take one share, if a prompt exceeds the step.
        """
        reserved = 0
        if self.waiting[0].priority <= prompts[0].priority:
            is_long = any(sequence.needs > step.tokens_left for sequence in prompts)
            if len(prompts) >= at_once or not is_long:
                return
            share = self._shares.tokens_each(step.tokens_left, len(prompts) + 1)
            reserved = max(0, step.tokens_left - share)
        step.tokens_left -= reserved
        self._admit_waiting(step)
        step.tokens_left += reserved

    def _admit_waiting(self, step: StepBuilder) -> None:
        """Admit from the queue while a useful part of the budget is left."""
        while self.waiting:
            if not (step.fits_prompt(self.waiting[0].known) and self._admit_next(step)):
                break

    def _launch(self, step: StepBuilder) -> ScheduledStep:
        self.step_number += 1
        plan = StepPlan(
            number=self.step_number,
            rows=tuple(step.rows),
            positions=tuple(step.positions),
            memory=(*self._memory_ops, *self._kv_cache.write_behind()),
            enter=tuple(self._enter),
            leave=tuple(self._leave),
            masks=tuple(step.masks),
            exact=any(row.sequence.exact_mode for row in step.scheduled_rows),
        )
        self._entered.update(enter.seq for enter in self._enter)
        self._memory_ops = []
        self._enter = []
        self._leave = []
        for row in step.scheduled_rows:
            sequence = row.sequence
            if sequence.exact_mode:
                self._note_exact(sequence, row, step)
            sequence.steps_in_flight += 1
            sequence.launched = row.start + row.width
            sequence.unknown += 1 if row.positions and not row.drafts else 0
        padded = PaddedWidth(step.width, step.width)
        if not step.is_decode:
            prompt_tokens = step.width - step.decode_width
            padded = self._can.widths.padded(step.decode_width, prompt_tokens)
        drafting_s = self._draft_planner.drafting_s if step.drafts else 0.0
        rows = tuple(step.scheduled_rows)
        ids = frozenset(row.sequence.request_state.id for row in rows)
        scheduled = ScheduledStep(plan, rows, step.width, step.is_decode, padded, drafting_s, ids)
        if self._may_repeat(scheduled):
            self._run = DecodeRun(scheduled, self._growth_tokens)
        return scheduled

    def _may_repeat(self, step: ScheduledStep) -> bool:
        """Return whether the next step may repeat the rows of this one."""
        count = len(step.rows)
        if not (self._moves_rows and step.is_decode and 0 < count == len(self.running)):
            return False
        if self._can.depth > 1 and self._draft_planner.allows_drafts(self.running):
            # The planner may wait for the tokens in flight.
            return False
        return all(row.is_plain for row in step.rows)

    def _repeat(self, run: DecodeRun) -> ScheduledStep | None:
        """Build a step with the rows of the run, one token further on. None if something else is due."""
        count = len(run.sequences)
        if (
            self.waiting
            or self._enter
            or self._leave
            or self._short_of_memory
            or run.moved >= run.max_moved
            or self._token_budget.next_step(shared=True) < count
            or self._draft_planner.may_draft(run.sequences)
        ):
            return None
        new_blocks = []
        for number in run.rows_at_end_of_block:
            sequence = run.sequences[number]
            if not self._extend(sequence, 1):
                return None
        for number in run.rows_at_end_of_block:
            sequence = run.sequences[number]
            if sequence.new_blocks:
                new_blocks.append(NewBlocks(number, sequence.new_blocks))
                sequence.new_blocks = ()
        run.moved += 1
        self.step_number += 1
        for sequence in run.sequences:
            sequence.launched += 1
            sequence.unknown += 1
            sequence.steps_in_flight += 1
        first = run.step
        plan = StepPlan(
            number=self.step_number,
            rows=first.plan.rows,
            positions=first.plan.positions,
            memory=(*self._memory_ops, *self._kv_cache.write_behind()),
            exact=first.plan.exact,
            moved=run.moved,
            new_blocks=tuple(new_blocks),
        )
        self._memory_ops = []
        return ScheduledStep(
            plan, first.rows, count, True, first.padded, request_ids=first.request_ids
        )

    def _add_plain_row(self, step: StepBuilder, sequence: Sequence) -> bool:
        """Add the next row of a sequence if it is plain. Return False if `_add_row` must decide.

        Nearly all rows of a crowd are plain, and the checks of `_add_row` would cost them ten times as much.
        """
        start = sequence.launched
        if (
            not (self._moves_rows and step.tokens_left > 0 and sequence.is_plain)
            or start < sequence.request_state.prompt_tokens
            or sequence.needs != 1
            or sequence.blocked
            or sequence.loaded_s
            or sequence.number in step.drafts
            or sequence.state is not State.RUNNING
            or not sequence.may_sample()
        ):
            return False
        if start % self._growth_tokens == 0 and not self._extend(sequence, 1):
            return False
        tokens = LAST if sequence.unknown else (sequence.tokens[start],)
        seq = sequence.number
        row = StepRow(seq, self._kv_cache.slot(seq), start, tokens, (), sequence.new_blocks)
        sequence.new_blocks = ()
        position = step.add_position(LogitsPosition(len(step.rows), 0, seq))
        step.add(
            row, ScheduledRow(sequence, start, 1, (), 0, [position], is_plain=True), is_decode=True
        )
        return True

    def _add_row(self, step: StepBuilder, sequence: Sequence, share: int = 0) -> None:
        """Add the next tokens of a running sequence, if there is room for them."""
        if sequence.state is not State.RUNNING or sequence.blocked or self._loading(sequence):
            return
        if (
            self._can.rewind == "checkpoint"
            and sequence.steps_in_flight
            and self._is_copied(sequence)
        ):
            return
        if sequence.grammar_matcher is not None and sequence.unknown:
            # The mask of the next token depends on the token that is still on the device.
            return
        free_tokens = sequence.free_tokens
        if free_tokens is not None and 0 < sequence.unknown >= free_tokens:
            # The token that is still on the device may use up the thinking budget.
            return
        if sequence.decodes and sequence.needs <= max(step.tokens_left, 1):
            if not sequence.may_sample():
                return
            width = sequence.needs
        else:
            width = self._whole_pictures(step, sequence, self._prompt_width(step, sequence, share))
            if not width:
                return
        drafts = step.drafts.get(sequence.number, ())
        if drafts and not (
            self._extend(sequence, width + len(drafts))
            and self._apply(sequence, self._kv_cache.hold_state(sequence.number))
        ):
            # Never preempt a sequence to make room for draft tokens.
            drafts = ()
        while not self._make_room(step, sequence, width):
            if width == 1 or sequence not in self.running or self._is_whole(sequence):
                return
            width = (width + 1) // 2
        self._write_row(step, sequence, width, drafts)

    def _loading(self, sequence: Sequence) -> bool:
        """Return whether KV is still being copied from host memory, and other rows would wait."""
        if time.perf_counter() >= sequence.loaded_s:
            sequence.loaded_s = 0.0
            return False
        return any(other is not sequence and not other.in_prompt for other in self.running)

    def _is_copied(self, sequence: Sequence) -> bool:
        """Return whether the state after the launched steps is about to be saved or forked."""
        end = sequence.launched
        interval = self._can.state_interval_tokens
        saved = end == sequence.request_state.next_state_at(end - 1, interval)
        return saved or (bool(sequence.pending_forks) and not sequence.in_prompt)

    def _prompt_width(self, step: StepBuilder, sequence: Sequence, share: int) -> int:
        """Return the tokens of a prompt's next chunk."""
        width = min(sequence.needs, share or step.tokens_left, step.tokens_left)
        at_state = False
        if self._can.rewind == "checkpoint":
            # A chunk ends at the position where the state is saved.
            interval = self._can.state_interval_tokens
            state_end = sequence.request_state.next_state_at(sequence.launched, interval)
            at_state = 0 < state_end - sequence.launched <= width
            if at_state:
                width = state_end - sequence.launched
        if sequence.exact_mode:
            return self._exact_width(sequence, width)
        if at_state or width == sequence.needs:
            return width
        # A remainder of a few tokens would need a step of its own, padded to many more tokens.
        missing = self._shares.min_tokens - (sequence.needs - width)
        if 0 < missing <= width - self._shares.min_tokens:
            return width - missing
        if self._takes_rest(step, sequence, width):
            return sequence.needs
        return width

    def _exact_width(self, sequence: Sequence, width: int) -> int:
        """Return the tokens of the next chunk in exact mode. `width`: what the step has room for.

        Logits differ in their last bits with the width of the steps that computed them and their prompt. So
        chunks do not depend on measured times, and a request that runs alone gets the same text every time.
        """
        if sequence.was_preempted and not sequence.in_prompt:
            # The answer was generated with this width.
            return 1
        start = sequence.launched
        request_state = sequence.request_state
        alone = len(self.running) == 1 and not self._short_of_memory
        # A model that cannot rewind ends its chunks where the state is saved.
        takes_chunk = alone and self._can.rewind != "checkpoint"
        if takes_chunk:
            width = sequence.needs
        if request_state.media:
            return min(width, chunk_end(request_state.media, start, self._exact_chunk) - start)
        if request_state.cuts is not None and sequence.in_prompt:
            return min(width, request_state.cuts.end(start) - start)
        chunk = self._exact_chunk - start % self._exact_chunk
        prompt_left = request_state.prompt_tokens - start
        if not takes_chunk:
            return min(width, chunk)
        if prompt_left > 0 and start >= self._last_exact_chunk(request_state.prompt_tokens):
            return prompt_left
        if chunk == self._exact_chunk:
            chunk = max(
                (width for width in self._can.exact_widths if width <= prompt_left), default=chunk
            )
        return min(width, chunk)

    def _last_exact_chunk(self, prompt_tokens: int) -> int:
        """Return the position where the last chunk of a prompt starts in exact mode.

        If chunks are as narrow as is efficient, the last one takes the rest along, see `_takes_rest`.
        """
        chunk = self._exact_chunk
        start = (prompt_tokens - 1) // chunk * chunk
        is_narrow = (
            chunk == self._shares.min_tokens_alone and 2 * chunk <= self._can.max_step_tokens
        )
        if is_narrow and prompt_tokens - start < chunk <= start:
            return start - chunk
        return start

    def _takes_rest(self, step: StepBuilder, sequence: Sequence, width: int) -> bool:
        """Return whether a chunk of `width` should include the rest of the prompt.

        A narrow last chunk reads all KV for each of its rows.
        """
        rest = sequence.needs - width
        is_narrow = 0 < rest < self._shares.min_tokens <= width
        fits = step.width + sequence.needs <= self._can.max_step_tokens
        return (
            is_narrow
            and fits
            and not any(other.in_prompt for other in self.running if other is not sequence)
        )

    def _whole_pictures(self, step: StepBuilder, sequence: Sequence, width: int) -> int:
        """Return a width that divides no picture that needs a single step. 0: it waits for another step."""
        start = sequence.launched
        end = whole_end(sequence.request_state.media, start, start + width)
        if end - start > max(step.tokens_left, self._can.max_step_tokens - step.width):
            return 0
        return end - start

    def _is_whole(self, sequence: Sequence) -> bool:
        """Return whether the next tokens are a picture that needs a single step."""
        span = span_at(sequence.request_state.media, sequence.launched)
        return span is not None and span.chunk.whole

    def _note_exact(self, sequence: Sequence, row: ScheduledRow, step: StepBuilder) -> None:
        """Count the tokens of a row whose shape a later request would repeat."""
        end = row.start + row.width
        chunk = self._exact_chunk
        request_state = sequence.request_state
        cuts = request_state.cuts
        if row.start < sequence.exact:
            # Part of the previous step failed, so the rest has another shape.
            if cuts is None:
                sequence.exact = chunk_floor(request_state.media, row.start, chunk)
            else:
                sequence.exact = cuts.floor(row.start)
        if cuts is None:
            is_whole = end == chunk_end(request_state.media, row.start, chunk)
            is_whole = is_whole or (not request_state.media and row.width in self._can.exact_widths)
        else:
            is_whole = row.start < cuts.last and end == cuts.end(row.start)
        follows = row.start == sequence.exact
        in_prompt = end <= request_state.prompt_tokens
        alone = all(other.sequence.request_state is request_state for other in step.scheduled_rows)
        if follows and is_whole and in_prompt and alone:
            sequence.exact = end

    def _make_room(self, step: StepBuilder, sequence: Sequence, width: int) -> bool:
        """Extend a sequence's KV by `width` tokens. Preempt others if necessary."""
        while not self._extend(sequence, width):
            victim = self._victim(step.scheduled_rows)
            if victim is None:
                return False
            self._preempt(victim)
            step.preempted_any = True
            if victim is sequence:
                return False
        return True

    def _extend(self, sequence: Sequence, width: int) -> bool:
        update = self._kv_cache.extend(sequence.number, sequence.launched + width)
        return self._apply(sequence, update)

    def _apply(self, sequence: Sequence, update: CacheUpdate | None) -> bool:
        """Add a change of a sequence's KV to the next plan. Return False without one: there was no room."""
        if update is None:
            return False
        if update.memory:
            self.add_memory_ops(update.memory)
        if update.new_blocks:
            sequence.new_blocks += update.new_blocks
        if update.new_window_blocks:
            sequence.new_window_blocks += update.new_window_blocks
        return True

    def _write_row(
        self, step: StepBuilder, sequence: Sequence, width: int, drafts: tuple[int, ...]
    ) -> None:
        start = sequence.launched
        end = start + width
        number = len(step.rows)
        tokens = tuple(sequence.tokens[start:end])
        assert len(tokens) == width or (width == 1 and sequence.unknown)
        again = 0
        if sequence.decodes and width == sequence.needs:
            again = sequence.recomputed
        scheduled = ScheduledRow(sequence, start, width, drafts, again)
        prompt_tokens = sequence.request_state.prompt_tokens
        if start < prompt_tokens:
            step.add_prompt_logprobs(scheduled, number)
        if end == sequence.virtual and sequence.may_sample():
            for offset in range(width - 1, width + len(drafts)):
                position = LogitsPosition(number, offset, sequence.number)
                scheduled.positions.append(step.add_position(position))
            generated = end - prompt_tokens
            step.add_masks(sequence, scheduled.positions, drafts, generated=generated)
            if end == prompt_tokens:
                # Forks sample once, at the end of the prompt. With depth 2, the next row is scheduled before
                # they have started.
                self._add_forks(step, scheduled, number)
        row = StepRow(
            sequence.number,
            self._kv_cache.slot(sequence.number),
            start,
            tokens if len(tokens) == width else LAST,
            drafts,
            sequence.new_blocks,
            sequence.new_window_blocks,
        )
        sequence.new_blocks = sequence.new_window_blocks = ()
        step.add(row, scheduled, is_decode=width == 1 + again and start >= prompt_tokens)

    def _add_forks(self, step: StepBuilder, row: ScheduledRow, number: int) -> None:
        """Let the choices of a request sample from the last token of its prompt."""
        for child in row.sequence.pending_forks:
            if child.number not in self._entered:
                self._enter.append(child.entry(slot=-1))
            index = step.add_position(LogitsPosition(number, row.width - 1, child.number))
            row.forks.append((child, index))
            step.add_masks(child, [index])

    def _preempt_for_priority(self) -> None:
        """Preempt a sequence for a more urgent request that is not admitted.

        If a launched step still uses the victim, it is preempted in a later plan.
        """
        if self.waiting and self.running and not self._admits:
            victim = min(
                self.running,
                key=lambda sequence: (
                    sequence.priority,
                    sequence.steps_in_flight,
                    -sequence.number,
                ),
            )
            if victim.priority < self.waiting[0].priority:
                victim.blocked = bool(victim.steps_in_flight)
                if not victim.blocked:
                    self._preempt(victim)

    def _victim(self, scheduled: Iterable[ScheduledRow]) -> Sequence | None:
        """Choose the sequence to preempt: lowest priority, then youngest.

        Never one of a launched step or of this step, and never the only running one.
        """
        busy = {id(row.sequence) for row in scheduled}
        free = [
            sequence
            for sequence in self.running
            if not sequence.steps_in_flight and id(sequence) not in busy
        ]
        if len(self.running) < 2 or not free:
            return None
        return min(free, key=lambda sequence: (sequence.priority, -sequence.number))

    def recompute(self, sequence: Sequence) -> None:
        """Preempt a sequence and drop its KV, which cannot be used any more."""
        self._preempt(sequence, keep=False)

    def _preempt(self, victim: Sequence, *, keep: bool = True) -> None:
        """Return a sequence to the queue. The cached part of its KV becomes a prefix hit."""
        self.preemptions += 1
        victim.was_preempted = True
        if keep:
            self.add_memory_ops(self._kv_cache.checkpoint(victim.number).memory)
        self.remove(victim, keep=keep)
        victim.state = State.WAITING
        victim.launched = victim.computed = victim.unknown = victim.recomputed = 0
        victim.exact = 0
        victim.new_blocks = victim.new_window_blocks = ()
        self.add(victim)

    def _admit_next(self, step: StepBuilder) -> bool:
        """Admit the first sequence of the queue if a row and room are free.

        A step that preempted a sequence admits none.
        """
        if step.preempted_any or len(self.running) >= self.row_limit:
            return False
        if self._short_of_memory and self.running:
            return False
        sequence = self.waiting[0]
        if self._excluded(sequence):
            return False
        request_state = sequence.request_state
        sequence.exact_mode = self._is_exact(sequence)
        if sequence.exact_mode and self._cuts_turns and not request_state.media:
            request_state.cuts = self.turn_cuts(request_state.tokens)
        hit = self._find_prefix(sequence)
        if chunks := missing_chunks(request_state.media, hit.cached):
            # It waits elsewhere, and others pass it.
            self.waiting.popleft()
            assert self._encode is not None, "this runner reads no attachments"
            self._encode(sequence, chunks)
            return True
        if not self._has_room(sequence, hit):
            return False
        request = request_state.request
        update = self._kv_cache.allocate(
            sequence.number, sequence.tokens, hit, request.salt, request.owner
        )
        if update is None:
            return False
        self.waiting.popleft()
        sequence.launched = sequence.computed = hit.cached
        sequence.exact = 0
        if sequence.exact_mode:
            sequence.exact = hit.cached
        if hit.swapped and self._load_token_s:
            sequence.loaded_s = time.perf_counter() + hit.swapped * self._load_token_s
        if sequence is request_state.sequences[0] and not sequence.was_preempted:
            request_state.cached = hit.cached
            request_state.read_back = min(request_state.read_back, hit.cached)
            request_state.why_missed = request_state.disk_missed or hit.why_missed
        self._start(sequence, update)
        self._add_row(step, sequence)
        return True

    def turn_cuts(self, tokens: tuple[int, ...], *, continues: bool = False) -> TurnCuts:
        """Return the cuts of a prompt in exact mode. See TurnCuts."""
        return TurnCuts(tokens, self._turn_ends, self._exact_chunk, continues=continues)

    def _is_exact(self, sequence: Sequence) -> bool:
        """Return whether a sequence must get the same bits as in a fresh engine.

        That is impossible beside other sequences, so it then reuses whatever is cached. A model that cannot
        rewind has no state at the end of a chunk and would compute every prompt again. Only a seed is worth
        that.
        """
        request_state = sequence.request_state
        deterministic = request_state.deterministic
        if self._can.rewind == "checkpoint":
            deterministic = request_state.seeded
        return deterministic and self._is_alone(sequence)

    def _find_prefix(self, sequence: Sequence) -> PrefixHit:
        """Find the longest prefix that does not end where a picture must not be cut."""
        hit = self._find_uncut_prefix(sequence, sequence.known)
        media = sequence.request_state.media
        while media:
            if sequence.exact_mode:
                end = chunk_floor(media, hit.cached, self._exact_chunk)
            else:
                end = cut_before(sequence.tokens, hit.cached)
            if end == hit.cached:
                break
            hit = self._find_uncut_prefix(sequence, end + 1)
        return hit

    def _find_uncut_prefix(self, sequence: Sequence, limit: int) -> PrefixHit:
        """Find a prefix of the first `limit` tokens."""
        tokens = sequence.tokens
        if limit < len(tokens):
            tokens = tokens[:limit]
        request_state = sequence.request_state
        request = request_state.request
        missing = len(request_state.prompt_logprobs) < request_state.prompt_logprobs_wanted
        if request.prompt_logprobs is not None and missing:
            nothing = self._kv_cache.find_prefix(tokens[:1], request.salt)
            return nothing._replace(
                why_missed="the request needs log probabilities of all its tokens"
            )
        if sequence.exact_mode:
            return self._find_exact(sequence, tokens)
        hit = self._kv_cache.find_prefix(tokens, request.salt)
        if hit.swapped and 0 < self._token_budget.token_s < self._load_token_s:
            resident = tokens[: hit.cached - hit.swapped + 1]
            hit = self._kv_cache.find_prefix(resident, request.salt)
            return hit._replace(why_missed="it is computed faster than copied from RAM")
        return hit

    def _find_exact(self, sequence: Sequence, tokens: list[int]) -> PrefixHit:
        """Find a prefix of the prompt whose KV has the bits of a fresh computation."""
        request_state = sequence.request_state
        if request_state.media:
            # Chunks of a text with pictures do not begin at multiples of their length.
            prompt = tokens[: request_state.prompt_tokens]
            return self._kv_cache.find_prefix(prompt, request_state.request.salt, 1)
        if request_state.cuts is not None:
            salt = request_state.request.salt
            return find_at_cut(self._kv_cache, tokens, salt, request_state.cuts)
        # The last chunk is wider than those of a longer prompt, whose KV has other bits.
        end = self._last_exact_chunk(request_state.prompt_tokens) + 1
        return self._kv_cache.find_prefix(
            tokens[:end], request_state.request.salt, self._exact_chunk
        )

    def _has_room(self, sequence: Sequence, hit: PrefixHit) -> bool:
        if not self.running:
            return True
        usage = self._kv_cache.usage()
        cached = hit.cached - hit.swapped
        if sequence.was_preempted:
            # Its cached prefix may be evicted for the room that it needs, so it must fit without it.
            cached = 0
        return usage.free + usage.cached >= sequence.known - cached + _WATERMARK_TOKENS

    def _start(self, sequence: Sequence, update: CacheUpdate) -> None:
        self._run = None
        self._apply(sequence, update)
        sequence.state = State.RUNNING
        self.running.append(sequence)
        self._enter.append(sequence.entry(self._kv_cache.slot(sequence.number)))
