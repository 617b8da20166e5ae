"""The loop: collect, decide, plan, launch, and only then tell, so that the telling costs no step."""

import queue
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from localchat.engine.events import Event, Figures, FinishReason, TokenLogprob
from localchat.errors import DoesNotFit, EngineClosed, LocalchatError
from localchat.loop.backend import Runner, Sample, StepResult, Tokenizer
from localchat.loop.costs import CostModel
from localchat.loop.flight import Flight, Planned
from localchat.loop.kv.book import Book
from localchat.loop.kv.book import Usage as KVUsage
from localchat.loop.ngrams import EarlierTexts
from localchat.loop.pace import Pace
from localchat.loop.scheduler import Scheduler
from localchat.loop.sequence import Job, Sequence, State
from localchat.loop.telling import Telling

_TRIES_WITHOUT_MEMORY = 4


@dataclass(frozen=True, slots=True)
class Outlets:
    """Where the loop's words go: events of a step, a request's failure, sentences for the user."""

    events: Callable[[list[tuple[int, Event]]], None]
    failure: Callable[[int, LocalchatError], None]
    say: Callable[[str], None]


@dataclass(frozen=True, slots=True)
class _Cancel:
    id: int


@dataclass(frozen=True, slots=True)
class _Stop:
    pass


class Loop:
    """Drives one runner. `run` belongs to one thread; `submit`, `cancel` and `stop` to any.

    `audit`: check the books whenever nothing runs, and that nothing is left behind (tests).
    """

    def __init__(
        self,
        runner: Runner,
        tokenizer: Tokenizer,
        book: Book,
        outlets: Outlets,
        *,
        fingerprint: str = "",
        audit: bool = False,
    ) -> None:
        can = runner.capabilities
        self._runner = runner
        self._depth = can.depth
        self._tokenizer = tokenizer
        self._book = book
        self._outlets = outlets
        self._audit = audit
        self._pace = Pace(can.step_target_s, can.max_step_tokens)
        self._scheduler = Scheduler(can, book, self._pace)
        self._telling = Telling(outlets.events, book.usage, fingerprint)
        self.costs = CostModel()
        self.earlier = EarlierTexts()
        self._orders: queue.SimpleQueue[Job | _Cancel | _Stop] = queue.SimpleQueue()
        self._jobs: dict[int, Job] = {}
        self._flights: deque[Flight] = deque()
        self._alone: int | None = None
        self._starved = 0

    # ------------------------------------------------------------------------ orders

    def submit(self, job: Job) -> None:
        """Queue a request whose sequences are made."""
        self._orders.put(job)

    def cancel(self, id_: int) -> None:
        """Stop a request: it leaves at the next plan. A step that holds it alone is cut short."""
        self._orders.put(_Cancel(id_))
        if self._alone == id_:
            self._runner.abort()

    def stop(self) -> None:
        """End `run`: every request under way fails with EngineClosed."""
        self._orders.put(_Stop())
        self._runner.abort()

    def figures(self) -> Figures:
        """All requests together. Callable from any thread: reads counters only."""
        return self._telling.now(None, len(self._scheduler.running), len(self._scheduler.waiting))

    @property
    def preemptions(self) -> int:
        return self._scheduler.preemptions

    # ------------------------------------------------------------------------ turns

    def run(self) -> None:
        """Serve until `stop`."""
        while self._take_orders():
            self.turn()
        while self._flights:
            self._flights.popleft()
            self._runner.collect()
        for id_ in list(self._jobs):
            self._outlets.failure(id_, EngineClosed("the engine was closed"))

    def turn(self) -> None:
        """One turn: at most one step is collected, as many are launched as the runner takes."""
        if self._flights:
            flight = self._flights.popleft()
            self._decide(flight, self._runner.collect())
        while len(self._flights) < self._depth:
            flight_or_none = self._scheduler.plan()
            if flight_or_none is None:
                break
            self._flights.append(flight_or_none)
            self._runner.launch(flight_or_none.plan)
        self._watch_alone()
        self._tell_waiting()
        self._telling.flush()
        if not self._flights:
            self._rest()

    @property
    def idle(self) -> bool:
        """Nothing runs, waits or is ordered."""
        return not self._flights and self._scheduler.idle and self._orders.empty()

    def _take_orders(self) -> bool:
        """False: stop. Blocks while there is nothing else to do."""
        block = not self._flights and self._scheduler.idle
        while True:
            try:
                order = self._orders.get(block=block)
            except queue.Empty:
                return True
            block = False
            match order:
                case Job():
                    self._begin(order)
                case _Cancel(id_):
                    self._cancel(id_)
                case _Stop():
                    return False

    def take_orders(self) -> None:
        """What was ordered so far, without waiting (for tests that turn by hand)."""
        if not self._orders.empty():
            self._take_orders()

    def _begin(self, job: Job) -> None:
        self._jobs[job.id] = job
        first, *others = job.sequences
        for other in others:
            other.state = State.JOINING
        self._scheduler.add(first)

    def _cancel(self, id_: int) -> None:
        job = self._jobs.pop(id_, None)
        if job is None:
            return
        self._telling.forget(id_)
        for sequence in job.sequences:
            if sequence.state is not State.ENDED:
                sequence.cancelled = True
                self._end(sequence)

    def _watch_alone(self) -> None:
        jobs = {row.sequence.job.id for flight in self._flights for row in flight.rows}
        self._alone = jobs.pop() if len(jobs) == 1 else None

    def _tell_waiting(self) -> None:
        for ahead, sequence in enumerate(self._scheduler.waiting):
            if sequence.known == sequence.job.prompt_tokens:
                self._telling.queued(sequence.job, ahead + len(self._scheduler.running))

    def _rest(self) -> None:
        """Nothing is in flight. A queue that cannot move is an error to tell, not to wait on."""
        if self._scheduler.waiting and not self._scheduler.running:
            job = self._scheduler.waiting[0].job
            self._fail(
                job,
                DoesNotFit(
                    f"no room in the KV cache for a sequence of {self._scheduler.waiting[0].known} tokens",
                    hint="use a longer context (--ctx) or q8_0 KV (--kv-type q8_0)",
                ),
            )
        elif self._audit and self._scheduler.idle:
            self._book.check()
            assert self._book.usage().live == 0, "KV is live and nobody runs"

    def _fail(self, job: Job, error: LocalchatError) -> None:
        self._cancel(job.id)
        self._outlets.failure(job.id, error)

    # ------------------------------------------------------------------------ decisions

    def _decide(self, flight: Flight, result: StepResult) -> None:
        """A step came back: accept, stop, settle."""
        now_s = time.perf_counter()
        for note in result.notes:
            self._outlets.say(note)
        if result.status == "ok":
            self._starved = 0
            self._pace.measured(flight.width, result.elapsed_s)
            if flight.decoding and flight.rows:
                self.costs.observe(flight.width, result.elapsed_s)
        samples = {sample.point: sample for sample in result.samples}
        for number, row in enumerate(flight.rows):
            row.sequence.flights -= 1
            if row.sequence.state is not State.RUNNING:
                self._end(row.sequence)  # what the launched step still touched is free now
                continue
            earliest = result.earliest[number] if result.earliest else 0
            if result.status == "ok":
                self._collect(flight, row, samples, earliest, result.elapsed_s, now_s)
            else:
                self._take_back(row, result.computed[number], earliest)
        if result.status == "out_of_memory":
            self._make_do(flight)
        told = {id(row.sequence.job): row.sequence.job for row in flight.rows}
        for job in told.values():
            if job.id in self._jobs:
                running, waiting = len(self._scheduler.running), len(self._scheduler.waiting)
                self._telling.figures(job, running, waiting, now_s)

    def _collect(
        self,
        flight: Flight,
        row: Planned,
        samples: dict[int, Sample],
        earliest: int,
        elapsed_s: float,
        now_s: float,
    ) -> None:
        sequence, job = row.sequence, row.sequence.job
        job.clock.admitted(now_s - elapsed_s)
        drawn = row.accepted(samples)
        if row.points and not row.drafts:
            sequence.unknown -= 1
        self._read_prompt(job, row, samples)
        if row.start < job.prompt_tokens:
            self._telling.prefill(job, min(row.start + row.width, job.prompt_tokens))
        reason, stop = self._say(sequence, drawn, now_s)
        computed = row.start + row.width + max(0, len(drawn) - 1)
        self._settle(sequence, min(computed, sequence.known), earliest)
        if row.drafts:
            sequence.launched = sequence.computed
        self._learn(sequence, flight, row, len(drawn), elapsed_s)
        if row.start < job.prompt_tokens <= sequence.computed:
            self._scheduler.remember(self._book.checkpoint(sequence.number).memory)
        self._join(row, samples, now_s)
        if not reason and not sequence.may_sample() and not sequence.needs and not drawn:
            reason = "length"  # nothing was to be generated: the prompt's figures were all
        if reason:
            self._finish(sequence, reason, stop, now_s)

    def _say(
        self, sequence: Sequence, drawn: list[Sample], now_s: float
    ) -> tuple[FinishReason | None, str]:
        """Append sampled tokens to a sequence, up to its end. Returns why it ended, if it did."""
        job, before = sequence.job, sequence.known
        events: list[Event] = []
        reason: FinishReason | None = None
        stop = ""
        for sample in drawn:
            sequence.tokens.append(sample.token)
            if sample.token in self._tokenizer.eog and not job.request.ignore_eos:
                events += sequence.voice.end()
                reason = "stop"
                break
            spoken = sequence.voice.say(sample.token, self._logprob(sample))
            events += spoken.events
            if spoken.stop:
                reason, stop = "stop", spoken.stop
                break
            if sequence.known >= sequence.limit:
                events += sequence.voice.end()
                reason = "length"
                break
        job.clock.step(sequence.choice, sequence.known - before, now_s)
        self._telling.text(job, events, now_s)
        return reason, stop

    def _logprob(self, sample: Sample) -> TokenLogprob | None:
        if sample.logprob is None:
            return None
        piece = self._tokenizer.piece
        top = tuple((token, piece(token, special=True), value) for token, value in sample.top)
        return TokenLogprob(sample.token, piece(sample.token, special=True), sample.logprob, top)

    def _read_prompt(self, job: Job, row: Planned, samples: dict[int, Sample]) -> None:
        for point in row.prompt_points:
            entry = self._logprob(samples[point])
            assert entry is not None
            job.prompt_logprobs.append(entry)
        if row.prompt_points and len(job.prompt_logprobs) == job.prompt_tokens - 1:
            self._telling.prompt_logprobs(job)

    def _settle(self, sequence: Sequence, computed: int, earliest: int) -> None:
        growth = self._book.settle(sequence.number, sequence.tokens, computed, earliest)
        self._scheduler.remember(growth.memory)
        sequence.computed = computed
        if growth.lost:
            # A sliding window moved past the place that drafts had to be cut back to.
            sequence.computed = sequence.launched = 0

    def _learn(
        self, sequence: Sequence, flight: Flight, row: Planned, drawn: int, elapsed_s: float
    ) -> None:
        if sequence.drafts is None or not drawn:
            return
        said = sequence.tokens[row.start + row.width :]
        if flight.decoding:
            sequence.drafts.advance(
                said, len(row.drafts), flight.width, elapsed_s, flight.plan.pad_to
            )
        else:
            sequence.drafts.advance(said, len(row.drafts))
        if self._depth > 1:
            sequence.hopeful = bool(sequence.drafts.propose(1))

    def _join(self, row: Planned, samples: dict[int, Sample], now_s: float) -> None:
        """The other choices of a request have their first token: they go on from the prompt."""
        for child, point in row.forks:
            if child.cancelled:
                self._scheduler.leave(child)
                continue
            reason, stop = self._say(child, [samples[point]], now_s)
            if row.sequence.drafts is not None and child.drafts is None and not reason:
                child.drafts = row.sequence.drafts.fork()
            self._scheduler.join(row.sequence, child)
            if reason:
                self._finish(child, reason, stop, now_s)

    def _take_back(self, row: Planned, computed: int, earliest: int) -> None:
        """A step came back short: what it computed counts, the rest is launched again."""
        sequence = row.sequence
        if row.points and not row.drafts:
            sequence.unknown -= 1
        valid = min(row.start + min(computed, row.width), sequence.known)
        if valid > sequence.computed:
            self._settle(sequence, valid, earliest)
        sequence.launched = sequence.computed

    def _make_do(self, flight: Flight) -> None:
        """A step found no memory: smaller steps, fewer sequences, and in the end one clear error."""
        self._pace.out_of_memory()
        self._starved += 1
        running = [row.sequence for row in flight.rows if row.sequence.state is State.RUNNING]
        if len(self._scheduler.running) > 1:
            self._scheduler.set_back_youngest()
        elif running and self._starved > _TRIES_WITHOUT_MEMORY:
            self._starved = 0
            self._fail(
                running[0].job,
                DoesNotFit(
                    f"out of memory in a step, at {running[0].known} tokens of this sequence",
                    hint="shorten the input, use q8_0 KV (--kv-type q8_0) or a shorter context (--ctx)",
                ),
            )

    # ------------------------------------------------------------------------ ends

    def _finish(self, sequence: Sequence, reason: FinishReason, stop: str, now_s: float) -> None:
        job = sequence.job
        usage = self._book.usage()
        self._telling.finished(sequence, reason, stop)
        self.earlier.add(job.request.salt, sequence.tokens)
        self._end(sequence)
        if job.ended and self._jobs.pop(job.id, None) is not None:
            self._end_of(job, usage, now_s)

    def _end_of(self, job: Job, usage: KVUsage, now_s: float) -> None:
        self._telling.figures(job, len(self._scheduler.running), len(self._scheduler.waiting), 0.0)
        self._telling.done(job, usage, now_s)

    def _end(self, sequence: Sequence) -> None:
        """Out of the books, as soon as no launched step touches it any more. Idempotent."""
        if sequence.state is State.RUNNING and not sequence.flights:
            self._scheduler.remember(self._book.checkpoint(sequence.number).memory)
        sequence.state = State.ENDED
        if not sequence.flights:
            self._scheduler.retire(sequence, keep=True)
