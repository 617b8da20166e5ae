"""Engine core: collects a step, processes its result, schedules and launches the next, then sends events.

Events are sent after the launch, so that sending them costs no step.
"""

import queue
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias, cast

from localchat.backend_api.drafter import DraftingRunner
from localchat.backend_api.interface import Runner, Tokenizer
from localchat.backend_api.prepared_steps import PreparingRunner
from localchat.core.event_sender import EventSender
from localchat.core.kv_cache.disk_tier import DiskRead, DiskTier
from localchat.core.kv_cache.manager import KVCacheManager
from localchat.core.output_processor import OutputProcessor
from localchat.core.scheduler.scheduler import Scheduler
from localchat.core.scheduler.step_builder import ScheduledStep
from localchat.core.scheduler.token_budget import TokenBudget
from localchat.core.sequence import RequestState, Sequence, State
from localchat.core.spec_decode.draft_model import DraftModel
from localchat.core.spec_decode.draft_planner import DraftPlanner
from localchat.core.spec_decode.ngram_proposer import NgramProposer
from localchat.core.spec_decode.sequence_drafts import SequenceDrafts
from localchat.core.spec_decode.step_cost import CostModel
from localchat.core.stats import EngineCounters
from localchat.engine.events import EngineStats, Event
from localchat.errors import DoesNotFit, EngineClosed, LocalchatError

_METRICS_INTERVAL_S = 0.05
_WARM_UP_AFTER_S = 0.25
"""An engine that is idle for so long warms up its runner: requests that follow each other need not wait."""
_RETRY_S = 0.05
_LAST_WRITES_S = 1.2
"""Most time that an engine writes to the disk before it ends."""


@dataclass(frozen=True, slots=True)
class EngineCallbacks:
    """Outputs of the engine core: events of a step, failures of requests, sentences for the user."""

    send_events: Callable[[list[tuple[int, Event]]], None]
    send_failure: Callable[[int, LocalchatError], None]
    notify: Callable[[str], None]


@dataclass(frozen=True, slots=True)
class _CancelCommand:
    """Cancels one request."""

    id: int


@dataclass(frozen=True, slots=True)
class _StopCommand:
    pass


_Command: TypeAlias = RequestState | _CancelCommand | _StopCommand | DiskRead


class EngineCore:
    """Drives one runner. `run` belongs to one thread; `submit`, `cancel`, `stop` and `stats` to any."""

    def __init__(
        self,
        runner: Runner,
        tokenizer: Tokenizer,
        kv_cache: KVCacheManager,
        callbacks: EngineCallbacks,
        *,
        fingerprint: str = "",
        speculation: bool = True,
        counters: EngineCounters | None = None,
        audit: bool = False,
        coalesce_s: float = 0.0,
        disk_tier: DiskTier | None = None,
    ) -> None:
        """`speculation`: requests may have drafts. `counters` are shared with whoever else counts
        requests. `coalesce_s`: see EventSender. `audit`: check the KV cache whenever nothing runs, and
        that nothing is left over (tests)."""
        can = runner.capabilities
        self._runner = runner
        self._depth = can.depth
        self._disk_tier = disk_tier
        self._reading = 0
        """Requests whose prompt is being read from the disk."""
        self._kv_cache = kv_cache
        self._callbacks = callbacks
        self._audit = audit
        # Rejected drafts have to be truncated, or the state from before them is held elsewhere.
        holds = bool(can.saved_states) or (can.share and can.max_slots > can.max_rows)
        rewinds = can.rewind != "checkpoint"
        self._speculation = speculation and (rewinds or holds)
        token_budget = TokenBudget(can.step_target_s, can.max_step_tokens, can.shared_step_target_s)
        costs = self._step_costs = CostModel(can.widths.decode)
        preparing = cast(PreparingRunner, runner) if can.prepares_steps else None
        drafter = cast(DraftingRunner, runner).drafter if can.draft_model else None
        self._draft_model = DraftModel(drafter, costs) if drafter else None
        self._draft_planner = DraftPlanner(can, costs, preparing, self._draft_model)
        self._scheduler = Scheduler(can, kv_cache, token_budget, self._draft_planner)
        self._event_sender = EventSender(
            callbacks.send_events, callbacks.send_failure, kv_cache.usage, fingerprint, coalesce_s
        )
        self._counters = counters if counters is not None else EngineCounters()
        self.output_processor = OutputProcessor(
            can,
            tokenizer,
            kv_cache,
            token_budget,
            self._scheduler,
            self._event_sender,
            self._counters,
            self._step_costs,
            self._draft_planner,
        )
        self._stopped = False
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._in_flight: deque[ScheduledStep] = deque()
        self._followed_s = 0.0
        """When the step before came back whose tokens the only launched one needed; 0: there is none such."""
        self._sole_request: int | None = None
        self._stuck = False
        self._metrics = self._event_sender.snapshot(None, 0, 0)
        self._metrics_s = 0.0

    def submit(self, request_state: RequestState) -> None:
        """Queue a request whose sequences are made."""
        self._commands.put(request_state)

    def cancel(self, id_: int) -> None:
        """Cancel a request: it leaves with the next plan. A step that computes it alone is aborted."""
        self._commands.put(_CancelCommand(id_))
        if self._sole_request == id_:
            self._runner.abort()

    def stop(self) -> None:
        """End `run`: every request under way fails with EngineClosed."""
        self._commands.put(_StopCommand())
        self._runner.abort()

    def stats(self) -> EngineStats:
        """Counters and metrics of all requests, a twentieth of a second old at most."""
        return self._counters.stats(
            self._metrics,
            list(self.output_processor.requests.values()),
            preemptions=self._scheduler.preemptions,
            evictions=self._event_sender.evictions,
        )

    @property
    def preemptions(self) -> int:
        return self._scheduler.preemptions

    def run(self) -> None:
        """Serve until `stop`."""
        while not self._stopped:
            if not self._in_flight and self._scheduler.idle:
                self._execute(self._wait_for_command())
            self.step()
        while self._in_flight:
            # A sequence that has ended is released with its last row, and then the disk may have it.
            scheduled = self._in_flight.popleft()
            self.output_processor.process_result(scheduled, self._runner.collect())
        if self._disk_tier is not None and not (self._scheduler.running or self._scheduler.waiting):
            while (left := self._scheduler.schedule()) is not None:
                self._runner.launch(left.plan)
                self._runner.collect()
            self._disk_tier.finish(time.monotonic() + _LAST_WRITES_S)
        for request_state in list(self.output_processor.requests.values()):
            self.output_processor.fail(request_state, EngineClosed("the engine was closed"))

    def _wait_for_command(self) -> _Command:
        """The next command. Until it comes the runner warms up, and texts go to the disk, unless it follows
        at once."""
        if self._reading:
            # What is read comes next: a capture or a write would make it wait.
            return self._commands.get()
        with suppress(queue.Empty):
            return self._commands.get(timeout=_WARM_UP_AFTER_S)
        while True:
            while self._commands.empty() and (self._runner.warm_up_next() or self._store_next()):
                pass
            behind = self._disk_tier is not None and self._disk_tier.behind
            with suppress(queue.Empty):
                return self._commands.get(timeout=_RETRY_S if behind else None)

    def _store_next(self) -> bool:
        return self._disk_tier is not None and self._disk_tier.store_next()

    def step(self) -> None:
        """Collect at most one step, and launch as many as the runner takes."""
        came_back_s = 0.0
        if self._in_flight:
            scheduled = self._in_flight.popleft()
            result = self._runner.collect()
            came_back_s = time.perf_counter()
            if self._followed_s and scheduled.drafts and result.elapsed_s:
                self._step_costs.observe_pause(came_back_s - self._followed_s - result.elapsed_s)
            self._followed_s = 0.0
            for note in result.notes:
                self._callbacks.notify(note)
            self.output_processor.process_result(scheduled, result)
            if self._disk_tier is not None and not scheduled.is_decode and result.status == "ok":
                self._disk_tier.observe_prefill(scheduled.width, result.elapsed_s)
            self._event_sender.flush_urgent()
            if result.status != "ok":
                self._block_in_flight()
        while len(self._in_flight) < self._depth:
            # Commands that came while the last step ran count for this one.
            self.process_commands()
            if self._stopped:
                return
            following = self._scheduler.schedule()
            if following is None:
                break
            self._in_flight.append(following)
            self._update_sole_request()  # a runner may begin to compute at once
            self._runner.launch(following.plan)
            if self._depth > 1 and came_back_s and following.is_decode:
                came_back_s += following.drafting_s  # which is counted apart
                self._step_costs.observe_wait(time.perf_counter() - came_back_s)
                self._followed_s = came_back_s if len(self._in_flight) == 1 else 0.0
            came_back_s = 0.0
        if self._disk_tier is not None and self._in_flight:
            self._disk_tier.step_launched()
        self._send_queue_positions()
        now_s = time.perf_counter()
        self._event_sender.end_step(now_s, self._next_s())
        if self._in_flight:
            self._stuck = False
        else:
            self._check_stuck()
        running = len(self._scheduler.running)
        waiting = len(self._scheduler.waiting)
        known = self._metrics
        if (
            not self._in_flight
            or (running, waiting) != (known.running, known.waiting)
            or (now_s >= self._metrics_s + _METRICS_INTERVAL_S)
        ):
            self._metrics = self._event_sender.snapshot(None, running, waiting)
            self._metrics_s = now_s

    def _next_s(self) -> float:
        """Estimated seconds until the next step has events; infinite where no such step was measured."""
        costs = self._step_costs
        if not self._in_flight or not self._in_flight[0].is_decode or not costs.has_samples():
            return float("inf")
        return costs.seconds(self._in_flight[0].width)

    @property
    def idle(self) -> bool:
        """Nothing runs or waits, and no command is left."""
        nothing = not self._in_flight and self._scheduler.idle and not self._reading
        return nothing and self._commands.empty()

    def process_commands(self) -> None:
        """Execute the queued commands without waiting. Later ones apply to the next step."""
        for _ in range(self._commands.qsize()):
            self._execute(self._commands.get())

    def _execute(self, command: _Command) -> None:
        match command:
            case DiskRead():
                self._resume(command)
            case RequestState():
                self._begin(command)
            case _CancelCommand(id_):
                self.output_processor.cancel(id_)
            case _StopCommand():
                self._stopped = True

    def _begin(self, request_state: RequestState) -> None:
        self.output_processor.requests[request_state.id] = request_state
        if self._kv_cache.never_fits(request_state.prompt_tokens):
            self._fail_without_room(request_state.sequences[0])
            return
        if self._disk_tier is None or (match := self._disk_tier.find(request_state)) is None:
            self._add(request_state)
            return
        self._reading += 1
        self._disk_tier.read(request_state, match, self._commands.put)

    def _resume(self, read: DiskRead) -> None:
        """Take over what was read; queue the request with the last of it, unless it ended in the meantime."""
        request_state = read.request_state
        assert self._disk_tier is not None
        self._scheduler.add_memory_ops(self._disk_tier.adopt(read))
        if not read.last:
            return
        self._reading -= 1
        if self.output_processor.requests.get(request_state.id) is request_state:
            self._add(request_state)

    def _add(self, request_state: RequestState) -> None:
        first, *others = request_state.sequences
        # A step with drafts is wider, which changes the bits of its rows.
        wanted = request_state.request.speculation and not request_state.deterministic
        if self._speculation and wanted:
            earlier = self.output_processor.earlier_texts.of(request_state.request.salt)
            first.drafts = SequenceDrafts(
                NgramProposer(request_state.tokens, earlier),
                uses_model=self._draft_model is not None,
            )
        for other in others:
            other.state = State.FORKING
        self._scheduler.add(first)

    def _block_in_flight(self) -> None:
        """Block sequences after a step that came back short: the step launched behind it will too."""
        for scheduled in self._in_flight:
            for row in scheduled.rows:
                row.sequence.blocked = True

    def _update_sole_request(self) -> None:
        requests = {
            row.sequence.request_state.id for scheduled in self._in_flight for row in scheduled.rows
        }
        self._sole_request = requests.pop() if len(requests) == 1 else None

    def _send_queue_positions(self) -> None:
        for ahead, sequence in enumerate(self._scheduler.waiting):
            if sequence.known == sequence.request_state.prompt_tokens:
                self._event_sender.queued(
                    sequence.request_state, ahead + len(self._scheduler.running)
                )

    def _check_stuck(self) -> None:
        """Fail a request that cannot run, when nothing is in flight twice in a row.

        The first time, a sequence may just have been preempted.
        """
        stuck = [*self._scheduler.running, *self._scheduler.waiting]
        if stuck and self._stuck:
            self._fail_without_room(stuck[0])
        elif self._audit and self._scheduler.idle and not self._reading:
            self._kv_cache.check()
            assert self._kv_cache.usage().live == 0, "KV is live and nothing runs"
            assert not self.output_processor.requests, "a request is under way and nothing runs"
        self._stuck = bool(stuck) and not self._stuck

    def _fail_without_room(self, sequence: Sequence) -> None:
        self.output_processor.fail(
            sequence.request_state,
            DoesNotFit(
                f"the KV cache has no room for a sequence of {sequence.known} tokens",
                hint=f"use a longer context (--ctx){self.output_processor.or_smaller_kv}",
            ),
        )
