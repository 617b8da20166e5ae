"""Draft planner: chooses the drafts of a step for all its sequences together.

Every drafted token has a probability of acceptance, and every width of a step has a cost. The planner adds the
likeliest tokens to the step as long as its expected tokens per second rise. Above `draft_rows` rows it drafts
nothing. A step has drafts of one source, n-grams or the draft model, whichever promises more.

Each sequence has a draft budget, in plain steps. Plain steps fill it slowly, and a step with drafts adds what
the sequence gained or lost. Drafts stop when the budget is used up, so those that do not help cost a sequence
about a fiftieth of its speed. Rates of n-grams follow the text even while nothing is drafted, so drafts begin
again once they would be right. The draft model has a budget of its own, which also pays for probes.

A runner that is ahead launches a step before the previous one returns. Drafts need the previous step's tokens,
so the runner waits for them, and all sequences of the step wait with it. Then the budget of every sequence must
cover its share of it. If a runner prepares its steps, only prepared steps have drafts, because a step that is
launched kernel by kernel takes a GPU as long as ten others.

Seeded requests and requests at temperature 0 have no drafts. Logits differ in their last bits with the width of
the step, which changes about one sampled token in a few hundred.
"""

import math
import time
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from localchat.backend_api.drafter import NO_DRAFT
from localchat.backend_api.interface import Capabilities
from localchat.backend_api.prepared_steps import DecodeRow, PreparingRunner
from localchat.core.scheduler.step_builder import ScheduledRow, ScheduledStep
from localchat.core.sequence import Sequence, State
from localchat.core.spec_decode.draft_model import PROBE_BUDGET, DraftModel
from localchat.core.spec_decode.sequence_drafts import SequenceDrafts
from localchat.core.spec_decode.step_cost import CostModel

_MAX_DRAFT = 31
"""Longest draft of a sequence. On a CPU, 16 rows may take as long as 12 plain steps, and 32 as long as 21."""
_MIN_GAIN = 1.02
"""Drafts that promise less than this over a plain step are not worth the risk."""
_EARNED_PER_STEP = 0.01
_MAX_EARNED = 1.5
"""Plain steps that each plain step adds to a draft budget, and the limit for that."""
_MAX_DEBT = 1.0
"""Plain steps that a sequence may owe before its drafts stop."""
_MAX_OVER_ESTIMATE = 2.0
"""Limit on the time of a step, as a multiple of its estimate. The rest is another program's load."""
_MAX_BUDGET = 16.0
"""A wide draft that is rejected whole. Where 16 rows cost 12 plain steps, a wrong draft at an edit is bad luck,
and without this reserve the next draft would have to wait for hundreds of plain steps."""

Drafts: TypeAlias = dict[int, tuple[int, ...]]
"""Drafted tokens by number of the sequence."""


class _DraftCandidate(NamedTuple):
    """A decode row that may have drafts."""

    sequence: Sequence
    drafts: SequenceDrafts
    limit: int
    """Longest draft."""


@dataclass
class _DraftStep:
    """A decode step that may have drafts."""

    sequences: list[Sequence]
    candidates: list[_DraftCandidate]
    rows: int
    """Tokens of the step without drafts."""
    limit: int
    """Most drafted tokens."""
    recomputed: int = 0
    """Tokens of `rows` that an earlier step computed already."""

    @property
    def new_tokens(self) -> int:
        """Tokens that the step generates without drafts."""
        return max(self.rows - self.recomputed, 1)


class _DraftPlan(NamedTuple):
    """Draft lengths by number of the sequence, and the expected speed of the step."""

    lengths: dict[int, int]
    tokens_per_s: float = 0.0
    is_probe: bool = False
    """The draft model is tried although it is not expected to pay."""


class DraftPlanner:
    """Used by the engine core's thread alone."""

    def __init__(
        self,
        capabilities: Capabilities,
        cost: CostModel,
        preparing: PreparingRunner | None = None,
        draft_model: DraftModel | None = None,
    ) -> None:
        """`preparing`: the runner, if it prepares its steps."""
        self._can = capabilities
        self._cost = cost
        self._preparing = preparing
        self._draft_model = draft_model
        self._ahead = capabilities.depth > 1
        self._rewinds = capabilities.rewind != "checkpoint"
        self._waited = False
        """The runner waits for the drafts of the next step."""
        self._searches_to_skip = 0
        self.drafting_s = 0.0
        """Time that the draft model took for the last drafts."""
        self._charged_s = 0.0
        """The part of it that counts against the step."""

    # Before a step

    def waits(self, running: list[Sequence]) -> bool:
        """Return whether the next step has to wait for the tokens in flight.

        Never while a prompt is computed, because its steps are long enough.
        """
        if not self._ahead or not 0 < len(running) <= self._can.draft_rows:
            return False
        if any(sequence.in_prompt or sequence.needs > 1 for sequence in running):
            return False
        if any(sequence.verifies for sequence in running):
            # The other sequences wait too: a step with half of the rows takes as long as one with all.
            return True
        if not any(sequence.steps_in_flight for sequence in running):
            return False
        # A grammar needs the token in flight. Left out of every other step, its sequence has half its speed.
        blocked = sum(
            sequence.grammar_matcher is not None and sequence.unknown > 0 for sequence in running
        )
        rows = len(running)
        cost = self._cost
        if blocked and rows * cost.wait_s < blocked / 2 * (cost.seconds(rows) + cost.wait_s):
            return True
        self._waited = self._worth_waiting(
            [sequence for sequence in running if sequence.may_sample()]
        )
        return self._waited

    def _worth_waiting(self, sequences: list[Sequence]) -> bool:
        """Return whether drafts after the tokens in flight are expected to pay for the wait."""
        rows = len(sequences)
        limit = self._can.draft_step_tokens - rows
        step = _DraftStep(sequences, self._candidates(sequences), rows, limit)
        if not step.candidates or not self._cost.has_samples() or not self._could_pay(step):
            return False
        plan = self._plan_model_drafts(step)
        if plan.lengths and self._prepared(step, plan.lengths):
            return True
        # The first token that a proposer expects is in flight.
        plan = self._plan_ngrams(step, in_flight=1)
        return bool(plan.lengths) and self._prepared(step, plan.lengths)

    # Drafts of a step

    def allows_drafts(self, sequences: list[Sequence]) -> bool:
        """Return whether a step of all these sequences can have drafts at all."""
        few = len(sequences) <= self._can.draft_rows
        return few and any(sequence.drafts is not None for sequence in sequences)

    def may_draft(self, sequences: list[Sequence]) -> bool:
        """Return whether `choose` may find drafts after the tokens known now. Much cheaper than `choose`."""
        if len(sequences) > self._can.draft_rows:
            return False
        for sequence in sequences:
            drafts = sequence.drafts
            if drafts is None:
                continue
            if drafts.uses_model:
                return True
            if sequence.draft_budget > -_MAX_DEBT and drafts.ngrams.may_propose():
                return True
        return False

    def choose(
        self, running: list[Sequence], ready: list[Sequence], tokens_left: int, *, admits: bool
    ) -> Drafts:
        """Return the drafts of a step that has room for `tokens_left`.

        `ready`: the sequences of `running` that could be in the step. All that decode must go into it.
        `admits`: the step may start another prompt.
        """
        waited = self._waited
        self._waited = False
        if len(running) > self._can.draft_rows:
            return {}
        decoding = [
            sequence for sequence in ready if sequence.decodes and sequence.state is State.RUNNING
        ]
        has_prompts = admits or len(decoding) < len(ready)
        if self._ahead and (has_prompts or any(sequence.steps_in_flight for sequence in running)):
            # Steps with prompts are long, and a sequence that is left out of one waits twice.
            return {}
        rows = sum(sequence.needs for sequence in decoding)
        candidates = self._candidates([sequence for sequence in decoding if not sequence.unknown])
        limit = min(tokens_left, self._can.draft_step_tokens) - rows
        recomputed = sum(candidate.sequence.recomputed for candidate in candidates)
        step = _DraftStep(decoding, candidates, rows, limit, recomputed)
        drafts = self._draft(step) if candidates and self._could_pay(step) else {}
        if waited and not drafts:
            for sequence in decoding:
                sequence.draft_budget -= self._cost.wait_s / self._cost.seconds(rows)
        return drafts

    def _draft(self, step: _DraftStep) -> Drafts:
        """Return the drafts of the better source. Empty if no drafts are expected to pay."""
        self.drafting_s = self._charged_s = 0.0
        ngrams = self._plan_ngrams(step)
        model = self._plan_model_drafts(step, may_probe=not ngrams.lengths)
        if model.tokens_per_s > ngrams.tokens_per_s and self._prepared(step, model.lengths):
            return _allowed(step, self._ask_draft_model(step, model))
        drafts = {
            sequence.number: drafts.ngrams.take(ngrams.lengths[sequence.number])
            for sequence, drafts, _ in step.candidates
            if sequence.number in ngrams.lengths
        }
        drafts = _allowed(step, drafts)
        if drafts and self._prepared(step, {seq: len(draft) for seq, draft in drafts.items()}):
            return drafts
        return {}

    def _candidates(self, sequences: list[Sequence]) -> list[_DraftCandidate]:
        candidates: list[_DraftCandidate] = []
        for sequence in sequences:
            # A fork starts with all that its parent has committed, which must be the prompt alone.
            if sequence.drafts is None or sequence.blocked or sequence.pending_forks:
                continue
            limit = min(_MAX_DRAFT, sequence.limit - sequence.virtual - 1)
            if sequence.free_tokens is not None:
                limit = min(limit, sequence.free_tokens - sequence.unknown - 1)
            if limit > 0:
                candidates.append(_DraftCandidate(sequence, sequence.drafts, limit))
        return candidates

    def _plan_ngrams(self, step: _DraftStep, *, in_flight: int = 0) -> _DraftPlan:
        """Choose the lengths of n-gram drafts. `in_flight`: tokens that come before the drafts."""
        if self._searches_to_skip:
            self._searches_to_skip -= 1
            return _DraftPlan({})
        chances: dict[int, list[float]] = {}
        for sequence, drafts, limit in step.candidates:
            if sequence.draft_budget > -_MAX_DEBT:
                draft = drafts.ngrams.chances(min(limit, step.limit) + in_flight)
                if len(draft) > in_flight:
                    chances[sequence.number] = draft[in_flight:]
        plan = self._best_lengths(step, chances)
        if self._ahead and not plan.lengths:
            # Searching several texts takes the host longer than a small model's step.
            self._searches_to_skip = len(step.candidates) - 1
        return plan

    def _plan_model_drafts(self, step: _DraftStep, *, may_probe: bool = True) -> _DraftPlan:
        """Choose the lengths of the draft model's drafts. `may_probe`: try a token even if none may pay."""
        model = self._draft_model
        using = [candidate for candidate in step.candidates if candidate.drafts.uses_model]
        if model is None or not using or model.paused or not self._cost.has_samples():
            return _DraftPlan({})
        if model.budget < 0:
            model.pause()
            return _DraftPlan({})
        plain_token_s = self._cost.seconds(step.rows) / step.new_tokens
        reading = 0.0
        unread: dict[int, int] = {}
        for sequence, drafts, _ in using:
            # All sequences share the budget, so each can spend only its part on reading.
            model.choose_window(sequence, drafts, plain_token_s / len(using))
            reading += model.reading_tokens(sequence, drafts)
            unread[sequence.number] = model.unread(sequence, drafts)
        if not model.drafter.ready(unread):
            return _DraftPlan({})
        chances = {
            sequence.number: model.chances(min(limit, step.limit // len(using)))
            for sequence, _, limit in using
        }
        reading_s = reading * model.prompt_token_s
        plan = self._best_lengths(step, chances, model, reading_s)
        if plan.lengths or not may_probe:
            return plan
        if model.budget >= PROBE_BUDGET:
            # The draft model may fit the text better by now. One token of each sequence shows it.
            certain = {number: [1.0] for number, draft in chances.items() if draft}
            plan = self._best_lengths(step, certain, model, reading_s)._replace(is_probe=True)
        # With several rows, drafts may cost too much for this step alone.
        if not plan.lengths and (model.budget < PROBE_BUDGET or step.rows == 1):
            model.pause()
        return plan

    def _best_lengths(
        self,
        step: _DraftStep,
        chances: dict[int, list[float]],
        model: DraftModel | None = None,
        reading_s: float = 0.0,
    ) -> _DraftPlan:
        """Choose the lengths with which the step generates the most tokens per second.

        `chances`: by number of the sequence, for each token the probability that all up to it are accepted.
        `model`: the draft model, if it drafts the tokens, after reading for `reading_s`.
        """
        ranked = sorted(
            (-chance, index, number)
            for number, draft in chances.items()
            for index, chance in enumerate(draft)
        )
        cost = self._cost
        plain_s = cost.seconds(step.rows)
        max_s = plain_s * (1 + self._patience(step, chances))
        expected = float(step.new_tokens)
        best_rate = expected / plain_s * _MIN_GAIN
        best = 0
        best_s = 0.0
        recomputed = 0.0
        for drafted, (chance, index, number) in enumerate(ranked[: step.limit], 1):
            expected -= chance
            seconds = cost.seconds(step.rows + drafted)
            if not self._rewinds:
                # Accepted tokens before a rejected one are computed again.
                before = chances[number][index - 1] if index else 1.0
                recomputed += (before + chance) * (index + 1)
                seconds += recomputed * (seconds - plain_s) / drafted
            seconds += cost.wait_s
            if model is not None:
                seconds += reading_s + model.drafting_s(index + 1, drafted)
            if seconds > max_s:
                break
            if expected / seconds > best_rate:
                best = drafted
                best_rate = expected / seconds
                best_s = seconds
        lengths: dict[int, int] = {}
        for _, _, number in ranked[:best]:
            lengths[number] = lengths.get(number, 0) + 1
        if not best or not self._affordable(step, chances, lengths, best_s):
            return _DraftPlan({})
        return _DraftPlan(lengths, best_rate)

    def _patience(self, step: _DraftStep, chances: dict[int, list[float]]) -> float:
        """Return the plain steps that the sequences without drafts can lose to the step.

        A CPU computes rows one after the other, so accepted drafts cost the others nothing in the long run.
        """
        if not self._ahead:
            return math.inf
        return min(
            (
                max(sequence.draft_budget, 0.0)
                for sequence in step.sequences
                if sequence.number not in chances
            ),
            default=math.inf,
        )

    def _affordable(
        self,
        step: _DraftStep,
        chances: dict[int, list[float]],
        lengths: dict[int, int],
        seconds: float,
    ) -> bool:
        """Return whether every sequence's budget covers what it is expected to lose."""
        if not self._ahead:
            return True
        longer = seconds / self._cost.seconds(step.rows) - 1
        for sequence in step.sequences:
            gained = sum(chances.get(sequence.number, ())[: lengths.get(sequence.number, 0)])
            if longer - gained > max(sequence.draft_budget, 0.0):
                return False
        return True

    def _could_pay(self, step: _DraftStep) -> bool:
        """Return whether drafts would pay if all were right and each sequence had as many.

        Checked first, because searching drafts for many sequences takes a tenth of a small model's step.
        """
        cost = self._cost
        plain_s = cost.seconds(step.rows)
        drafted = 1
        while drafted <= step.limit:
            seconds = cost.seconds(step.rows + drafted) + cost.wait_s
            if 1 + drafted / step.new_tokens > _MIN_GAIN * seconds / plain_s:
                return True
            drafted += max(1, drafted // 2)
        return False

    def _ask_draft_model(self, step: _DraftStep, plan: _DraftPlan) -> Drafts:
        """Return the draft model's drafts, and record the time that they took."""
        model = self._draft_model
        assert model is not None
        plain_token_s = self._cost.seconds(step.rows) / step.new_tokens
        drafting = [
            candidate for candidate in step.candidates if candidate.sequence.number in plan.lengths
        ]
        reading = [model.unread(sequence, drafts) for sequence, drafts, _ in drafting]
        requests = [
            model.request(sequence, drafts, plan.lengths[sequence.number], step.rows, plain_token_s)
            for sequence, drafts, _ in drafting
        ]
        started_s = time.perf_counter()
        answers = model.drafter.draft(requests)
        self.drafting_s = time.perf_counter() - started_s
        self._charged_s = model.observe(reading, answers, self.drafting_s, is_probe=plan.is_probe)
        if not any(answer.tokens for answer in answers):
            # The step becomes a plain one that started late.
            model.settle(-self._charged_s / plain_token_s)
        for (sequence, drafts, _), answer in zip(drafting, answers, strict=True):
            drafts.ngrams.withdraw()
            drafts.by_model = True
            drafts.stated = answer.chances
            drafts.model_read = 0
            if answer is not NO_DRAFT:
                drafts.model_read = sequence.known - drafts.model_start
        return {
            candidate.sequence.number: answer.tokens
            for candidate, answer in zip(drafting, answers, strict=True)
        }

    def _prepared(self, step: _DraftStep, lengths: dict[int, int]) -> bool:
        """Return whether the runner has prepared the step with drafts of these lengths."""
        if self._preparing is None:
            return True
        rows = [
            DecodeRow(
                sequence.number, sequence.launched, sequence.needs + lengths.get(sequence.number, 0)
            )
            for sequence in step.sequences
        ]
        masked = any(sequence.masked for sequence in step.sequences)
        return self._preparing.prepared(rows, masked=masked)

    # After a step

    def record(
        self, step: ScheduledStep, row: ScheduledRow, tokens: list[int], elapsed_s: float
    ) -> None:
        """Learn from a row that came back with `tokens`, in a step that took `elapsed_s`."""
        sequence = row.sequence
        drafts = sequence.drafts
        drafted = len(row.drafts)
        accepted = min(drafted, len(tokens) - 1)
        if drafts is not None:
            drafts.drafted += drafted
            drafts.accepted += accepted
            if drafts.stated:
                assert self._draft_model is not None
                self._draft_model.learn(drafts.stated[:drafted], accepted)
                drafts.stated = ()
                drafts.ngrams.append(tokens)
            else:
                drafts.by_model = drafts.by_model and not drafted
                drafts.ngrams.advance(tokens)
        if step.is_decode:
            # The time of a step with a prompt says nothing about the cost of drafts.
            self._settle(step, row, accepted, elapsed_s)

    def record_plain(self, sequence: Sequence, elapsed_s: float) -> None:
        """Count a token of a sequence in a step for which `may_draft` was False."""
        self.earn(sequence)
        if sequence.drafts is not None:
            sequence.drafts.spent_s += elapsed_s
            sequence.drafts.plain_s += elapsed_s

    def earn(self, sequence: Sequence) -> None:
        """Count a step of the sequence without drafts of any sequence."""
        budget = sequence.draft_budget
        sequence.draft_budget = max(budget, min(budget + _EARNED_PER_STEP, _MAX_EARNED))

    def _settle(
        self, step: ScheduledStep, row: ScheduledRow, accepted: int, elapsed_s: float
    ) -> None:
        """Add to the draft budget what the sequence gained or lost by the drafts."""
        sequence = row.sequence
        drafts = sequence.drafts
        extra = step.drafts + step.recomputed
        own = len(row.drafts) + row.recomputed
        plain_rows = max(step.width - extra, 1)
        plain_s = self._cost.seconds(plain_rows)
        if drafts is not None:
            drafts.spent_s += elapsed_s + step.drafting_s
            drafts.plain_s += plain_s * (1 + accepted) if own else elapsed_s
        if not extra:
            self.earn(sequence)
            if drafts is not None and drafts.uses_model and self._draft_model is not None:
                self._draft_model.earn(step)
            return
        # Smoothed costs rather than the time of this step: another program's load is not the drafts' fault.
        seconds = self._cost.seconds(step.width) + self._cost.wait_s
        charged_s = 0.0
        if step.drafts:
            charged_s = self._charged_s
        if drafts is not None and own and drafts.by_model and self._draft_model is not None:
            # Estimates of widths that are rarely seen are optimistic, so a longer time counts, within limits.
            seconds = max(seconds, min(elapsed_s, _MAX_OVER_ESTIMATE * seconds))
            lost = (seconds + charged_s) / plain_s - 1
            self._draft_model.settle(accepted - plain_rows * lost * own / extra)
            drafts.off = self._draft_model.off
            return
        lost = (seconds + charged_s) / plain_s - 1
        if not self._ahead:
            # The sequences with drafts pay for what all sequences lose.
            lost *= plain_rows * own / extra
        sequence.draft_budget = min(sequence.draft_budget + accepted - lost, _MAX_BUDGET)
        if drafts is not None and own:
            drafts.off = ""
            if sequence.draft_budget <= -_MAX_DEBT:
                drafts.off = (
                    f"drafts cost more than they save on this text: {drafts.accepted} of "
                    f"{drafts.drafted} tokens accepted"
                )


def _allowed(step: _DraftStep, drafts: Drafts) -> Drafts:
    """Return the parts of the drafts that the grammars allow, without empty ones."""
    for sequence, _, _ in step.candidates:
        draft = drafts.get(sequence.number, ())
        if draft and sequence.grammar_matcher is not None:
            drafts[sequence.number] = sequence.grammar_matcher.allowed_drafts(draft)
    return {number: draft for number, draft in drafts.items() if draft}
