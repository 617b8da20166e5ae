"""Engine core: collects a step, processes its result, launches the next one, and then sends the events.

Events are sent after the launch, so that sending them does not delay a step.
"""

import queue
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias, cast

from localchat.backend_api.drafter import DraftingRunner
from localchat.backend_api.interface import Runner, Tokenizer
from localchat.backend_api.media import MediaChunk, MediaRunner
from localchat.backend_api.prepared_steps import PreparingRunner
from localchat.core.answer_kv import AnswerKV
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
from localchat.core.spec_decode.ngram_proposer import NgramProposer, common_rates
from localchat.core.spec_decode.sequence_drafts import SequenceDrafts
from localchat.core.spec_decode.step_cost import CostModel, PauseClock
from localchat.core.stats import EngineCounters
from localchat.engine.events import EngineStats, Event
from localchat.errors import DoesNotFit, EngineClosed, LocalchatError

_METRICS_INTERVAL_S = 0.05
_RECOMPUTE_AFTER_S = 0.05
"""Idle time before answers are recomputed. Scripts send their next request earlier."""
_WARM_UP_AFTER_S = 0.25
"""Idle time before the runner warms up. Requests in quick succession do not wait for it."""
_RETRY_S = 0.05
_LAST_WRITES_S = 1.2
"""Time limit for writing to the disk before the engine exits."""


@dataclass(frozen=True, slots=True)
class EngineCallbacks:
    """Outputs of the engine core: events of a step, failures of requests, notices for the user."""

    send_events: Callable[[list[tuple[int, Event]]], None]
    send_failure: Callable[[int, LocalchatError], None]
    notify: Callable[[str], None]


_Command: TypeAlias = Callable[[], None]
"""A call that another thread leaves to the core's."""


class EngineCore:
    """Drives one runner. `run` belongs to one thread. Any thread may call the other methods."""

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
        coalesce_s: float = 0.0,
        disk_tier: DiskTier | None = None,
    ) -> None:
        """`speculation`: requests may have drafts. `counters`: shared with the input threads, which count
        requests too. `coalesce_s`: see EventSender.
        """
        can = runner.capabilities
        self.runner = runner
        self._depth = can.depth
        self._disk_tier = disk_tier
        self._reading = 0
        """Number of requests whose prompt is being loaded from disk, and of sequences whose pictures are being
        encoded."""
        self._encodings: dict[int, Callable[[], None]] = {}
        """Functions that cancel the encoding, by request."""
        self._kv_cache = kv_cache
        self._callbacks = callbacks
        # Rejected drafts are truncated. If the model cannot rewind, the state before them must be held.
        holds_states = bool(can.saved_states) or can.max_slots > can.max_rows
        self._speculation = speculation and (can.rewind != "checkpoint" or holds_states)
        token_budget = TokenBudget(can.step_target_s, can.max_step_tokens, can.shared_step_target_s)
        self._step_costs = costs = CostModel(can.widths.decode, can.row_cost)
        self._pauses = PauseClock(costs)
        preparing = cast(PreparingRunner, runner) if can.prepares_steps else None
        self._compiling = preparing
        """The runner, until all of its kernels are compiled."""
        self._draft_model: DraftModel | None = None
        if can.draft_model:
            self._draft_model = DraftModel(cast(DraftingRunner, runner).drafter, costs)
        self._draft_rates = common_rates()
        self._draft_planner = DraftPlanner(can, costs, preparing, self._draft_model)
        self._scheduler = Scheduler(
            can, kv_cache, token_budget, self._draft_planner, self._encode, tokenizer.eog
        )
        self._event_sender = EventSender(
            callbacks.send_events, callbacks.send_failure, kv_cache.usage, fingerprint, coalesce_s
        )
        self._counters = counters if counters is not None else EngineCounters()
        self._answer_kv = AnswerKV(runner, kv_cache, self._scheduler, tokenizer.eog)
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
            self._answer_kv,
        )
        self._stopped = False
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._in_flight: deque[ScheduledStep] = deque()
        self._sole_request: int | None = None
        self._stuck = False
        self._metrics = self._event_sender.snapshot(None, 0, 0)
        self._metrics_s = 0.0

    def submit(self, request_state: RequestState) -> None:
        """Queue a request with its sequences."""
        self._commands.put(partial(self._begin, request_state))
        self._answer_kv.give_way(request_state)

    def cancel(self, id_: int) -> None:
        """Cancel a request. It leaves with the next plan, and a step with no other request is aborted."""
        self._commands.put(partial(self._cancel, id_))
        if self._sole_request == id_:
            self.runner.abort()

    def stop(self) -> None:
        """End `run`. Every running request fails with EngineClosed."""
        self._commands.put(self._end_run)
        self.runner.abort()

    def stats(self) -> EngineStats:
        """Return counters and metrics of all requests, at most 50 ms old."""
        return self._counters.stats(
            self._metrics,
            list(self.output_processor.requests.values()),
            preemptions=self._scheduler.preemptions,
            evictions=self._event_sender.evictions,
        )

    def run(self) -> None:
        """Serve until `stop`."""
        while not self._stopped:
            if not self._in_flight and self._scheduler.idle:
                command = self._wait_for_command()
                command()
            self.step()
        while self._in_flight:
            # An ended sequence is released with its last row, and can go to the disk after that.
            scheduled = self._in_flight.popleft()
            self.output_processor.process_result(scheduled, self.runner.collect())
        if self._disk_tier is not None and not (self._scheduler.running or self._scheduler.waiting):
            # Run the memory operations that no step has executed yet.
            while (step := self._scheduler.schedule()) is not None:
                self.runner.launch(step.plan)
                self.runner.collect()
            self._disk_tier.finish(time.monotonic() + _LAST_WRITES_S)
        for request_state in list(self.output_processor.requests.values()):
            self.output_processor.fail(request_state, EngineClosed("the model was unloaded"))

    def _wait_for_command(self) -> _Command:
        """Wait for the next command.

        Meanwhile, recompute answers, warm up the runner and write texts to the disk.
        """
        if self._reading:
            # The loaded prompt comes next, and a capture or a write would delay it.
            return self._commands.get()
        with suppress(queue.Empty):
            return self._commands.get(timeout=_RECOMPUTE_AFTER_S)
        while self._commands.empty() and self._answer_kv.compute_next():
            pass
        with suppress(queue.Empty):
            return self._commands.get(timeout=_WARM_UP_AFTER_S)
        while True:
            while self._commands.empty() and (self.runner.warm_up_next() or self._store_next()):
                pass
            behind = self._disk_tier is not None and self._disk_tier.behind
            with suppress(queue.Empty):
                return self._commands.get(timeout=_RETRY_S if behind else None)

    def _store_next(self) -> bool:
        return self._disk_tier is not None and self._disk_tier.store_next()

    def step(self) -> None:
        """Collect at most one step, and launch as many as the runner takes."""
        self._collect()
        self._launch()
        if not self._stopped:
            self._publish()

    def _collect(self) -> None:
        """Wait for the oldest step in flight, and process its result."""
        if not self._in_flight:
            self._pauses.reset()
            return
        scheduled = self._in_flight.popleft()
        result = self.runner.collect()
        self._pauses.step_returned(scheduled, result.elapsed_s, time.perf_counter())
        for note in result.notes:
            self._callbacks.notify(note)
        self.output_processor.process_result(scheduled, result)
        if self._disk_tier is not None and not scheduled.is_decode and result.status == "ok":
            self._disk_tier.observe_prefill(scheduled.width, result.elapsed_s)
        self._event_sender.flush_urgent()
        if result.status != "ok":
            self._block_in_flight()

    def _launch(self) -> None:
        """Schedule and launch steps until the runner has as many as it takes."""
        while len(self._in_flight) < self._depth:
            # Apply commands that arrived during the last step before planning this one.
            self.process_commands()
            if self._stopped:
                return
            if self._compiling is not None:
                self._limit_rows(self._compiling)
            scheduled = self._scheduler.schedule()
            if scheduled is None:
                break
            self._in_flight.append(scheduled)
            # Before the launch, because a runner may start to compute at once.
            self._update_sole_request()
            self.runner.launch(scheduled.plan)
            if self._depth > 1:
                only = len(self._in_flight) == 1
                self._pauses.step_launched(scheduled, time.perf_counter(), only=only)
        if self._disk_tier is not None and self._in_flight:
            self._disk_tier.step_launched()

    def _limit_rows(self, runner: PreparingRunner) -> None:
        """Let no more sequences run than have their kernels, so that none waits for kernels."""
        scheduler = self._scheduler
        scheduler.row_limit = runner.ready_rows(len(scheduler.running) + len(scheduler.waiting))
        if scheduler.row_limit >= self.runner.capabilities.max_rows:
            self._compiling = None

    def _publish(self) -> None:
        """Send the events of the collected step, and update the metrics."""
        self._send_queue_positions()
        now_s = time.perf_counter()
        self._event_sender.end_step(now_s, self._next_s())
        if self._in_flight:
            self._stuck = False
        else:
            self._check_stuck()
        running = len(self._scheduler.running)
        waiting = len(self._scheduler.waiting)
        changed = (running, waiting) != (self._metrics.running, self._metrics.waiting)
        if changed or not self._in_flight or now_s >= self._metrics_s + _METRICS_INTERVAL_S:
            self._metrics = self._event_sender.snapshot(None, running, waiting)
            self._metrics_s = now_s

    def _next_s(self) -> float:
        """Return the estimated seconds until the next step has events. Infinite if unknown."""
        costs = self._step_costs
        if not self._in_flight or not self._in_flight[0].is_decode or not costs.has_samples():
            return float("inf")
        return costs.seconds(self._in_flight[0].width)

    @property
    def idle(self) -> bool:
        """Whether nothing runs or waits, and no command is left."""
        nothing = not self._in_flight and self._scheduler.idle and not self._reading
        return nothing and self._commands.empty()

    def process_commands(self) -> None:
        """Execute the queued commands without waiting. Later ones apply to the next step."""
        for _ in range(self._commands.qsize()):
            command = self._commands.get()
            command()

    def _end_run(self) -> None:
        self._stopped = True

    def _cancel(self, id_: int) -> None:
        self.output_processor.cancel(id_)
        if cancel_encoding := self._encodings.pop(id_, None):
            cancel_encoding()

    def _begin(self, request_state: RequestState) -> None:
        self.output_processor.requests[request_state.id] = request_state
        if self._kv_cache.never_fits(request_state.prompt_tokens):
            self._fail_without_room(request_state.sequences[0])
            return
        if self._disk_tier is None or (match := self._disk_tier.find(request_state)) is None:
            self._add(request_state)
            return
        self._reading += 1
        commands = self._commands
        self._disk_tier.read(
            request_state, match, lambda read: commands.put(partial(self._resume, read))
        )

    def _resume(self, read: DiskRead) -> None:
        """Adopt a loaded part. After the last one, queue the request, unless it ended meanwhile."""
        request_state = read.request_state
        assert self._disk_tier is not None
        self._scheduler.add_memory_ops(self._disk_tier.adopt(read))
        if not read.last:
            return
        self._reading -= 1
        if self.output_processor.requests.get(request_state.id) is request_state:
            self._add(request_state)

    def _encode(self, sequence: Sequence, chunks: list[MediaChunk]) -> None:
        """Compute the embeddings of a sequence's pictures beside the steps, and queue it again."""
        self._reading += 1
        request_state = sequence.request_state
        # The bar of a long prompt appears before its first step.
        self._event_sender.prefill(request_state, 0)
        commands = self._commands
        runner = cast(MediaRunner, self.runner)
        self._encodings[request_state.id] = runner.encode(
            chunks, lambda failure: commands.put(partial(self._add_encoded, sequence, failure))
        )

    def _add_encoded(self, sequence: Sequence, failure: LocalchatError | None) -> None:
        """Queue a sequence whose pictures are encoded, or fail its request."""
        self._reading -= 1
        request_state = sequence.request_state
        self._encodings.pop(request_state.id, None)
        if self.output_processor.requests.get(request_state.id) is not request_state:
            return
        if failure is not None:
            self.output_processor.fail(request_state, failure)
            return
        self._scheduler.add(sequence)

    def _add(self, request_state: RequestState) -> None:
        first, *others = request_state.sequences
        # A step with drafts is wider, which changes the bits of its rows.
        may_draft = request_state.request.speculation and not request_state.deterministic
        if self._speculation and may_draft:
            first.drafts = SequenceDrafts(
                NgramProposer(request_state.tokens, self._draft_rates),
                # A draft model cannot see the pictures.
                uses_model=self._draft_model is not None and not request_state.media,
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
        ids = frozenset[int]().union(*(scheduled.request_ids for scheduled in self._in_flight))
        self._sole_request = next(iter(ids)) if len(ids) == 1 else None

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
        self._stuck = bool(stuck) and not self._stuck

    def _fail_without_room(self, sequence: Sequence) -> None:
        self.output_processor.fail(
            sequence.request_state,
            DoesNotFit(
                f"the KV cache has no room for a sequence of {sequence.known} tokens",
                hint=f"use a longer context (--ctx){self.output_processor.or_smaller_kv}",
            ),
        )
