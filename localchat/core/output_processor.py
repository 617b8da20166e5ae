"""What the result of a step means: tokens are accepted, texts end, the books are settled."""

import time
from collections.abc import Iterator
from itertools import chain

from localchat.backend_api.interface import Capabilities, Sample, StepResult, Tokenizer
from localchat.backend_api.sampling.reference import NOTHING
from localchat.core.event_sender import EventSender
from localchat.core.kv_cache.manager import KVCacheManager
from localchat.core.scheduler.scheduler import Scheduler
from localchat.core.scheduler.step_builder import ScheduledRow, ScheduledStep
from localchat.core.scheduler.token_budget import TokenBudget
from localchat.core.sequence import RequestState, Sequence, State
from localchat.core.spec_decode.ngram_index import SPAN, EarlierTexts
from localchat.core.spec_decode.step_cost import CostModel
from localchat.core.stats import EngineCounters
from localchat.engine.events import Event, FinishReason, TokenLogprob
from localchat.errors import DoesNotFit, LocalchatError, UsageError
from localchat.fit.kv_types import smaller

_TRIES_WITHOUT_MEMORY = 4


class OutputProcessor:
    """Owns the requests under way. Single thread: the loop's."""

    def __init__(
        self,
        capabilities: Capabilities,
        tokenizer: Tokenizer,
        book: KVCacheManager,
        pace: TokenBudget,
        scheduler: Scheduler,
        telling: EventSender,
        counts: EngineCounters,
    ) -> None:
        self._tokenizer = tokenizer
        self._book = book
        self._pace = pace
        self._scheduler = scheduler
        self._telling = telling
        self._counts = counts
        self._ahead = capabilities.depth > 1
        small = smaller(capabilities.kv_type, capabilities.kv_types)
        self.or_smaller_kv = f" or {small.kv_type} KV (--kv-type {small.kv_type})" if small else ""
        """The end of a hint where memory is short."""
        self._plain_kv = next((n for n in ("f16", "bf16") if n in capabilities.kv_types), "f32")
        self._rewinds = capabilities.rewind != "checkpoint"
        self.costs = CostModel()
        self.earlier = EarlierTexts()
        self.jobs: dict[int, RequestState] = {}
        self._starved = 0

    # ------------------------------------------------------------------------ a step came back

    def decide(self, flight: ScheduledStep, result: StepResult) -> None:
        """Accept, stop, settle, for every row of a step."""
        now_s = time.perf_counter()
        if result.status == "ok":
            self._went_well(flight, result.elapsed_s)
        samples = {sample.point: sample for sample in result.samples}
        for number, row in enumerate(flight.rows):
            sequence = row.sequence
            sequence.flights -= 1
            sequence.held = False
            earliest = result.earliest[number] if result.earliest else 0
            # Behind a row that came back short the next one, launched meanwhile, has a gap before it.
            void = row.start != sequence.computed
            computed = 0 if void else min(result.computed[number], row.width)
            if sequence.state is not State.RUNNING:
                self._let_go(row, computed, earliest)
            elif result.status == "ok" and not void:
                self._collect(flight, row, samples, earliest, result.elapsed_s, now_s)
            else:
                self._take_back(row, computed, earliest)
        if result.status == "out_of_memory":
            self._make_do(flight)
        for job in {id(row.sequence.job): row.sequence.job for row in flight.rows}.values():
            if job.id in self.jobs:
                self._figures(job, now_s)

    def _went_well(self, flight: ScheduledStep, elapsed_s: float) -> None:
        self._pace.measured(flight.width, elapsed_s, prompt=not flight.decoding)
        if not flight.rows:
            return
        self._counts.steps += 1
        self._starved = 0
        self._scheduler.went_well()
        if flight.decoding:
            self.costs.observe(flight.width, elapsed_s)

    def _collect(
        self,
        flight: ScheduledStep,
        row: ScheduledRow,
        samples: dict[int, Sample],
        earliest: int,
        elapsed_s: float,
        now_s: float,
    ) -> None:
        sequence, job = row.sequence, row.sequence.job
        if job.clock.admitted(now_s - elapsed_s):
            self._counts.admit(job.prompt_tokens, job.cached)
        drawn = row.accepted(samples)
        if row.points and not row.drafts:
            sequence.unknown -= 1
        if any(one.token == NOTHING for one in (*drawn, *(samples[p] for _, p in row.forks))):
            self._end_without_logits(sequence)
            return
        self._read_prompt(row, samples)
        if row.start < job.prompt_tokens:
            self._telling.prefill(job, min(row.start + row.width, job.prompt_tokens))
        sampled = sequence.known + len(drawn) if drawn else 0
        reason, stop = self._say(sequence, drawn, now_s)
        if self._is_lost(sequence):
            return
        computed = row.start + row.width + max(0, len(drawn) - 1)
        self._settle(sequence, min(computed, sequence.known), earliest)
        if row.drafts:
            sequence.launched = sequence.computed
        self._learn(sequence, flight, row, sampled, elapsed_s)
        if row.start < job.prompt_tokens <= sequence.computed:
            self._scheduler.remember(self._book.checkpoint(sequence.number).memory)
        self._join(row, samples, now_s)
        if reason:
            self._finish(sequence, reason, stop, now_s)
        elif sequence.computed == sequence.known and not sequence.may_sample():
            # Nothing was to be generated: the prompt's figures were all.
            for one in job.sequences:
                self._finish(one, "length", "", now_s)

    def _say(
        self, sequence: Sequence, drawn: list[Sample], now_s: float
    ) -> tuple[FinishReason | None, str]:
        """Append sampled tokens to a sequence, and what a grammar forces behind them, up to its end. Returns
        why it ended, if it did."""
        job, before = sequence.job, sequence.known
        events: list[Event] = []
        end: tuple[FinishReason | None, str] = (None, "")
        for sample in chain(drawn, self._forced(sequence) if drawn else ()):
            end = self._say_one(sequence, sample, events)
            if end[0]:
                break
        tokens = sequence.known - before
        self._counts.say(tokens, job.clock.step(sequence.choice, tokens, now_s))
        self._telling.text(sequence, events, now_s)
        return end

    def _forced(self, sequence: Sequence) -> Iterator[Sample]:
        """Tokens that need no step to be sampled: those that a grammar leaves no choice about. Where log
        probabilities are asked they take the long way, under masks."""
        constraint = sequence.constraint
        if constraint is None or sequence.sampling.top_logprobs >= 0:
            return
        while (token := constraint.forced) is not None:
            yield Sample(-1, token)

    def _say_one(
        self, sequence: Sequence, sample: Sample, events: list[Event]
    ) -> tuple[FinishReason | None, str]:
        sequence.tokens.append(sample.token)
        if sample.token in self._tokenizer.eog and not sequence.job.request.ignore_eos:
            events += sequence.voice.end()
            return "stop", ""
        constraint = sequence.constraint
        if constraint is not None and not constraint.take(sample.token):
            return "stop", ""  # with an error, which ends the request
        spoken = sequence.voice.say(sample.token, self._logprob(sample))
        events += spoken.events
        if spoken.stop:
            return "stop", spoken.stop
        if constraint is not None and constraint.ended:
            events += sequence.voice.end()
            return "stop", ""
        if sequence.known >= sequence.limit:
            events += sequence.voice.end()
            return "length", ""
        return None, ""

    def _logprob(self, sample: Sample) -> TokenLogprob | None:
        if sample.logprob is None:
            return None
        piece = self._tokenizer.piece
        top = tuple((token, piece(token, special=True), value) for token, value in sample.top)
        return TokenLogprob(sample.token, piece(sample.token, special=True), sample.logprob, top)

    def _read_prompt(self, row: ScheduledRow, samples: dict[int, Sample]) -> None:
        job = row.sequence.job
        for point in row.prompt_points:
            entry = self._logprob(samples[point])
            assert entry is not None
            job.prompt_logprobs.append(entry)
        if len(job.prompt_logprobs) == job.prompt_tokens - 1:
            self._telling.prompt_logprobs(job)

    def _settle(self, sequence: Sequence, computed: int, earliest: int) -> None:
        growth = self._book.settle(sequence.number, sequence.tokens, computed, earliest)
        self._scheduler.remember(growth.memory)
        sequence.computed = computed
        if growth.lost:
            # A sliding window moved past the place that drafts had to be cut back to.
            sequence.computed = sequence.launched = 0

    def _learn(
        self,
        sequence: Sequence,
        flight: ScheduledStep,
        row: ScheduledRow,
        sampled: int,
        elapsed_s: float,
    ) -> None:
        """`sampled`: tokens of the text up to the last that the step sampled."""
        drafts = sequence.drafts
        if drafts is None:
            return
        if not sampled:
            drafts.digest()  # a slice of a long prompt, while the prompt is computed
            return
        said = sequence.tokens[row.start + row.width : sampled]
        if row.drafts:
            self._counts.draft(len(row.drafts), min(len(row.drafts), max(0, len(said) - 1)))
        if flight.decoding:
            drafts.advance(said, len(row.drafts), flight.width, elapsed_s, flight.plan.pad_to)
        else:
            drafts.advance(said, len(row.drafts))
        if sampled < sequence.known:
            drafts.given(sequence.tokens[sampled:])
        if self._ahead:
            sequence.hopeful = bool(drafts.propose(1))

    def _join(self, row: ScheduledRow, samples: dict[int, Sample], now_s: float) -> None:
        """The other choices of a request have their first token: they go on from the prompt."""
        for child, point in row.forks:
            reason, stop = self._say(child, [samples[point]], now_s)
            if self._is_lost(child):
                return
            if reason:
                self._finish(child, reason, stop, now_s)
                continue
            if row.sequence.drafts is not None:
                child.drafts = row.sequence.drafts.fork()
            self._scheduler.join(row.sequence, child)

    # ------------------------------------------------------------------------ a step came back short

    def _take_back(self, row: ScheduledRow, computed: int, earliest: int) -> None:
        """What a short step computed counts, but for what was to be sampled there; the rest is launched again,
        once nothing of the sequence is in flight."""
        sequence = row.sequence
        if row.points and not row.drafts:
            sequence.unknown -= 1
        kept = min(computed, sequence.known - 1 - row.start) if not row.prompt_points else 0
        if kept < computed and not self._rewinds:
            self._scheduler.begin_anew(sequence)
            return
        if computed:
            self._settle(sequence, row.start + kept, earliest)
        sequence.launched = sequence.computed

    def _let_go(self, row: ScheduledRow, computed: int, earliest: int) -> None:
        """A row of a text that ended meanwhile: its KV stays as a prefix, what it still held is free."""
        sequence = row.sequence
        valid = min(row.start + computed, sequence.known)
        if valid > sequence.computed and not sequence.spoiled:
            self._settle(sequence, valid, earliest)
        self._end(sequence)

    def _make_do(self, flight: ScheduledStep) -> None:
        """A step found no memory: smaller steps, fewer sequences, and in the end one clear error."""
        self._pace.out_of_memory()
        self._starved += 1
        if self._scheduler.make_do():
            self._starved = 0
            return
        running = [row.sequence for row in flight.rows if row.sequence.state is State.RUNNING]
        if running and self._starved > _TRIES_WITHOUT_MEMORY:
            self._starved = 0
            self.fail(
                running[0].job,
                DoesNotFit(
                    f"out of memory in a step, at {running[0].known} tokens of this sequence",
                    hint=f"shorten the input or use a shorter context (--ctx){self.or_smaller_kv}",
                ),
            )

    # ------------------------------------------------------------------------ ends

    def cancel(self, id_: int) -> None:
        """Its reader gave a request up: nothing more of it is computed or told."""
        if self._drop(id_):
            self._counts.cancel()

    def _drop(self, id_: int) -> bool:
        """False: there is no such request (any more)."""
        job = self.jobs.pop(id_, None)
        if job is None:
            return False
        self._telling.forget(id_)
        for sequence in job.sequences:
            self._end(sequence)
        return True

    def fail(self, job: RequestState, error: LocalchatError) -> None:
        """What was said so far is told, and then why nothing follows."""
        self._telling.flush()
        self._drop(job.id)
        self._counts.fail(error)
        self._telling.failure(job.id, error)

    def _end_without_logits(self, sequence: Sequence) -> None:
        """The model gave no logit that is a number (or a mask left no token). Its KV may be spoilt, so none
        of it stays as a prefix."""
        for one in sequence.job.sequences:
            one.spoiled = True
        self.fail(
            sequence.job,
            LocalchatError(
                f"the model gave no usable logits at token {sequence.known} of this sequence: nothing could "
                "be sampled",
                hint="the model file may be damaged, or this model needs another KV type "
                f"(--kv-type {self._plain_kv})",
            ),
        )

    def _is_lost(self, sequence: Sequence) -> bool:
        """Whether its grammar can say no more what is allowed; then the request has failed."""
        why = sequence.constraint.error if sequence.constraint is not None else ""
        if why:
            self.fail(
                sequence.job,
                UsageError(
                    f"the grammar of the answer gave up at token {sequence.known}: {why}",
                    hint="a simpler schema or grammar may go through",
                ),
            )
        return bool(why)

    def _finish(self, sequence: Sequence, reason: FinishReason, stop: str, now_s: float) -> None:
        job = sequence.job
        usage = self._book.usage()
        if reason == "stop" and sequence.voice.called:
            reason = "tool_calls"
        self._telling.finished(sequence, reason, stop)
        if sequence.known > job.prompt_tokens:
            # Later prompts of this conversation hold this prompt themselves.
            said = sequence.tokens[max(0, job.prompt_tokens - SPAN) :]
            self.earlier.add(job.request.salt, said)
        self._end(sequence)
        if job.ended and self.jobs.pop(job.id, None) is not None:
            self._figures(job, float("inf"))
            self._telling.done(job, usage, now_s)
            self._counts.finish()

    def _figures(self, job: RequestState, now_s: float) -> None:
        running, waiting = len(self._scheduler.running), len(self._scheduler.waiting)
        self._telling.figures(job, running, waiting, now_s)

    def _end(self, sequence: Sequence) -> None:
        """Out of the books, as soon as no launched step touches it any more. Idempotent."""
        sequence.state = State.ENDED
        if sequence.flights:
            return
        keep = not sequence.spoiled
        if keep and sequence in self._scheduler.running:
            self._scheduler.remember(self._book.checkpoint(sequence.number).memory)
        self._scheduler.retire(sequence, keep=keep)
