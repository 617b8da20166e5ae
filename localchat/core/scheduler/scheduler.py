"""Which tokens the next step computes: running sequences first, prompt chunks after, under a budget.

The loop of vLLM V1, where prompts, decoding and draft verification are one thing, with the state table of
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


_TURNS = ("free", "exact prompt", "exact writing")
"""Kinds of steps take turns; without exact requests there is only the first."""
_SLOW_STEP_S, _DRAFTS_SLOW, _DRAFTS_FAST = 0.25, 15, 31
"""Most drafts of a step, by what a wide step costs: a CPU computes its tokens one after the other."""
_WATERMARK_TOKENS = 32
"""Room that must stay after an admission beside others, so that they are not preempted at once."""


class Scheduler:
    """Owns the queue and the running set. Single thread: the loop's."""

    def __init__(self, capabilities: Capabilities, book: KVCacheManager, pace: TokenBudget) -> None:
        self._can = capabilities
        self._book = book
        self._pace = pace
        self._classes = writing_class(capabilities)
        self._chunk = min(EXACT_CHUNK_TOKENS, capabilities.max_step_tokens)
        self._shares = PromptShares(capabilities)
        slow = capabilities.step_target_s >= _SLOW_STEP_S
        self._most_drafts = _DRAFTS_SLOW if slow else _DRAFTS_FAST
        self._turn = 0
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self._memory: list[MemoryOp] = []
        self._enter: list[Enter] = []
        self._leave: list[int] = []
        self._entered: set[int] = set()
        self.number = 0
        self._cramped = False
        self._excess = False
        self.preemptions = 0

    # ------------------------------------------------------------------------ in and out

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence: by priority, then in order of arrival, also where it ran before."""
        insort(self.waiting, sequence, key=lambda one: (-one.priority, one.number))

    def remember(self, memory: Iterable[MemoryOp]) -> None:
        """Operations for the next plan, in the order of the books' verbs."""
        self._memory.extend(memory)

    def retire(self, sequence: Sequence, *, keep: bool) -> None:
        """A sequence that is in no launched step leaves the running set or the queue, and the runner."""
        assert not sequence.flights, "a launched step still touches it"
        if sequence in self.running:
            self.running.remove(sequence)
            self.remember(self._book.release(sequence.number, keep=keep).memory)
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

    def join(self, parent: Sequence, child: Sequence) -> None:
        """A choice that has its first token goes on from its parent's prompt, or queues with it."""
        assert child.state is State.JOINING
        growth = None
        if len(self.running) < self._can.max_rows:
            growth = self._book.fork(parent.number, child.number)
        self._leave_runner(child)  # it was entered without a slot, for its first sample
        if growth is None:
            child.state = State.WAITING
            self.add(child)
            return
        child.launched = child.computed = parent.computed
        self._start(child, growth)

    def make_do(self) -> bool:
        """A step found no memory: one sequence fewer as soon as one is in no launched step, and nobody is
        admitted beside others until a step goes well. False: there is only one."""
        self._cramped = True
        self._excess = len(self.running) > 1
        return self._excess

    def went_well(self) -> None:
        """A step found its memory."""
        self._cramped = self._excess = False

    @property
    def idle(self) -> bool:
        """Nobody runs or waits, and the runner was told everything."""
        return not (self.running or self.waiting or self._pending)

    @property
    def _pending(self) -> bool:
        return bool(self._memory or self._enter or self._leave)

    def plan(self) -> ScheduledStep | None:
        """The next step, or None when nothing can be launched now."""
        if self._excess and (victim := self._victim(())) is not None:
            self._excess = False
            self._preempt(victim)
        self._give_way()
        budget = self._pace.budget(shared=any(one.writes for one in self.running))
        exact = any(map(self._held_exact, (*self.running, *islice(self.waiting, 1))))
        for _ in range(len(_TURNS)):
            turn = _TURNS[self._turn]
            self._turn = (self._turn + 1) % len(_TURNS)
            draft = StepBuilder(budget, self._shares.least)
            if turn == "free":
                self._plan_free(draft)
            elif exact and turn == "exact prompt":
                self._plan_exact_prompt(draft)
            elif exact:
                self._plan_exact_writing(draft)
            if draft.rows:
                return self._launch(draft)
        # What the last one left behind must not wait for the next request.
        nobody = not self.running and not self.waiting
        return self._launch(StepBuilder(0)) if nobody and self._pending else None

    def _held_exact(self, sequence: Sequence) -> bool:
        """Whether the sequence may only be computed in steps of its own."""
        return sequence.job.exact and self._classes is not None

    def _plan_free(self, draft: StepBuilder) -> None:
        """Decoding rows, then chunks of prompts, always a little of them, then admissions, under the budget."""
        most = self._can.max_step_tokens
        ready = [one for one in self.running if one.needs > 0 and not self._held_exact(one)]
        for sequence in ready:
            if sequence.needs == 1 and not sequence.in_prompt and draft.left > 0:
                self._add_row(draft, sequence)
        prompts = [one for one in ready if one.needs > 1 or one.in_prompt]
        prompts.sort(key=lambda one: -one.priority)  # stable: of equals who came first
        if not self._cramped:
            if prompts or self.waiting:
                draft.left = max(draft.left, min(draft.least, most - draft.width))
            draft.fill(self._can.widths, most)
        at_once = self._shares.at_once(draft.left)
        if prompts and self.waiting:
            # A part for who waits, before a long prompt takes all; all for who is urgent.
            urgent = self.waiting[0].priority > prompts[0].priority
            if urgent or len(prompts) < at_once:
                part = draft.left if urgent else self._shares.of(draft.left, len(prompts) + 1)
                rest, draft.left = max(0, draft.left - part), min(part, draft.left)
                self._admit_some(draft)
                draft.left += rest
        for place, sequence in enumerate(prompts):
            if draft.takes(sequence.needs):
                share = self._shares.of(draft.left, min(at_once, len(prompts)) - place)
                self._add_row(draft, sequence, min(share, draft.left))
        self._admit_some(draft)

    def _admit_some(self, draft: StepBuilder) -> None:
        """From the queue, as long as more than scraps are left."""
        while self.waiting and not self._held_exact(self.waiting[0]):
            if not (draft.takes(self.waiting[0].known) and self._admit_next(draft)):
                break

    def _give_way(self) -> None:
        """Where all rows are taken, who is urgent gets that of somebody who is less: at once, or by the next
        plan where a launched step still touches it."""
        if self.waiting and len(self.running) >= self._can.max_rows:
            victim = min(self.running, key=lambda one: (one.priority, one.flights, -one.number))
            if victim.priority < self.waiting[0].priority:
                victim.held = bool(victim.flights)
                if not victim.held:
                    self._preempt(victim)

    def _plan_exact_prompt(self, draft: StepBuilder) -> None:
        """One prompt alone, cut at multiples of a fixed length: the same steps whenever it is computed."""
        assert self._classes is not None
        if self.waiting and self._held_exact(self.waiting[0]):
            self._admit_next(draft, rows=False)
        ready = [one for one in self.running if self._held_exact(one) and one.is_text]
        if ready:
            sequence = min(ready, key=lambda one: one.stepped)
            draft.left = self._chunk - sequence.launched % self._chunk
            if not sequence.in_prompt:
                # Set back while it wrote: its next token is sampled in a step of its class, as ever.
                draft.left = min(draft.left, sequence.needs - 1)
            if self._cramped:
                draft.left = min(draft.left, self._pace.budget())
            draft.pad_to = self._classes.low
            self._add_row(draft, sequence)

    def _plan_exact_writing(self, draft: StepBuilder) -> None:
        """A step within the class of rows that are equal: exact writers, who waited longest first."""
        assert self._classes is not None
        draft.left = min(self._classes.high, self._can.max_step_tokens)
        draft.pad_to = self._classes.low
        writers = [
            one for one in self.running if self._held_exact(one) and one.needs and not one.is_text
        ]
        writers.sort(key=lambda one: one.stepped)
        share = max(1, draft.left // max(1, len(writers)))
        for sequence in writers:
            if draft.left > 0:
                self._add_row(draft, sequence, share)

    def _launch(self, draft: StepBuilder) -> ScheduledStep:
        self.number += 1
        plan = StepPlan(
            number=self.number,
            rows=tuple(draft.rows),
            points=tuple(draft.points),
            memory=tuple(self._memory),
            enter=tuple(self._enter),
            leave=tuple(self._leave),
            masks=tuple(draft.masks),
            pad_to=draft.pad_to,
        )
        self._entered.update(enter.seq for enter in self._enter)
        self._memory, self._enter, self._leave = [], [], []
        for planned in draft.planned:
            sequence = planned.sequence
            sequence.flights += 1
            sequence.stepped = self.number
            sequence.launched = planned.start + planned.width
            sequence.unknown += 1 if planned.points and not planned.drafts else 0
        return ScheduledStep(
            plan, tuple(draft.planned), max(draft.width, draft.pad_to), draft.decoding
        )

    # ------------------------------------------------------------------------ rows

    def _add_row(self, draft: StepBuilder, sequence: Sequence, share: int = 0) -> None:
        """Put the next tokens of a running sequence into the plan, if there is room for them."""
        if sequence.state is not State.RUNNING or sequence.held:
            return
        if sequence.constraint is not None and sequence.unknown:
            return  # what may come next depends on the token that is on the device
        if sequence.needs == 1 and not sequence.in_prompt:
            if not sequence.may_sample() or (sequence.hopeful and sequence.unknown):
                return
            width = 1
        else:
            width = min(sequence.needs, share or draft.left, draft.left)
        drafts = self._drafts(draft, sequence, share)
        if drafts and not self._grow(sequence, width + len(drafts)):
            drafts = ()  # nobody is set back for guesses
        while not self._make_room(sequence, width, draft):
            if width == 1 or sequence not in self.running:
                return
            width = (width + 1) // 2
        self._write_row(draft, sequence, width, drafts)

    def _drafts(self, draft: StepBuilder, sequence: Sequence, share: int) -> tuple[int, ...]:
        if sequence.drafts is None or sequence.needs != 1 or sequence.unknown or sequence.flights:
            return ()
        most = share - 1 if share else self._most_drafts
        left = sequence.limit - sequence.known - 1
        room = min(self._most_drafts, most, draft.left - 1, left)
        # A fork begins with all that its parent has settled, which must be the prompt alone.
        if room <= 0 or sequence.joining:
            return ()
        drafts = sequence.drafts.propose(room, rows=draft.width + 1, pad_to=draft.pad_to)
        return sequence.constraint.cut(drafts) if sequence.constraint and drafts else drafts

    def _make_room(self, sequence: Sequence, width: int, draft: StepBuilder) -> bool:
        """Have the books grow a sequence; another may be set back for it."""
        while not self._grow(sequence, width):
            victim = self._victim(draft.planned)
            if victim is None:
                return False
            self._preempt(victim)
            draft.crowded = True
            if victim is sequence:
                return False
        return True

    def _grow(self, sequence: Sequence, width: int) -> bool:
        growth = self._book.grow(sequence.number, sequence.launched + width)
        if growth is None:
            return False
        self._take(sequence, growth)
        return True

    def _take(self, sequence: Sequence, growth: CacheUpdate) -> None:
        self.remember(growth.memory)
        sequence.new_blocks += growth.new_blocks

    def _victim(self, planned: Iterable[ScheduledRow]) -> Sequence | None:
        """Who is set back: lowest priority, youngest; not one in a launched step or this plan, or the only."""
        busy = {id(row.sequence) for row in planned}
        free = [one for one in self.running if not one.flights and id(one) not in busy]
        if len(self.running) < 2 or not free:
            return None
        return min(free, key=lambda one: (one.priority, -one.number))

    def begin_anew(self, sequence: Sequence) -> None:
        """Its KV is of no use: it holds more than it should and cannot be cut."""
        self._preempt(sequence, keep=False)

    def _preempt(self, victim: Sequence, *, keep: bool = True) -> None:
        """Set back to the queue; what the books can keep of its KV comes back as a prefix hit."""
        self.preemptions += 1
        victim.set_back = True
        self.retire(victim, keep=keep)
        victim.state = State.WAITING
        victim.launched = victim.computed = victim.unknown = 0
        victim.new_blocks = ()
        self.add(victim)

    def _write_row(
        self, draft: StepBuilder, sequence: Sequence, width: int, drafts: tuple[int, ...]
    ) -> None:
        start = sequence.launched
        end = start + width
        number = len(draft.rows)
        known = tuple(sequence.tokens[start:end])
        assert len(known) == width or (width == 1 and sequence.unknown)
        planned = ScheduledRow(sequence, start, width, drafts)
        draft.want_prompt(planned, number)
        if end == sequence.virtual and sequence.may_sample():
            for offset in range(width - 1, width + len(drafts)):
                planned.points.append(draft.point(LogitsPosition(number, offset, sequence.number)))
            draft.mask(sequence, planned.points, drafts)
            # Ahead, the next row is planned before they have joined: they sample once.
            for child in sequence.joining if end == sequence.job.prompt_tokens else ():
                if child.number not in self._entered:
                    self._enter.append(child.entry(slot=-1))
                point = draft.point(LogitsPosition(number, width - 1, child.number))
                planned.forks.append((child, point))
                draft.mask(child, [point])
        row = StepRow(
            sequence.number,
            self._book.slot(sequence.number),
            start,
            known if len(known) == width else LAST,
            drafts,
            sequence.new_blocks,
        )
        sequence.new_blocks = ()
        draft.add(row, planned, decoding=width == 1 and start >= sequence.job.prompt_tokens)

    # ------------------------------------------------------------------------ admission

    def _admit_next(self, draft: StepBuilder, *, rows: bool = True) -> bool:
        """Let the first of the queue in, if there is a row and room; nobody overtakes, and nobody comes in
        by the plan that set another back. `rows`: put its first tokens into the plan too."""
        if draft.crowded or len(self.running) >= self._can.max_rows:
            return False
        if self._cramped and self.running:
            return False
        sequence = self.waiting[0]
        hit = self._hit(sequence)
        if not self._has_room(sequence, hit):
            return False
        growth = self._book.admit(sequence.number, sequence.tokens, hit, sequence.job.request.salt)
        if growth is None:
            return False
        self.waiting.popleft()
        sequence.launched = sequence.computed = hit.cached
        if sequence is sequence.job.sequences[0] and not sequence.set_back:
            sequence.job.cached = hit.cached
            sequence.job.why_missed = hit.why_missed
        self._start(sequence, growth)
        if rows:
            self._add_row(draft, sequence)
        return True

    def _hit(self, sequence: Sequence) -> PrefixHit:
        job = sequence.job
        if job.request.prompt_logprobs is not None and len(job.prompt_logprobs) + 1 < len(
            job.tokens
        ):
            nothing = self._book.match(sequence.tokens[:1], job.request.salt)
            return nothing._replace(why_missed="log probabilities of all its tokens were asked")
        return self._book.match(sequence.tokens, job.request.salt)

    def _has_room(self, sequence: Sequence, hit: PrefixHit) -> bool:
        if not self.running:
            return True
        usage = self._book.usage()
        # Who was set back comes back to stay: what is found of it may lie in the room that it needs.
        found = 0 if sequence.set_back else hit.cached
        return usage.free + usage.cached >= sequence.known - found + _WATERMARK_TOKENS

    def _start(self, sequence: Sequence, growth: CacheUpdate) -> None:
        self._take(sequence, growth)
        sequence.state = State.RUNNING
        self.running.append(sequence)
        self._enter.append(sequence.entry(self._book.slot(sequence.number)))
