"""Output processor: accepts the tokens of a step, detects stops, commits KV and ends requests."""

import time
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

from msgspec.structs import replace

from localchat.backend_api.interface import Capabilities, Sample, StepResult, Tokenizer
from localchat.backend_api.sampling.reference import NOTHING
from localchat.core.answer_kv import AnswerKV
from localchat.core.event_sender import EventSender
from localchat.core.kv_cache.manager import KVCacheManager, ValidTokens
from localchat.core.scheduler.scheduler import Scheduler
from localchat.core.scheduler.step_builder import ScheduledRow, ScheduledStep
from localchat.core.scheduler.token_budget import TokenBudget
from localchat.core.sequence import RequestState, Sequence, State
from localchat.core.spec_decode.draft_planner import DraftPlanner
from localchat.core.spec_decode.step_cost import CostModel
from localchat.core.stats import EngineCounters
from localchat.engine.events import Event, Finished, TokenLogprob
from localchat.errors import DoesNotFit, LocalchatError, UsageError
from localchat.fit.kv_types import smaller_kv_type

_MAX_OUT_OF_MEMORY_STEPS = 4
_SLOT_COMMIT_TOKENS = 32
"""Tokens of a decode run that a cache of slots learns together."""
_METRICS_SWEEP_S = 0.02
"""Interval at which a decode run looks for requests that need new metrics."""


def _write_all_logprobs(request_state: RequestState, rows: Iterable[bytes]) -> None:
    """Append log probabilities of all tokens to the request's file. A failure leaves it incomplete."""
    try:
        with Path(request_state.request.prompt_logprobs_file).open("ab") as file:
            file.writelines(rows)
    except (OSError, ValueError):
        # ValueError: the name has a null character.
        request_state.all_logprobs_failed = True


def _cut(sequence: Sequence) -> Finished:
    """Return the end of a choice that reached a limit."""
    return Finished(sequence.choice, "length", limit=sequence.request_state.limit)


def _natural_end(sequence: Sequence) -> Finished:
    """Return the end of a choice that ended itself, unless the length guard shortened it."""
    matcher = sequence.grammar_matcher
    if matcher is not None and matcher.shortened:
        return _cut(sequence)
    return Finished(sequence.choice, "stop")


class OutputProcessor:
    """Owns the running requests. Used by the engine core's thread alone."""

    def __init__(
        self,
        capabilities: Capabilities,
        tokenizer: Tokenizer,
        kv_cache: KVCacheManager,
        token_budget: TokenBudget,
        scheduler: Scheduler,
        event_sender: EventSender,
        counters: EngineCounters,
        step_costs: CostModel,
        draft_planner: DraftPlanner,
        answer_kv: AnswerKV,
    ) -> None:
        self._tokenizer = tokenizer
        self._answer_kv = answer_kv
        self._kv_cache = kv_cache
        self._token_budget = token_budget
        self._scheduler = scheduler
        self._event_sender = event_sender
        self._counters = counters
        small = smaller_kv_type(capabilities.kv_type, capabilities.kv_types)
        self.or_smaller_kv = ""
        """End of a hint about too little memory."""
        if small:
            self.or_smaller_kv = f" or {small.kv_type} KV (--kv-type {small.kv_type})"
        self._plain_kv = next((n for n in ("f16", "bf16") if n in capabilities.kv_types), "f32")
        self._rewinds = capabilities.rewind != "checkpoint"
        self._launches_ahead = capabilities.depth > 1
        self._state_interval = capabilities.state_interval_tokens
        self._draft_rows = capabilities.draft_rows
        self.step_costs = step_costs
        self._draft_planner = draft_planner
        self.requests: dict[int, RequestState] = {}
        self._out_of_memory_steps = 0
        self._has_blocks = capabilities.block_tokens > 0
        self._commit_tokens = capabilities.block_tokens or _SLOT_COMMIT_TOKENS
        self._metrics_s = 0.0
        """Time at which the requests of a decode run were last asked for metrics."""

    def process_result(self, scheduled: ScheduledStep, result: StepResult) -> None:
        """Update every sequence of a step by its result."""
        now_s = time.perf_counter()
        succeeded = result.status == "ok"
        if succeeded:
            self._record_success(scheduled, result.elapsed_s)
            if result.tokens and NOTHING not in result.tokens:
                self._process_moved(scheduled, result.tokens, result.elapsed_s, now_s)
                return
        else:
            self._scheduler.end_run()
        if result.lost_slots:
            for sequence in self._scheduler.running:
                sequence.state_lost |= self._kv_cache.slot(sequence.number) in result.lost_slots
        samples = {sample.index: sample for sample in result.samples}
        for number, token in enumerate(result.tokens):
            samples[number] = Sample(number, token)
        few_rows = len(self._scheduler.running) <= self._draft_rows
        tpot_ms: list[float] = []
        requests: dict[int, RequestState] = {}
        for number, row in enumerate(scheduled.unmoved_rows()):
            sequence = row.sequence
            sequence.steps_in_flight -= 1
            sequence.blocked = False
            # If the previous step returned fewer tokens than planned, this row's KV starts after a gap.
            after_gap = row.start != sequence.computed
            is_valid = succeeded and sequence.state is State.RUNNING and not after_gap
            learns = few_rows and sequence.drafts is not None
            if row.is_plain and is_valid and not learns:
                sample = samples[row.positions[0]]
                if sample.token != NOTHING:
                    self._process_token(sequence, row.start, sample.token, tpot_ms, now_s)
                    if few_rows:
                        self._draft_planner.earn(sequence)
                    continue
            requests[sequence.request_state.id] = sequence.request_state
            sequence.state_lost |= result.status == "out_of_memory" and not self._rewinds
            earliest = result.earliest[number] if result.earliest else 0
            computed = 0 if after_gap else min(result.computed[number], row.width)
            if is_valid:
                self._process_row(scheduled, row, samples, earliest, result.elapsed_s, now_s)
            elif sequence.state is not State.RUNNING:
                self._end_late_row(row, computed, earliest)
            else:
                self._roll_back(row, computed, earliest)
        self._counters.record_tokens(len(tpot_ms), tpot_ms)
        if result.lost_slots:
            self._recompute_lost()
        if result.status == "out_of_memory":
            self._handle_out_of_memory(scheduled)
        for request_state in requests.values():
            if request_state.id in self.requests:
                self._send_metrics(request_state, now_s)
        self._sweep_metrics(now_s)

    def _process_moved(
        self, scheduled: ScheduledStep, tokens: tuple[int, ...], elapsed_s: float, now_s: float
    ) -> None:
        """Update the sequences of a step that repeats the plain rows of an earlier one."""
        moved = scheduled.plan.moved
        few_rows = len(self._scheduler.running) <= self._draft_rows
        tpot_ms: list[float] = []
        for row, token in zip(scheduled.rows, tokens, strict=True):
            sequence = row.sequence
            sequence.steps_in_flight -= 1
            sequence.blocked = False
            start = row.start + moved
            after_gap = start != sequence.computed
            if after_gap or sequence.state is not State.RUNNING:
                self._process_invalid_row(sequence, start, after_gap=after_gap)
            else:
                self._process_token(sequence, start, token, tpot_ms, now_s)
                if few_rows:
                    self._draft_planner.record_plain(sequence, elapsed_s)
        self._counters.record_tokens(len(tpot_ms), tpot_ms)
        self._sweep_metrics(now_s)

    def _process_token(
        self, sequence: Sequence, start: int, token: int, tpot_ms: list[float], now_s: float
    ) -> None:
        """Update a sequence by the token of a plain row.

        The cost of this limits small models on fast GPUs.
        """
        sequence.unknown -= 1
        end = self._append_plain(sequence, token, tpot_ms, now_s)
        if (start + 1) % self._commit_tokens == 0:
            self._commit(sequence, start + 1, 0, sequence.launched - start - 1)
        else:
            sequence.computed = start + 1
            sequence.uncommitted = True
        if sequence.drafts is not None:
            sequence.drafts.ngrams.append(sequence.tokens[start + 1 :])
        if end is not None:
            self._finish(sequence, end, now_s)

    def _sweep_metrics(self, now_s: float) -> None:
        """Send the metrics of decoding requests that are due."""
        if now_s - self._metrics_s < _METRICS_SWEEP_S:
            return
        self._metrics_s = now_s
        for request_state in list(self.requests.values()):
            if request_state.completion_tokens:
                self._send_metrics(request_state, now_s)

    def _process_invalid_row(self, sequence: Sequence, start: int, *, after_gap: bool) -> None:
        """Process a row whose sequence has ended, or whose predecessor was short."""
        row = ScheduledRow(sequence, start, 1, (), positions=[0])
        if sequence.state is not State.RUNNING:
            self._end_late_row(row, int(not after_gap), 0)
        else:
            self._roll_back(row, 0, 0)

    def _append_plain(
        self, sequence: Sequence, token: int, tpot_ms: list[float], now_s: float
    ) -> Finished | None:
        """Append the token of a plain row. Return the end of the sequence, if it was reached."""
        request_state = sequence.request_state
        request = request_state.request
        output = sequence.output
        text: str | None = None
        if token not in self._tokenizer.eog and token not in request.stop_tokens:
            text = output.push_plain(token)
        if text is None:
            return self._append_tokens(sequence, [Sample(-1, token)], now_s)
        sequence.tokens.append(token)
        tpot_ms.append(request_state.timer.token(sequence.choice, now_s))
        if text:
            self._event_sender.plain_text(sequence, text, now_s)
        if output.loop_detector is not None:
            repetition = output.loop_detector.push(text)
            if repetition is not None:
                self._event_sender.text(sequence, output.finish(), now_s)
                return Finished(sequence.choice, "repetition", repetition=repetition)
        if len(sequence.tokens) >= sequence.limit:
            self._event_sender.text(sequence, output.finish(), now_s)
            return _cut(sequence)
        return None

    def _record_success(self, scheduled: ScheduledStep, elapsed_s: float) -> None:
        self._token_budget.observe(
            scheduled.width, elapsed_s, prompt=not scheduled.is_decode, width=scheduled.padded
        )
        if not scheduled.rows:
            return
        self._counters.steps += 1
        self._out_of_memory_steps = 0
        self._scheduler.step_succeeded()
        if scheduled.is_decode:
            self.step_costs.observe(scheduled.width, elapsed_s)

    def _process_row(
        self,
        scheduled: ScheduledStep,
        row: ScheduledRow,
        samples: dict[int, Sample],
        earliest: int,
        elapsed_s: float,
        now_s: float,
    ) -> None:
        sequence, request_state = row.sequence, row.sequence.request_state
        if request_state.timer.admitted(now_s - elapsed_s):
            self._counters.record_prompt(request_state.prompt_tokens, request_state.cached)
        accepted = row.accepted(samples)
        if row.positions and not row.drafts:
            sequence.unknown -= 1
        drawn = accepted
        if row.forks:
            drawn = [*accepted, *(samples[position] for _, position in row.forks)]
        if NOTHING in [sample.token for sample in drawn]:
            self._fail_without_logits(sequence)
            return
        if row.start < request_state.prompt_tokens:
            self._read_prompt(row, samples)
            self._event_sender.prefill(
                request_state, min(row.start + row.width, request_state.prompt_tokens)
            )
        sampled = sequence.known + len(accepted) if accepted else 0
        end = self._append_tokens(sequence, accepted, now_s)
        if self._fail_on_grammar(sequence):
            return
        computed = row.start + row.width + max(0, len(accepted) - 1)
        self._commit(sequence, min(computed, sequence.known), earliest, row.ahead)
        if row.drafts:
            sequence.launched = sequence.computed
        self._record_drafts(scheduled, row, sampled, elapsed_s)
        if sequence.computed == request_state.next_state_at(row.start, self._state_interval):
            self._scheduler.add_memory_ops(self._kv_cache.checkpoint(sequence.number).memory)
        if row.forks:
            self._start_forks(row, samples, now_s)
        if end is not None:
            self._finish(sequence, end, now_s)
        elif sequence.computed == sequence.known and not sequence.may_sample():
            # The request generates no tokens, so its answer consists of the prompt's metrics.
            for other in request_state.sequences:
                self._finish(other, _cut(other), now_s)

    def _append_tokens(
        self, sequence: Sequence, accepted: list[Sample], now_s: float
    ) -> Finished | None:
        """Append sampled tokens to a sequence, and the tokens that are forced after them.

        Stops at the end of the sequence. Returns that end, if it was reached.
        """
        request_state = sequence.request_state
        before = sequence.known
        events: list[Event] = []
        end: Finished | None = None
        samples: Iterable[Sample] = accepted
        if accepted and (sequence.grammar_matcher or sequence.think_budget):
            samples = chain(accepted, self._forced(sequence))
        for sample in samples:
            end = self._append_token(sequence, sample, events)
            if end is not None:
                break
        tokens = sequence.known - before
        self._counters.record_tokens(
            tokens, request_state.timer.step(sequence.choice, tokens, now_s)
        )
        self._event_sender.text(sequence, events, now_s)
        return end

    def _forced(self, sequence: Sequence) -> Iterator[Sample]:
        """Yield the next tokens that a grammar or the thinking budget forces. They need no step.

        If the request needs log probabilities, tokens of a grammar are sampled under masks instead.
        """
        while True:
            token = None
            if sequence.grammar_matcher is not None:
                token = sequence.grammar_matcher.forced
            if token is not None and sequence.sampling.top_logprobs >= 0:
                return
            if token is None and sequence.think_budget is not None:
                token = sequence.think_budget.forced
            if token is None:
                return
            yield Sample(-1, token)

    def _append_token(
        self, sequence: Sequence, sample: Sample, events: list[Event]
    ) -> Finished | None:
        choice = sequence.choice
        sequence.tokens.append(sample.token)
        request = sequence.request_state.request
        if sample.token in self._tokenizer.eog and not request.ignore_eos:
            events += sequence.output.finish()
            return _natural_end(sequence)
        generated = sequence.known - sequence.request_state.prompt_tokens
        may_stop = generated > request.min_tokens
        if sample.token in request.stop_tokens and may_stop:
            if request.keep_stop:
                events += sequence.output.push(sample.token, self._logprob(sample)).events
            events += sequence.output.finish()
            return Finished(choice, "stop")
        grammar_matcher = sequence.grammar_matcher
        if grammar_matcher is not None and not grammar_matcher.accept(sample.token):
            # The caller fails the request with the grammar's error.
            return Finished(choice, "stop")
        if sequence.think_budget is not None:
            sequence.think_budget.push(sample.token)
        delta = sequence.output.push(sample.token, self._logprob(sample), may_stop=may_stop)
        events += delta.events
        if delta.stop:
            return Finished(choice, "stop", delta.stop)
        if grammar_matcher is not None and grammar_matcher.ended:
            events += sequence.output.finish()
            return _natural_end(sequence)
        if delta.repetition is not None:
            events += sequence.output.finish()
            return Finished(choice, "repetition", repetition=delta.repetition)
        if sequence.known >= sequence.limit:
            events += sequence.output.finish()
            return _cut(sequence)
        return None

    def _logprob(self, sample: Sample) -> TokenLogprob | None:
        if sample.logprob is None:
            return None
        piece = self._tokenizer.piece
        top = tuple((token, piece(token, special=True), value) for token, value in sample.top)
        return TokenLogprob(sample.token, piece(sample.token, special=True), sample.logprob, top)

    def _read_prompt(self, row: ScheduledRow, samples: dict[int, Sample]) -> None:
        request_state = row.sequence.request_state
        for position in row.prompt_positions:
            entry = self._logprob(samples[position])
            assert entry is not None
            request_state.prompt_logprobs.append(entry)
        if request_state.wants_all and row.prompt_positions:
            rows = [samples[position].all for position in row.prompt_positions]
            _write_all_logprobs(request_state, rows)
        if len(request_state.prompt_logprobs) == request_state.prompt_logprobs_wanted:
            self._event_sender.prompt_logprobs(request_state)

    def _commit(self, sequence: Sequence, computed: int, earliest: int, ahead: int = 0) -> None:
        """Record in the KV cache that the first `computed` tokens of a sequence are valid.

        If drafts were rejected and the model cannot rewind, the sequence continues at an earlier token.
        `earliest` and `ahead`: see ValidTokens.
        """
        if sequence.uncommitted and self._has_blocks:
            before = ValidTokens(sequence.computed)
            self._kv_cache.commit(sequence.number, sequence.tokens, before)
        sequence.uncommitted = False
        valid = ValidTokens(computed, earliest, ahead, min(sequence.exact, computed))
        update = self._kv_cache.commit(sequence.number, sequence.tokens, valid)
        if update.memory:
            self._scheduler.add_memory_ops(update.memory)
        sequence.computed = computed
        sequence.recomputed = 0
        if update.kept is not None:
            sequence.computed = sequence.launched = update.kept
            if update.kept:
                sequence.recomputed = sequence.known - 1 - update.kept

    def _record_drafts(
        self, scheduled: ScheduledStep, row: ScheduledRow, sampled: int, elapsed_s: float
    ) -> None:
        """Learn from a step's drafts. `sampled`: tokens of the sequence up to the last sampled one."""
        sequence = row.sequence
        drafts = sequence.drafts
        many_rows = len(self._scheduler.running) > self._draft_rows and not row.drafts
        if not sampled:
            if drafts is not None and not many_rows:
                # Index a slice of a long prompt while the prompt is computed.
                drafts.ngrams.index()
            return
        if many_rows:
            if drafts is not None:
                drafts.ngrams.append(sequence.tokens[row.start + row.width :])
            return
        tokens = sequence.tokens[row.start + row.width : sampled]
        drafted = len(row.drafts)
        if drafted:
            self._counters.record_draft(drafted, min(drafted, max(0, len(tokens) - 1)))
        self._draft_planner.record(scheduled, row, tokens, elapsed_s)
        if drafts is not None and sampled < sequence.known:
            drafts.ngrams.append(sequence.tokens[sampled:])

    def _start_forks(self, row: ScheduledRow, samples: dict[int, Sample], now_s: float) -> None:
        """Start the other choices of a request from its prompt: they have their first token now."""
        for child, position in row.forks:
            end = self._append_tokens(child, [samples[position]], now_s)
            if self._fail_on_grammar(child):
                return
            if end is not None:
                self._finish(child, end, now_s)
                continue
            if row.sequence.drafts is not None:
                child.drafts = row.sequence.drafts.fork()
            self._scheduler.start_fork(row.sequence, child)

    def _roll_back(self, row: ScheduledRow, computed: int, earliest: int) -> None:
        """Commit the tokens that a short step computed, without its samples.

        The rest is launched again once nothing of the sequence is in flight.
        """
        sequence = row.sequence
        if row.positions and not row.drafts:
            sequence.unknown -= 1
        if sequence.state_lost:
            if not sequence.steps_in_flight:
                sequence.state_lost = False
                self._scheduler.recompute(sequence)
            return
        kept = 0
        if not row.prompt_positions:
            kept = min(computed, sequence.known - 1 - row.start)
        if kept < computed and not self._rewinds:
            self._scheduler.recompute(sequence)
            return
        if computed:
            self._commit(sequence, row.start + kept, earliest)
        sequence.launched = sequence.computed

    def _recompute_lost(self) -> None:
        """Requeue running sequences that lost their slot before they were scheduled."""
        for sequence in list(self._scheduler.running):
            if sequence.state_lost and not sequence.steps_in_flight:
                sequence.state_lost = False
                self._scheduler.recompute(sequence)

    def _end_late_row(self, row: ScheduledRow, computed: int, earliest: int) -> None:
        """End a sequence whose last row returned after its end. Its KV stays as a prefix."""
        sequence = row.sequence
        valid = min(row.start + computed, sequence.known)
        # A row that computed nothing may start after a gap, so its start is not the end of valid KV.
        if computed and valid > sequence.computed and not sequence.kv_invalid:
            self._commit(sequence, valid, earliest, row.ahead)
        self._end_sequence(sequence)

    def _handle_out_of_memory(self, scheduled: ScheduledStep) -> None:
        """React to a step without memory: smaller steps, fewer sequences, and finally an error."""
        self._token_budget.halve()
        self._out_of_memory_steps += 1
        if self._scheduler.handle_out_of_memory():
            self._out_of_memory_steps = 0
            return
        # A sequence whose state was lost is waiting again.
        alive = (State.RUNNING, State.WAITING)
        running = [row.sequence for row in scheduled.rows if row.sequence.state in alive]
        if running and self._out_of_memory_steps > _MAX_OUT_OF_MEMORY_STEPS:
            self._out_of_memory_steps = 0
            self.fail(
                running[0].request_state,
                DoesNotFit(
                    f"out of memory in a step, at {running[0].known} tokens of this sequence",
                    hint=f"shorten the input or use a shorter context (--ctx){self.or_smaller_kv}",
                ),
            )

    def cancel(self, id_: int) -> None:
        """Cancel a request. Nothing more of it is computed or sent."""
        if self._end_request(id_):
            self._counters.record_cancel()

    def _end_request(self, id_: int) -> bool:
        """End all choices of a request. Return False if it is unknown or has ended."""
        request_state = self.requests.pop(id_, None)
        if request_state is None:
            return False
        self._event_sender.discard(id_)
        for sequence in request_state.sequences:
            self._end_sequence(sequence)
        return True

    def fail(self, request_state: RequestState, error: LocalchatError) -> None:
        """Send the events so far, then end the request with the error."""
        self._event_sender.flush()
        self._end_request(request_state.id)
        self._counters.record_failure(error)
        self._event_sender.fail(request_state.id, error)

    def _fail_without_logits(self, sequence: Sequence) -> None:
        """Fail a request whose logits are not numbers, or whose mask left no token.

        Its KV may be invalid, so none of it stays as a prefix.
        """
        for choice in sequence.request_state.sequences:
            choice.kv_invalid = True
        self.fail(
            sequence.request_state,
            LocalchatError(
                f"the model gave no usable logits at token {sequence.known} of this sequence, so no token "
                "could be sampled",
                hint="the model file may be damaged, or this model needs another KV type "
                f"(--kv-type {self._plain_kv})",
            ),
        )

    def _fail_on_grammar(self, sequence: Sequence) -> bool:
        """Fail the request if its grammar matcher has an error. Return whether it failed."""
        if sequence.grammar_matcher is None or not sequence.grammar_matcher.error:
            return False
        self.fail(
            sequence.request_state,
            UsageError(
                f"the answer's grammar failed at token {sequence.known}: "
                f"{sequence.grammar_matcher.error}",
                hint="try a simpler schema or grammar",
            ),
        )
        return True

    def _finish(self, sequence: Sequence, end: Finished, now_s: float) -> None:
        request_state = sequence.request_state
        usage = self._kv_cache.usage()
        if end.reason == "stop" and sequence.output.has_tool_calls:
            end = replace(end, reason="tool_calls")
        self._event_sender.finished(request_state, end)
        if sequence.known > request_state.prompt_tokens:
            self._answer_kv.add(sequence)
        self._end_sequence(sequence)
        if request_state.ended and self.requests.pop(request_state.id, None) is not None:
            self._send_metrics(request_state, float("inf"))
            self._event_sender.done(request_state, usage, now_s)
            self._counters.record_finish()

    def _send_metrics(self, request_state: RequestState, now_s: float) -> None:
        running = len(self._scheduler.running)
        waiting = len(self._scheduler.waiting)
        self._event_sender.send_metrics(request_state, running, waiting, now_s)

    def _end_sequence(self, sequence: Sequence) -> None:
        """End a sequence and release its KV as soon as no launched step touches it. Idempotent."""
        sequence.state = State.ENDED
        self._scheduler.end_run()
        if sequence.steps_in_flight:
            return
        keep = not sequence.kv_invalid and not sequence.state_lost
        # After a cancel, the saved state may include a token that was never reported.
        complete = not self._launches_ahead or sequence.launched == sequence.computed
        if keep and complete and sequence in self._scheduler.running:
            self._scheduler.add_memory_ops(self._kv_cache.checkpoint(sequence.number).memory)
        self._scheduler.remove(sequence, keep=keep)
