"""Which tokens the next step computes: running sequences first, prompt chunks after, under a budget.

The loop of vLLM V1, where prompts, decoding and builder verification are one thing, with the state table of
its second model runner: preemption is completion, and the sequence comes back as new. The scheduler speaks
token ids and bookkeeping only; it never waits and never talks to a runner.
"""

from bisect import insort
from collections import deque
from collections.abc import Iterable
from itertools import islice

from localchat.backend_api.interface import (
    LAST,
    Capabilities,
    Enter,
    LogitsPosition,
    MemoryOp,
    StepPlan,
    StepRow,
)
from localchat.core.kv_cache.manager import CacheUpdate, KVCacheManager, PrefixHit
from localchat.core.scheduler.deterministic import EXACT_CHUNK_TOKENS, writing_class
from localchat.core.scheduler.step_builder import ScheduledRow, ScheduledStep, StepBuilder
from localchat.core.scheduler.token_budget import TokenBudget
from localchat.core.sequence import Sequence, State

# How prompts share the tokens of a step.


_LEAST_TOKENS = 32
_AT_ONCE = 4
"""Prompts of one step. With more, each a few tokens, the first to end would end when the last one does."""


class PromptShares:
    """`least`: tokens that a prompt gets at least, however many write: what the runner pads them to anyway."""

    def __init__(self, can: Capabilities) -> None:
        self.least = min(max((_LEAST_TOKENS, *can.widths.prompts[:1])), can.max_step_tokens)

    def at_once(self, left: int) -> int:
        """How many prompts go on in a step with so many tokens left, but for what they leave."""
        return max(1, min(_AT_ONCE, left // max(1, self.least)))

    def of(self, left: int, prompts: int) -> int:
        """What each of so many prompts gets of the tokens left."""
        return max(self.least, left // max(1, prompts))


_STEP_KINDS = ("free", "exact prompt", "exact writing")
"""Kinds of steps take turns; without exact requests there is only the first."""
_SLOW_STEP_S, _DRAFTS_SLOW, _DRAFTS_FAST = 0.25, 15, 31
"""Most drafts of a step, by what a wide step costs: a CPU computes its tokens one after the other."""
_WATERMARK_TOKENS = 32
"""Room that must stay after an admission beside others, so that they are not preempted at once."""


class Scheduler:
    """Owns the queue and the running set. Single thread: the loop's."""

    def __init__(
        self, capabilities: Capabilities, kv_cache: KVCacheManager, token_budget: TokenBudget
    ) -> None:
        self._can = capabilities
        self._kv_cache = kv_cache
        self._token_budget = token_budget
        self._classes = writing_class(capabilities)
        self._chunk = min(EXACT_CHUNK_TOKENS, capabilities.max_step_tokens)
        self._shares = PromptShares(capabilities)
        slow = capabilities.step_target_s >= _SLOW_STEP_S
        self._most_drafts = _DRAFTS_SLOW if slow else _DRAFTS_FAST
        self._next_kind = 0
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self._memory: list[MemoryOp] = []
        self._enter: list[Enter] = []
        self._leave: list[int] = []
        self._entered: set[int] = set()
        self.number = 0
        self._short_of_memory = False
        self._shrink_pending = False
        self.preemptions = 0

    # ------------------------------------------------------------------------ in and out

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence: by priority, then in order of arrival, also where it ran before."""
        insort(self.waiting, sequence, key=lambda one: (-one.priority, one.number))

    def add_memory_ops(self, memory: Iterable[MemoryOp]) -> None:
        """Operations for the next plan, in the order of the books' verbs."""
        self._memory.extend(memory)

    def remove(self, sequence: Sequence, *, keep: bool) -> None:
        """A sequence that is in no launched step leaves the running set or the queue, and the runner."""
        assert not sequence.steps_in_flight, "a launched step still touches it"
        if sequence in self.running:
            self.running.remove(sequence)
            self.add_memory_ops(self._kv_cache.release(sequence.number, keep=keep).memory)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self._leave_runner(sequence)

    def _leave_runner(self, sequence: Sequence) -> None:
        """The runner forgets it; it never hears of an entry that was not launched. (The operations of the
        books stay: others may count on them.)"""
        self._enter = [enter for enter in self._enter if enter.seq != sequence.number]
        if sequence.number in self._entered:
            self._entered.remove(sequence.number)
            self._leave.append(sequence.number)

    def start_fork(self, parent: Sequence, child: Sequence) -> None:
        """A choice that has its first token goes on from its parent's prompt, or queues with it."""
        assert child.state is State.FORKING
        update = None
        if len(self.running) < self._can.max_rows:
            update = self._kv_cache.fork(parent.number, child.number)
        self._leave_runner(child)  # it was entered without a slot, for its first sample
        if update is None:
            child.state = State.WAITING
            self.add(child)
            return
        child.launched = child.computed = parent.computed
        self._start(child, update)

    def handle_out_of_memory(self) -> bool:
        """A step found no memory: one sequence fewer as soon as one is in no launched step, and nobody is
        admitted beside others until a step goes well. False: there is only one."""
        self._short_of_memory = True
        self._shrink_pending = len(self.running) > 1
        return self._shrink_pending

    def step_succeeded(self) -> None:
        """A step found its memory."""
        self._short_of_memory = self._shrink_pending = False

    @property
    def idle(self) -> bool:
        """Nobody runs or waits, and the runner was told everything."""
        return not (self.running or self.waiting or self._pending)

    @property
    def _pending(self) -> bool:
        return bool(self._memory or self._enter or self._leave)

    def schedule(self) -> ScheduledStep | None:
        """The next step, or None when nothing can be launched now."""
        if self._shrink_pending and (victim := self._victim(())) is not None:
            self._shrink_pending = False
            self._preempt(victim)
        self._preempt_for_priority()
        budget = self._token_budget.budget(shared=any(one.writes for one in self.running))
        exact = any(map(self._is_exact, (*self.running, *islice(self.waiting, 1))))
        for _ in range(len(_STEP_KINDS)):
            turn = _STEP_KINDS[self._next_kind]
            self._next_kind = (self._next_kind + 1) % len(_STEP_KINDS)
            builder = StepBuilder(budget, self._shares.least)
            if turn == "free":
                self._plan_free(builder)
            elif exact and turn == "exact prompt":
                self._plan_exact_prompt(builder)
            elif exact:
                self._plan_exact_writing(builder)
            if builder.rows:
                return self._launch(builder)
        # What the last one left behind must not wait for the next request.
        nobody = not self.running and not self.waiting
        return self._launch(StepBuilder(0)) if nobody and self._pending else None

    def _is_exact(self, sequence: Sequence) -> bool:
        """Whether the sequence may only be computed in steps of its own."""
        return sequence.request_state.exact and self._classes is not None

    def _plan_free(self, builder: StepBuilder) -> None:
        """Decoding rows, then chunks of prompts, always a little of them, then admissions, under the budget."""
        most = self._can.max_step_tokens
        ready = [one for one in self.running if one.needs > 0 and not self._is_exact(one)]
        for sequence in ready:
            if sequence.needs == 1 and not sequence.in_prompt and builder.left > 0:
                self._add_row(builder, sequence)
        prompts = [one for one in ready if one.needs > 1 or one.in_prompt]
        prompts.sort(key=lambda one: -one.priority)  # stable: of equals who came first
        if not self._short_of_memory:
            if prompts or self.waiting:
                builder.left = max(builder.left, min(builder.least, most - builder.width))
            builder.fill(self._can.widths, most)
        at_once = self._shares.at_once(builder.left)
        if prompts and self.waiting:
            # A part for who waits, before a long prompt takes all; all for who is urgent.
            urgent = self.waiting[0].priority > prompts[0].priority
            if urgent or len(prompts) < at_once:
                part = builder.left if urgent else self._shares.of(builder.left, len(prompts) + 1)
                rest, builder.left = max(0, builder.left - part), min(part, builder.left)
                self._admit_some(builder)
                builder.left += rest
        for place, sequence in enumerate(prompts):
            if builder.takes(sequence.needs):
                share = self._shares.of(builder.left, min(at_once, len(prompts)) - place)
                self._add_row(builder, sequence, min(share, builder.left))
        self._admit_some(builder)

    def _admit_some(self, builder: StepBuilder) -> None:
        """From the queue, as long as more than scraps are left."""
        while self.waiting and not self._is_exact(self.waiting[0]):
            if not (builder.takes(self.waiting[0].known) and self._admit_next(builder)):
                break

    def _preempt_for_priority(self) -> None:
        """Where all rows are taken, who is urgent gets that of somebody who is less: at once, or by the next
        plan where a launched step still touches it."""
        if self.waiting and len(self.running) >= self._can.max_rows:
            victim = min(
                self.running, key=lambda one: (one.priority, one.steps_in_flight, -one.number)
            )
            if victim.priority < self.waiting[0].priority:
                victim.blocked = bool(victim.steps_in_flight)
                if not victim.blocked:
                    self._preempt(victim)

    def _plan_exact_prompt(self, builder: StepBuilder) -> None:
        """One prompt alone, cut at multiples of a fixed length: the same steps whenever it is computed."""
        assert self._classes is not None
        if self.waiting and self._is_exact(self.waiting[0]):
            self._admit_next(builder, rows=False)
        ready = [one for one in self.running if self._is_exact(one) and one.is_text]
        if ready:
            sequence = min(ready, key=lambda one: one.last_step)
            builder.left = self._chunk - sequence.launched % self._chunk
            if not sequence.in_prompt:
                # Set back while it wrote: its next token is sampled in a step of its class, as ever.
                builder.left = min(builder.left, sequence.needs - 1)
            if self._short_of_memory:
                builder.left = min(builder.left, self._token_budget.budget())
            builder.pad_to = self._classes.low
            self._add_row(builder, sequence)

    def _plan_exact_writing(self, builder: StepBuilder) -> None:
        """A step within the class of rows that are equal: exact writers, who waited longest first."""
        assert self._classes is not None
        builder.left = min(self._classes.high, self._can.max_step_tokens)
        builder.pad_to = self._classes.low
        writers = [
            one for one in self.running if self._is_exact(one) and one.needs and not one.is_text
        ]
        writers.sort(key=lambda one: one.last_step)
        share = max(1, builder.left // max(1, len(writers)))
        for sequence in writers:
            if builder.left > 0:
                self._add_row(builder, sequence, share)

    def _launch(self, builder: StepBuilder) -> ScheduledStep:
        self.number += 1
        plan = StepPlan(
            number=self.number,
            rows=tuple(builder.rows),
            points=tuple(builder.points),
            memory=tuple(self._memory),
            enter=tuple(self._enter),
            leave=tuple(self._leave),
            masks=tuple(builder.masks),
            pad_to=builder.pad_to,
        )
        self._entered.update(enter.seq for enter in self._enter)
        self._memory, self._enter, self._leave = [], [], []
        for scheduled_row in builder.scheduled_rows:
            sequence = scheduled_row.sequence
            sequence.steps_in_flight += 1
            sequence.last_step = self.number
            sequence.launched = scheduled_row.start + scheduled_row.width
            sequence.unknown += 1 if scheduled_row.points and not scheduled_row.drafts else 0
        return ScheduledStep(
            plan,
            tuple(builder.scheduled_rows),
            max(builder.width, builder.pad_to),
            builder.decoding,
        )

    # ------------------------------------------------------------------------ rows

    def _add_row(self, builder: StepBuilder, sequence: Sequence, share: int = 0) -> None:
        """Put the next tokens of a running sequence into the plan, if there is room for them."""
        if sequence.state is not State.RUNNING or sequence.blocked:
            return
        if sequence.grammar_matcher is not None and sequence.unknown:
            return  # what may come next depends on the token that is on the device
        if sequence.needs == 1 and not sequence.in_prompt:
            if not sequence.may_sample() or (sequence.draft_likely and sequence.unknown):
                return
            width = 1
        else:
            width = min(sequence.needs, share or builder.left, builder.left)
        drafts = self._drafts(builder, sequence, share)
        if drafts and not self._extend(sequence, width + len(drafts)):
            drafts = ()  # nobody is set back for guesses
        while not self._make_room(sequence, width, builder):
            if width == 1 or sequence not in self.running:
                return
            width = (width + 1) // 2
        self._write_row(builder, sequence, width, drafts)

    def _drafts(self, builder: StepBuilder, sequence: Sequence, share: int) -> tuple[int, ...]:
        if (
            sequence.proposer is None
            or sequence.needs != 1
            or sequence.unknown
            or sequence.steps_in_flight
        ):
            return ()
        most = share - 1 if share else self._most_drafts
        left = sequence.limit - sequence.known - 1
        room = min(self._most_drafts, most, builder.left - 1, left)
        # A fork begins with all that its parent has settled, which must be the prompt alone.
        if room <= 0 or sequence.pending_forks:
            return ()
        drafts = sequence.proposer.propose(room, rows=builder.width + 1, pad_to=builder.pad_to)
        return (
            sequence.grammar_matcher.cut(drafts) if sequence.grammar_matcher and drafts else drafts
        )

    def _make_room(self, sequence: Sequence, width: int, builder: StepBuilder) -> bool:
        """Have the books grow a sequence; another may be set back for it."""
        while not self._extend(sequence, width):
            victim = self._victim(builder.scheduled_rows)
            if victim is None:
                return False
            self._preempt(victim)
            builder.preempted_any = True
            if victim is sequence:
                return False
        return True

    def _extend(self, sequence: Sequence, width: int) -> bool:
        update = self._kv_cache.extend(sequence.number, sequence.launched + width)
        if update is None:
            return False
        self._take(sequence, update)
        return True

    def _take(self, sequence: Sequence, update: CacheUpdate) -> None:
        self.add_memory_ops(update.memory)
        sequence.new_blocks += update.new_blocks

    def _victim(self, scheduled_row: Iterable[ScheduledRow]) -> Sequence | None:
        """Who is set back: lowest priority, youngest; not one in a launched step or this plan, or the only."""
        busy = {id(row.sequence) for row in scheduled_row}
        free = [one for one in self.running if not one.steps_in_flight and id(one) not in busy]
        if len(self.running) < 2 or not free:
            return None
        return min(free, key=lambda one: (one.priority, -one.number))

    def recompute(self, sequence: Sequence) -> None:
        """Its KV is of no use: it holds more than it should and cannot be cut."""
        self._preempt(sequence, keep=False)

    def _preempt(self, victim: Sequence, *, keep: bool = True) -> None:
        """Set back to the queue; what the books can keep of its KV comes back as a prefix hit."""
        self.preemptions += 1
        victim.was_preempted = True
        self.remove(victim, keep=keep)
        victim.state = State.WAITING
        victim.launched = victim.computed = victim.unknown = 0
        victim.new_blocks = ()
        self.add(victim)

    def _write_row(
        self, builder: StepBuilder, sequence: Sequence, width: int, drafts: tuple[int, ...]
    ) -> None:
        start = sequence.launched
        end = start + width
        number = len(builder.rows)
        known = tuple(sequence.tokens[start:end])
        assert len(known) == width or (width == 1 and sequence.unknown)
        scheduled_row = ScheduledRow(sequence, start, width, drafts)
        builder.want_prompt(scheduled_row, number)
        if end == sequence.virtual and sequence.may_sample():
            for offset in range(width - 1, width + len(drafts)):
                scheduled_row.points.append(
                    builder.point(LogitsPosition(number, offset, sequence.number))
                )
            builder.mask(sequence, scheduled_row.points, drafts)
            # Ahead, the next row is planned before they have joined: they sample once.
            for child in (
                sequence.pending_forks if end == sequence.request_state.prompt_tokens else ()
            ):
                if child.number not in self._entered:
                    self._enter.append(child.entry(slot=-1))
                point = builder.point(LogitsPosition(number, width - 1, child.number))
                scheduled_row.forks.append((child, point))
                builder.mask(child, [point])
        row = StepRow(
            sequence.number,
            self._kv_cache.slot(sequence.number),
            start,
            known if len(known) == width else LAST,
            drafts,
            sequence.new_blocks,
        )
        sequence.new_blocks = ()
        builder.add(
            row,
            scheduled_row,
            decoding=width == 1 and start >= sequence.request_state.prompt_tokens,
        )

    # ------------------------------------------------------------------------ admission

    def _admit_next(self, builder: StepBuilder, *, rows: bool = True) -> bool:
        """Let the first of the queue in, if there is a row and room; nobody overtakes, and nobody comes in
        by the plan that set another back. `rows`: put its first tokens into the plan too."""
        if builder.preempted_any or len(self.running) >= self._can.max_rows:
            return False
        if self._short_of_memory and self.running:
            return False
        sequence = self.waiting[0]
        hit = self._hit(sequence)
        if not self._has_room(sequence, hit):
            return False
        update = self._kv_cache.allocate(
            sequence.number, sequence.tokens, hit, sequence.request_state.request.salt
        )
        if update is None:
            return False
        self.waiting.popleft()
        sequence.launched = sequence.computed = hit.cached
        if sequence is sequence.request_state.sequences[0] and not sequence.was_preempted:
            sequence.request_state.cached = hit.cached
            sequence.request_state.why_missed = hit.why_missed
        self._start(sequence, update)
        if rows:
            self._add_row(builder, sequence)
        return True

    def _hit(self, sequence: Sequence) -> PrefixHit:
        request_state = sequence.request_state
        if request_state.request.prompt_logprobs is not None and len(
            request_state.prompt_logprobs
        ) + 1 < len(request_state.tokens):
            nothing = self._kv_cache.find_prefix(sequence.tokens[:1], request_state.request.salt)
            return nothing._replace(why_missed="log probabilities of all its tokens were asked")
        return self._kv_cache.find_prefix(sequence.tokens, request_state.request.salt)

    def _has_room(self, sequence: Sequence, hit: PrefixHit) -> bool:
        if not self.running:
            return True
        usage = self._kv_cache.usage()
        # Who was set back comes back to stay: what is found of it may lie in the room that it needs.
        found = 0 if sequence.was_preempted else hit.cached
        return usage.free + usage.cached >= sequence.known - found + _WATERMARK_TOKENS

    def _start(self, sequence: Sequence, update: CacheUpdate) -> None:
        self._take(sequence, update)
        sequence.state = State.RUNNING
        self.running.append(sequence)
        self._enter.append(sequence.entry(self._kv_cache.slot(sequence.number)))
