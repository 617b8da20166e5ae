"""The loop: collect, decide, plan, launch, and only then tell, so that the telling costs no step."""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from localchat.backend_api.interface import Runner, Tokenizer
from localchat.core.event_sender import EventSender
from localchat.core.kv_cache.manager import KVCacheManager
from localchat.core.output_processor import OutputProcessor
from localchat.core.scheduler.scheduler import Scheduler
from localchat.core.scheduler.step_builder import ScheduledStep
from localchat.core.scheduler.token_budget import TokenBudget
from localchat.core.sequence import RequestState, Sequence, State
from localchat.core.spec_decode.ngram_proposer import NgramProposer
from localchat.core.stats import EngineCounters
from localchat.engine.events import EngineStats, Event
from localchat.errors import DoesNotFit, EngineClosed, LocalchatError

_FIGURES_GAP_S = 0.05


@dataclass(frozen=True, slots=True)
class EngineCallbacks:
    """Where the loop's words go: events of a step, a request's failure, sentences for the user."""

    events: Callable[[list[tuple[int, Event]]], None]
    failure: Callable[[int, LocalchatError], None]
    say: Callable[[str], None]


@dataclass(frozen=True, slots=True)
class _Cancel:
    """`step`: number of the step that was launched or in the making when it came."""

    id: int
    step: int


@dataclass(frozen=True, slots=True)
class _Stop:
    pass


class EngineCore:
    """Drives one runner. `run` belongs to one thread; `submit`, `cancel`, `stop` and `stats` to any.

    `speculation`: whether requests may have drafts. `counts`: what is counted of them, also elsewhere.
    `together_s`: how long what fast steps tell may wait for more of it. `audit`: check the books whenever
    nothing runs, and that nothing is left behind (tests).
    """

    def __init__(
        self,
        runner: Runner,
        tokenizer: Tokenizer,
        book: KVCacheManager,
        outlets: EngineCallbacks,
        *,
        fingerprint: str = "",
        speculation: bool = True,
        counts: EngineCounters | None = None,
        audit: bool = False,
        together_s: float = 0.0,
    ) -> None:
        can = runner.capabilities
        assert can.depth == 1 or can.block_tokens, (
            "the books of slots cut what a step launched ahead writes"
        )
        self._runner = runner
        self._depth = can.depth
        self._book = book
        self._outlets = outlets
        self._audit = audit
        # Drafts that were wrong have to be cut away again.
        self._speculation = speculation and can.rewind != "checkpoint"
        pace = TokenBudget(can.step_target_s, can.max_step_tokens, can.shared_step_target_s)
        self._scheduler = Scheduler(can, book, pace)
        self._telling = EventSender(
            outlets.events, outlets.failure, book.usage, fingerprint, together_s
        )
        self._counts = counts if counts is not None else EngineCounters()
        self.decisions = OutputProcessor(
            can, tokenizer, book, pace, self._scheduler, self._telling, self._counts
        )
        self._ordering = threading.Lock()
        self._step = 0
        self._stopped = False
        self._orders: queue.SimpleQueue[RequestState | _Cancel | _Stop] = queue.SimpleQueue()
        self._flights: deque[ScheduledStep] = deque()
        self._alone: int | None = None
        self._stuck = False
        self._figures, self._figured_s = self._telling.now(None, 0, 0), 0.0

    # ------------------------------------------------------------------------ orders

    def submit(self, job: RequestState) -> None:
        """Queue a request whose sequences are made."""
        self._orders.put(job)

    def cancel(self, id_: int) -> None:
        """Stop a request: it leaves at the next plan. A step that holds it alone is cut short."""
        with self._ordering:
            self._orders.put(_Cancel(id_, self._step))
        if self._alone == id_:
            self._runner.abort()

    def stop(self) -> None:
        """End `run`: every request under way fails with EngineClosed."""
        self._orders.put(_Stop())
        self._runner.abort()

    def stats(self) -> EngineStats:
        """All requests together, as they were a twentieth of a second ago at most, and what was counted."""
        return self._counts.stats(
            self._figures,
            list(self.decisions.jobs.values()),
            preemptions=self._scheduler.preemptions,
            evictions=self._telling.evictions,
        )

    @property
    def preemptions(self) -> int:
        return self._scheduler.preemptions

    # ------------------------------------------------------------------------ turns

    def run(self) -> None:
        """Serve until `stop`."""
        while not self._stopped:
            if not self._flights and self._scheduler.idle:
                self._follow(self._orders.get())
            self.turn()
        while self._flights:
            self._flights.popleft()
            self._runner.collect()
        for job in list(self.decisions.jobs.values()):
            self.decisions.fail(job, EngineClosed("the engine was closed"))

    def turn(self) -> None:
        """One turn: at most one step is collected, as many are launched as the runner takes."""
        if self._flights:
            flight = self._flights.popleft()
            result = self._runner.collect()
            for note in result.notes:
                self._outlets.say(note)
            self.decisions.decide(flight, result)
            self._telling.hurry()
            if result.status != "ok":
                self._hold()
        while len(self._flights) < self._depth:
            # What came while the last step ran counts for this one.
            self.take_orders()
            if self._stopped:
                return
            flight_or_none = self._scheduler.plan()
            if flight_or_none is None:
                break
            self._flights.append(flight_or_none)
            self._runner.launch(flight_or_none.plan)
        self._watch_alone()
        self._tell_waiting()
        now_s = time.perf_counter()
        self._telling.turned(now_s, self._next_s())
        if self._flights:
            self._stuck = False
        else:
            self._rest()
        running, waiting = len(self._scheduler.running), len(self._scheduler.waiting)
        known = self._figures
        if (
            not self._flights
            or (running, waiting) != (known.running, known.waiting)
            or (now_s >= self._figured_s + _FIGURES_GAP_S)
        ):
            self._figures, self._figured_s = self._telling.now(None, running, waiting), now_s

    def _next_s(self) -> float:
        """Seconds until the next turn tells something, as far as steps like the launched one were seen."""
        costs = self.decisions.costs
        if not self._flights or not self._flights[0].decoding or not costs.known():
            return float("inf")
        return costs.seconds(self._flights[0].width)

    @property
    def idle(self) -> bool:
        """Nothing runs, waits or is ordered."""
        return not self._flights and self._scheduler.idle and self._orders.empty()

    def take_orders(self) -> None:
        """What was ordered so far, without waiting. A cancel that comes from now on comes in the next step."""
        orders: list[RequestState | _Cancel | _Stop] = []
        with self._ordering:
            while not self._orders.empty():
                orders.append(self._orders.get())
            self._step = self._scheduler.number + 1
        for order in orders:
            self._follow(order)

    def _follow(self, order: "RequestState | _Cancel | _Stop") -> None:
        match order:
            case RequestState():
                self._begin(order)
            case _Cancel(id_, step):
                self._count_late(id_, step)
                self.decisions.cancel(id_)
            case _Stop():
                self._stopped = True

    def _count_late(self, id_: int, step: int) -> None:
        """Rows of a request that were launched after the step in which its cancel came: none, while orders
        are taken before each plan."""
        for flight in self._flights:
            if flight.plan.number > step:
                self._counts.late_rows += any(row.sequence.job.id == id_ for row in flight.rows)

    def _begin(self, job: RequestState) -> None:
        self.decisions.jobs[job.id] = job
        if self._book.never_fits(job.prompt_tokens):
            self._fail_for_room(job.sequences[0])
            return
        first, *others = job.sequences
        if self._speculation and job.request.speculation:
            earlier = self.decisions.earlier.of(job.request.salt)
            first.drafts = NgramProposer(job.tokens, self.decisions.costs, earlier)
        for other in others:
            other.state = State.JOINING
        self._scheduler.add(first)

    def _hold(self) -> None:
        """A step came back short, so the one launched behind it will too: nothing more follows that one."""
        for flight in self._flights:
            for row in flight.rows:
                row.sequence.held = True

    def _watch_alone(self) -> None:
        jobs = {row.sequence.job.id for flight in self._flights for row in flight.rows}
        self._alone = jobs.pop() if len(jobs) == 1 else None

    def _tell_waiting(self) -> None:
        for ahead, sequence in enumerate(self._scheduler.waiting):
            if sequence.known == sequence.job.prompt_tokens:
                self._telling.queued(sequence.job, ahead + len(self._scheduler.running))

    def _rest(self) -> None:
        """Nothing is in flight. What cannot move twice in a row is an error to tell, not to wait on: the
        first time somebody may have been set back."""
        stuck = [*self._scheduler.running, *self._scheduler.waiting]
        if stuck and self._stuck:
            self._fail_for_room(stuck[0])
        elif self._audit and self._scheduler.idle:
            self._book.check()
            assert self._book.usage().live == 0, "KV is live and nobody runs"
            assert not self.decisions.jobs, "a request is under way and nobody runs"
        self._stuck = bool(stuck) and not self._stuck

    def _fail_for_room(self, sequence: Sequence) -> None:
        self.decisions.fail(
            sequence.job,
            DoesNotFit(
                f"no room in the KV cache for a sequence of {sequence.known} tokens",
                hint=f"use a longer context (--ctx){self.decisions.or_smaller_kv}",
            ),
        )
