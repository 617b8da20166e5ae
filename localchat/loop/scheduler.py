"""Which tokens the next step computes: running sequences first, prompt chunks after, under a budget.

The loop of vLLM V1, where prompts, decoding and draft verification are one thing, with the state table of
its second model runner: preemption is completion, and the sequence comes back as new. The scheduler speaks
token ids and bookkeeping only; it never waits and never talks to a runner.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from localchat.loop.backend import (
    LAST,
    Capabilities,
    Enter,
    MemoryOp,
    Point,
    Row,
    StepPlan,
)
from localchat.loop.kv.book import Book, Growth, Hit
from localchat.loop.pace import Pace
from localchat.loop.rowclass import ExactClasses
from localchat.loop.sequence import Sequence, State

_MOST_DRAFTS = 16
_WATERMARK_TOKENS = 32
"""Room that must stay after an admission beside others, so that they are not preempted at once."""


@dataclass(slots=True)
class Planned:
    """A row as launched. `points`: numbers of its sampled points, in order; `forks`: choices that sample
    from its last known token, each with its point; `prompt_points`: positions' log probabilities."""

    sequence: Sequence
    start: int
    width: int
    drafts: tuple[int, ...]
    points: list[int] = field(default_factory=list)
    forks: list[tuple[Sequence, int]] = field(default_factory=list)
    prompt_points: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Flight:
    """A launched step. `decoding`: no prompt in it, so its time teaches what rows cost."""

    plan: StepPlan
    rows: tuple[Planned, ...]
    width: int
    decoding: bool


class _Draft:
    """A plan being made."""

    def __init__(self, budget: int) -> None:
        self.left = budget
        self.rows: list[Row] = []
        self.planned: list[Planned] = []
        self.points: list[Point] = []
        self.decoding = True
        self.pad_to = 0

    @property
    def width(self) -> int:
        return sum(row.width for row in self.rows)


class Scheduler:
    """Owns the queue and the running set. Single thread: the loop's."""

    def __init__(self, capabilities: Capabilities, book: Book, pace: Pace) -> None:
        self._can = capabilities
        self._book = book
        self._pace = pace
        self._exact = ExactClasses.of(capabilities)
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self._memory: list[MemoryOp] = []
        self._enter: list[Enter] = []
        self._leave: list[int] = []
        self._number = 0
        self._prompts_turn = False
        self._crowded = False
        self.preemptions = 0

    # ------------------------------------------------------------------------ in and out

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence: by priority, then in order of arrival."""
        place = len(self.waiting)
        priority = sequence.job.request.priority
        while place and self.waiting[place - 1].job.request.priority < priority:
            place -= 1
        self.waiting.insert(place, sequence)

    def remember(self, memory: Iterable[MemoryOp]) -> None:
        """Operations for the next plan, in the order of the books' verbs."""
        self._memory.extend(memory)

    def retire(self, sequence: Sequence, *, keep: bool) -> None:
        """A sequence that is in no launched step leaves the running set or the queue."""
        assert not sequence.flights, "a launched step still touches it"
        if sequence in self.running:
            self.running.remove(sequence)
            self.remember(self._book.release(sequence.number, keep=keep).memory)
            self._leave.append(sequence.number)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def join(self, parent: Sequence, child: Sequence) -> None:
        """A choice that has its first token goes on from its parent's prompt, or queues with it."""
        assert child.state is State.JOINING
        growth = None
        if len(self.running) < self._can.max_rows:
            growth = self._book.fork(parent.number, child.number)
        self.leave(child)  # it was entered without a slot, for its first sample
        if growth is None:
            child.state = State.WAITING
            self.waiting.appendleft(child)
            return
        child.launched = child.computed = parent.computed
        self._start(child, growth)

    def leave(self, sequence: Sequence) -> None:
        """A choice that was entered for its first sample and will not go on."""
        self._leave.append(sequence.number)

    def set_back_youngest(self) -> None:
        """A step found no memory: one sequence fewer, if there is one in no launched step."""
        victim = self._victim(())
        if victim is not None:
            self._preempt(victim)

    @property
    def idle(self) -> bool:
        return not self.running and not self.waiting

    # ------------------------------------------------------------------------ a plan

    def plan(self) -> Flight | None:
        """The next step, or None when nothing can be launched now."""
        draft = _Draft(self._pace.budget())
        self._crowded = False
        prompts = self._prompts_turn or not self._exact_writers()
        self._prompts_turn = False
        if prompts:
            self._plan_any(draft)
        else:
            self._plan_exact_writing(draft)
        pending = self._memory or self._enter or self._leave
        if not draft.rows and not (pending and not self.running and not self.waiting):
            return None
        return self._launch(draft)

    def _exact_writers(self) -> list[Sequence]:
        """Sequences that must write in steps of their own class now."""
        if not self._exact.apart:
            return []
        return [
            one
            for one in self.running
            if one.job.exact and not one.in_prompt and one.needs == 1 and one.may_sample()
        ]

    def _plan_any(self, draft: _Draft) -> None:
        """Rows of every kind; exact writers only where all counts are equal."""
        writers = set(map(id, self._exact_writers()))
        ready = [one for one in self.running if one.needs > 0 and id(one) not in writers]
        for sequence in ready:
            if sequence.needs == 1 and not sequence.in_prompt and draft.left > 0:
                self._add_row(draft, sequence)
        for sequence in ready:
            if (sequence.needs > 1 or sequence.in_prompt) and draft.left > 0:
                self._add_row(draft, sequence)
        self._admit(draft)
        exact_prompts = any(row.sequence.job.exact for row in draft.planned)
        if exact_prompts and self._exact.apart:
            draft.pad_to = self._exact.prompt.low
        elif exact_prompts:
            draft.pad_to = self._exact.writing.low

    def _plan_exact_writing(self, draft: _Draft) -> None:
        """A step of the narrow class: exact writers, the others where there is room. Prompts take turns."""
        narrow = self._exact.writing
        draft.left = min(draft.left, narrow.high)
        draft.pad_to = narrow.low
        writers = self._exact_writers()
        writers.sort(key=lambda one: one.stepped)
        rest = [one for one in self.running if one not in writers and one.needs == 1]
        for sequence in [*writers, *rest]:
            if draft.left > 0 and not sequence.in_prompt and sequence.state is State.RUNNING:
                others = sum(one is not sequence for one in writers)
                self._add_row(draft, sequence, share=max(1, narrow.high // (1 + others)))
        planned = {id(row.sequence) for row in draft.planned}
        left_out = any(one.needs > 0 and id(one) not in planned for one in self.running)
        self._prompts_turn = left_out or bool(self.waiting)

    def _launch(self, draft: _Draft) -> Flight:
        self._number += 1
        plan = StepPlan(
            number=self._number,
            rows=tuple(draft.rows),
            points=tuple(draft.points),
            memory=tuple(self._memory),
            enter=tuple(self._enter),
            leave=tuple(self._leave),
            pad_to=draft.pad_to,
        )
        self._memory, self._enter, self._leave = [], [], []
        for planned in draft.planned:
            sequence = planned.sequence
            sequence.flights += 1
            sequence.stepped = self._number
            sequence.launched = planned.start + planned.width
            sequence.unknown += 1 if planned.points and not planned.drafts else 0
        return Flight(plan, tuple(draft.planned), max(draft.width, draft.pad_to), draft.decoding)

    # ------------------------------------------------------------------------ rows

    def _add_row(self, draft: _Draft, sequence: Sequence, share: int = 0) -> None:
        """Put the next tokens of a running sequence into the plan, if there is room for them."""
        if sequence.state is not State.RUNNING or sequence.cancelled:
            return
        if sequence.needs == 1 and not sequence.in_prompt:
            if not sequence.may_sample() or (sequence.hopeful and sequence.unknown):
                return
            width = 1
        else:
            width = min(sequence.needs, draft.left)
        drafts = self._drafts(draft, sequence, share)
        if drafts and not self._grow(sequence, width + len(drafts)):
            drafts = ()  # nobody is set back for guesses
        while not self._make_room(sequence, width, draft):
            if width == 1 or sequence not in self.running:
                return
            width = (width + 1) // 2
        self._write_row(draft, sequence, width, drafts)

    def _drafts(self, draft: _Draft, sequence: Sequence, share: int) -> tuple[int, ...]:
        if sequence.drafts is None or sequence.needs != 1 or sequence.unknown or sequence.flights:
            return ()
        room = min(
            _MOST_DRAFTS,
            draft.left - 1,
            sequence.limit - sequence.known - 1,
            (share - 1) if share else _MOST_DRAFTS,
        )
        if room <= 0:
            return ()
        return sequence.drafts.propose(room, rows=draft.width + 1, pad_to=draft.pad_to)

    def _make_room(self, sequence: Sequence, width: int, draft: _Draft) -> bool:
        """Have the books grow a sequence; another may be set back for it."""
        while not self._grow(sequence, width):
            victim = self._victim(draft.planned)
            if victim is None:
                return False
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _grow(self, sequence: Sequence, width: int) -> bool:
        growth = self._book.grow(sequence.number, sequence.launched + width)
        if growth is None:
            return False
        self._take(sequence, growth)
        return True

    def _take(self, sequence: Sequence, growth: Growth) -> None:
        self.remember(growth.memory)
        sequence.new_blocks += growth.new_blocks

    def _victim(self, planned: Iterable[Planned]) -> Sequence | None:
        """Who is set back: the lowest priority, the youngest of them; never one that is in a launched step
        or in this plan, and never the only one."""
        busy = {id(row.sequence) for row in planned}
        free = [one for one in self.running if not one.flights and id(one) not in busy]
        if len(self.running) < 2 or not free:
            return None
        return min(free, key=lambda one: (one.job.request.priority, -one.number))

    def _preempt(self, victim: Sequence) -> None:
        """Set back to the queue's head; what the books can keep of its KV comes back as a prefix hit."""
        self.preemptions += 1
        self._crowded = True
        victim.job.preempted += 1
        self.retire(victim, keep=True)
        victim.state = State.WAITING
        victim.launched = victim.computed = victim.unknown = 0
        victim.new_blocks = ()
        self.waiting.appendleft(victim)

    def _write_row(
        self, draft: _Draft, sequence: Sequence, width: int, drafts: tuple[int, ...]
    ) -> None:
        start = sequence.launched
        end = start + width
        number = len(draft.rows)
        known = tuple(sequence.tokens[start:end])
        assert len(known) == width or (width == 1 and sequence.unknown)
        planned = Planned(sequence, start, width, drafts)
        self._prompt_points(draft, planned, number)
        if end == sequence.virtual and sequence.may_sample():
            for offset in range(width - 1, width + len(drafts)):
                planned.points.append(self._point(draft, Point(number, offset, sequence.number)))
            for child in self._joining(sequence):
                self._enter.append(self._entered(child, slot=-1))
                point = self._point(draft, Point(number, width - 1, child.number))
                planned.forks.append((child, point))
        draft.rows.append(
            Row(
                sequence.number,
                self._book.slot(sequence.number),
                start,
                known if len(known) == width else LAST,
                drafts,
                sequence.new_blocks,
            )
        )
        sequence.new_blocks = ()
        draft.planned.append(planned)
        draft.left -= width + len(drafts)
        draft.decoding = draft.decoding and not (width > 1 or start < sequence.job.prompt_tokens)

    def _point(self, draft: _Draft, point: Point) -> int:
        draft.points.append(point)
        return len(draft.points) - 1

    def _prompt_points(self, draft: _Draft, planned: Planned, row: int) -> None:
        """Log probabilities of the prompt's own tokens, where they were asked and are not known yet."""
        sequence = planned.sequence
        job = sequence.job
        top = job.request.prompt_logprobs
        if top is None or sequence is not job.sequences[0]:
            return
        for position in range(planned.start, planned.start + planned.width):
            if len(job.prompt_logprobs) < position + 1 < job.prompt_tokens:
                token = job.tokens[position + 1]
                offset = position - planned.start
                point = Point(row, offset, sequence.number, "prompt", token, top)
                planned.prompt_points.append(self._point(draft, point))

    def _joining(self, sequence: Sequence) -> list[Sequence]:
        if sequence is not sequence.job.sequences[0]:
            return []
        return [one for one in sequence.job.sequences if one.state is State.JOINING]

    # ------------------------------------------------------------------------ admission

    def _admit(self, draft: _Draft) -> None:
        """Let waiting sequences in while there is budget, a row and room; nobody overtakes, and nobody
        comes in by the plan that set another back."""
        while (
            not self._crowded
            and self.waiting
            and draft.left > 0
            and len(self.running) < self._can.max_rows
        ):
            sequence = self.waiting[0]
            hit = self._hit(sequence)
            if not self._has_room(sequence, hit):
                return
            growth = self._book.admit(
                sequence.number, sequence.tokens, hit, sequence.job.request.salt
            )
            if growth is None:
                return
            self.waiting.popleft()
            sequence.launched = sequence.computed = hit.cached
            if sequence.job.completion_tokens == 0:
                sequence.job.cached = hit.cached
                sequence.job.why_missed = hit.why_missed
            self._start(sequence, growth)
            self._add_row(draft, sequence)

    def _hit(self, sequence: Sequence) -> Hit:
        job = sequence.job
        if job.request.prompt_logprobs is not None and len(job.prompt_logprobs) + 1 < len(
            job.tokens
        ):
            nothing = self._book.match(sequence.tokens[:1], job.request.salt)
            return nothing._replace(why_missed="log probabilities of all its tokens were asked")
        return self._book.match(sequence.tokens, job.request.salt)

    def _has_room(self, sequence: Sequence, hit: Hit) -> bool:
        if not self.running:
            return True
        usage = self._book.usage()
        return usage.free + usage.cached >= sequence.known - hit.cached + _WATERMARK_TOKENS

    def _start(self, sequence: Sequence, growth: Growth) -> None:
        self._take(sequence, growth)
        sequence.state = State.RUNNING
        self.running.append(sequence)
        self._enter.append(self._entered(sequence, self._book.slot(sequence.number)))

    def _entered(self, sequence: Sequence, slot: int) -> Enter:
        job = sequence.job
        return Enter(
            sequence.number, slot, tuple(sequence.tokens), job.prompt_tokens, sequence.sampling
        )
