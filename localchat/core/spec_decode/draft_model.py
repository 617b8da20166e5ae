"""Draft model: drafts of a small model, or of a model's own prediction heads.

Its drafts take time, which is measured with every draft. Acceptance is learned for the engine as a whole,
because it depends on how well the two models agree. To find that out cheaply, the draft model first reads only
the last tokens of a text, and reads the whole text once the sequence's draft budget pays for it.

A draft model that does not pay is paused. Until its next try, it stores nothing about new tokens and plans no
drafts, so it costs next to nothing. Each try that fails doubles the next pause.

The draft model samples with the same noise as the model, so that the two agree as often as their distributions
allow. Verification accepts exact matches only, so drafts never change the text.
"""

from localchat.backend_api.drafter import Draft, DraftAsk, Drafter
from localchat.core.scheduler.step_builder import ScheduledStep
from localchat.core.sequence import Sequence
from localchat.core.spec_decode.acceptance import AcceptanceRates
from localchat.core.spec_decode.sequence_drafts import SequenceDrafts
from localchat.core.spec_decode.step_cost import CostModel

WINDOW_TOKENS = 16
"""Shortest text from which a draft model can draft at all."""
_FIRST_BUDGET = 2.0
PROBE_BUDGET = 1.0
"""Budget from which one token is drafted even if none is expected to pay."""
_RETRY_BUDGET = 1.5
"""Budget after a pause. It pays for two or three probes that fail."""
_EARNED_PER_STEP = 0.008
_MAX_BUDGET = 64.0
_FOLLOW = 0.2
_PRIOR_RATE = 0.7
_CLASSES = 8
"""Classes of the probability that the draft model states for a token."""
_DRAFTS_PER_READING = 16
"""Number of drafts that share the cost of reading a text."""
_FIRST_STEPS = 8
"""Plain steps before the first draft. The first ones are slow, so drafts would look too cheap beside them."""
_FIRST_PAUSE = 64
_LONGEST_PAUSE = 200
"""Plain steps of a pause. A text on which drafts become useful must not wait for long."""
_MIN_CHANCE = 0.02
"""Tokens that are less likely to be accepted are not planned."""


class DraftModel:
    """Cost and acceptance of an engine's draft model."""

    def __init__(self, drafter: Drafter, cost: CostModel) -> None:
        self.drafter = drafter
        self.token_s = drafter.token_s
        self.prompt_token_s = drafter.prompt_token_s
        self.budget = _FIRST_BUDGET
        """Plain steps that the engine may still lose to drafts of the draft model."""
        self.off = ""
        """Reason why the draft model does not draft. Empty while it does."""
        self.drafted = 0
        self.accepted = 0
        self.cost = cost
        self._pause_left = _FIRST_STEPS
        """Plain steps before the next try. 0 while not paused."""
        self._counted_step: ScheduledStep | None = None
        """Last step of a pause, which counts once for all its rows."""
        self._next_pause = _FIRST_PAUSE
        self._try_failed = False
        """Drafts since the last pause used up the budget."""
        self._by_token = AcceptanceRates((_PRIOR_RATE,), prior_tokens=4, memory_tokens=20)
        self._by_stated = AcceptanceRates(
            [(index + 0.5) / _CLASSES for index in range(_CLASSES)],
            prior_tokens=1,
            memory_tokens=40,
        )

    @property
    def acceptance(self) -> float:
        """Probability that a drafted token is accepted."""
        return self._by_token.rate(0)

    def learn(self, stated: tuple[float, ...], accepted: int) -> None:
        """Record that the first `accepted` of a draft's tokens were right."""
        self.drafted += len(stated)
        self.accepted += accepted
        # Tokens after the first wrong one were never compared with the model's.
        for index, probability in enumerate(stated[: accepted + 1]):
            right = index < accepted
            self._by_token.learn(0, right)
            self._by_stated.learn(_class_of(probability), right)

    def chances(self, limit: int) -> list[float]:
        """Return the probabilities that the first 1 to `limit` drafted tokens are all accepted.

        Ends early where they become negligible.
        """
        chances: list[float] = []
        chance = self.acceptance
        while len(chances) < limit and (chance >= _MIN_CHANCE or not chances):
            chances.append(chance)
            chance *= self.acceptance
        return chances

    def drafting_s(self, longest: int, drafted: int) -> float:
        """Return the time for `drafted` tokens of several sequences, `longest` of one of them."""
        return self.token_s * (longest if self.drafter.together else drafted)

    def observe(
        self, reading: list[int], drafts: list[Draft], seconds: float, *, is_probe: bool
    ) -> float:
        """Learn from the time that drafts took. Return the part of it that counts against their step.

        `reading`: tokens that the draft model read for each draft. A GPU may read a long text kernel by kernel.
        That says nothing about the cost of a drafted token, and pays off over many drafts.
        """
        lengths = [len(draft.tokens) for draft in drafts]
        drafted = max(lengths) if self.drafter.together else sum(lengths)
        read = sum(reading)
        reading_s = read * self.prompt_token_s
        if drafted and read < WINDOW_TOKENS and reading_s < seconds / 2:
            self.token_s += _FOLLOW * ((seconds - reading_s) / drafted - self.token_s)
        elif read:
            token_s = max(seconds - drafted * self.token_s, 0.0) / read
            self.prompt_token_s += _FOLLOW * (token_s - self.prompt_token_s)
        drafting_s = drafted * self.token_s
        if is_probe or max(reading) < WINDOW_TOKENS or seconds <= drafting_s:
            return seconds
        return drafting_s + (seconds - drafting_s) / _DRAFTS_PER_READING

    @property
    def paused(self) -> bool:
        """Whether no drafts are planned."""
        return self._pause_left > 0

    def pause(self) -> None:
        """Plan no drafts for a while, and longer if the last try failed."""
        self._pause_left = self._next_pause
        if self._try_failed:
            self._next_pause = min(2 * self._next_pause, _LONGEST_PAUSE)
            self._try_failed = False
        self.drafter.active = False

    def earn(self, step: ScheduledStep) -> None:
        """Count a row of a step without drafts."""
        limit = _FIRST_BUDGET
        if self.paused:
            limit = _RETRY_BUDGET
        self.budget = max(self.budget, min(self.budget + _EARNED_PER_STEP, limit))
        if not self.paused or step is self._counted_step:
            return
        self._counted_step = step
        # The drafter needs the last tokens of each text before the next try.
        self.drafter.active = self._pause_left <= WINDOW_TOKENS and self.budget >= PROBE_BUDGET
        if self.drafter.active or self._pause_left > WINDOW_TOKENS:
            self._pause_left -= 1

    def settle(self, saved: float) -> None:
        """Count the plain steps that a draft saved. Negative: it cost more than it saved."""
        self.budget = min(self.budget + saved, _MAX_BUDGET)
        if saved > 0:
            self.off = ""
            if self.budget >= _FIRST_BUDGET:
                self._next_pause = _FIRST_PAUSE
        elif self.budget < PROBE_BUDGET:
            self._try_failed = True
            self.off = (
                f"drafts of {self.drafter.name} cost more than they save: {self.accepted} of "
                f"{self.drafted} tokens accepted"
            )

    def unread(self, sequence: Sequence, drafts: SequenceDrafts) -> int:
        """Return the number of tokens that the draft model reads before its next draft."""
        return max(sequence.known - drafts.model_start - drafts.model_read, 1)

    def choose_window(
        self, sequence: Sequence, drafts: SequenceDrafts, plain_token_s: float
    ) -> None:
        """Choose where the text for the draft model starts. `plain_token_s`: worth of a token in the budget.

        It starts near the end, or at the first possible position once the draft budget pays for that.
        """
        length = sequence.known
        earliest = self.drafter.earliest(sequence.number, length)
        affordable_s = self.budget / 2 * plain_token_s
        window = max(WINDOW_TOKENS, int(affordable_s / max(self.prompt_token_s, 1e-9)))
        # After a long pause, the end of the text costs less than everything that was missed.
        if (
            not drafts.model_read
            or drafts.model_start < earliest
            or length - drafts.model_start - drafts.model_read > window
        ):
            drafts.model_start = max(earliest, length - window)
            drafts.model_read = 0
        whole_text = (length - earliest) * self.prompt_token_s / plain_token_s
        if drafts.model_start > earliest and self.budget > whole_text + 2:
            drafts.model_start = earliest
            drafts.model_read = 0

    def reading_tokens(self, sequence: Sequence, drafts: SequenceDrafts) -> float:
        """Return the tokens of the reading that count against the next draft alone."""
        behind = self.unread(sequence, drafts) - 1
        return 1 + min(behind, WINDOW_TOKENS) / _DRAFTS_PER_READING

    def request(
        self,
        sequence: Sequence,
        drafts: SequenceDrafts,
        limit: int,
        rows: int,
        plain_token_s: float,
    ) -> DraftAsk:
        """Build the request for a draft of `limit` tokens. `rows`: tokens of the step without drafts."""
        drafted = 0
        reached = 1.0
        seconds = self.cost.seconds

        def goes_on(stated: float) -> bool:
            nonlocal drafted, reached
            drafted += 1
            reached *= self._by_stated.rate(_class_of(stated))
            more_s = self.token_s + seconds(rows + drafted + 1) - seconds(rows + drafted)
            return reached * self.acceptance * plain_token_s > more_s

        text = sequence.tokens[drafts.model_start :]
        return DraftAsk(
            sequence.number, text, drafts.model_start, sequence.sampling, limit, goes_on
        )


def _class_of(stated: float) -> int:
    return min(int(stated * _CLASSES), _CLASSES - 1)
