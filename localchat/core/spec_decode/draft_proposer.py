"""Drafts of a draft model, or of a model's own prediction heads, beside n-grams.

Before each step the planner takes those that are expected to bring more (draft_planner.py). The draft model's
guesses cost time of their own, which is measured with every draft and counted against the tokens that they
save. As n-gram drafts, they live on credit (draft_credit.py), here one credit for the engine: how well a draft
model fits is a matter of the two models. A useless one costs the first credit once and 1 % from then on, for
short drafts that show whether it still is. To know it cheaply, it first reads only as many last tokens of a
text as half the credit pays, and the whole text once it has earned what that costs. Reading pays for itself
over many drafts of an answer, so it does not count against the first of them alone.

Guesses are drawn with the same noise as the answer's tokens, so that the two models agree as often as their
distributions allow; verification is the one of all drafts, and the text is what it is without.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from localchat.backend_api.drafter import NO_DRAFT, Draft, DraftAsk, Drafter
from localchat.backend_api.interface import SamplingParams
from localchat.core.spec_decode.ngram_proposer import NgramProposer
from localchat.core.spec_decode.step_cost import CostModel

FIRST_CREDIT = 2.0
PLAIN_CREDIT = 0.01
MOST_CREDIT = 64.0
PROBE_CREDIT = 1.0
PROBE_TOKENS = 2
WINDOW = 16
"""Tokens of a text from which a draft model can guess at all."""
_WORTH = 1.02
_FOLLOW = 0.2
_CLASSES = 8
_MOST_WEIGHT = 60.0
_SHARE_WEIGHT = 20.0
_READ_AHEAD = 16
"""Drafts over which the reading of a text is spread."""
_PRIOR = 0.7


class Proposer(Protocol):
    """Drafts of one sequence; see NgramProposer for each."""

    @property
    def drafted(self) -> int: ...

    @property
    def accepted(self) -> int: ...

    @property
    def off(self) -> str: ...

    @property
    def speedup(self) -> float | None: ...

    def fork(self) -> "Proposer": ...

    def index(self) -> bool: ...

    def chances(self, limit: int) -> list[float]: ...

    def take(self, count: int) -> tuple[int, ...]: ...

    def charge(self, lost: float) -> None: ...

    def advance(
        self,
        tokens: Sequence[int],
        drafted: int = 0,
        rows: int = 0,
        seconds: float = 0.0,
        again: int = 0,
        of_step: int = 0,
    ) -> None: ...

    def append(self, tokens: Sequence[int]) -> None: ...


class DraftedStep(NamedTuple):
    """A step that some of its sequences may have drafts of the draft model in."""

    rows: int
    """Its tokens without drafts, of all sequences."""
    again: int
    """How many of them are computed a second time."""
    asking: int
    """Sequences that would have drafts."""
    limit: int
    """Most drafted tokens of each."""
    unread: float
    """Tokens that the draft model reads first, as far as they count against this step."""
    rate: float
    """Tokens a second that the drafts must bring more than: those of n-grams; 0: there are none."""


class DraftModel:
    """What an engine knows of its draft model: cost, acceptance, credit. Shared by all sequences."""

    def __init__(self, drafter: Drafter, cost: CostModel, *, rewinds: bool = True) -> None:
        """`rewinds`: rejected drafts are truncated; otherwise the accepted ones before them are computed
        again."""
        self.drafter = drafter
        self.cost = cost
        self._rewinds = rewinds
        self.token_s = drafter.token_s
        self.prompt_token_s = drafter.prompt_token_s
        self.credit = FIRST_CREDIT
        self.drafted = 0
        self.accepted = 0
        self.off = ""
        """Why it does not guess, in words; empty while it does."""
        self.trusted = True
        """Whether the drafts last asked for are expected to pay; otherwise they show whether they would."""
        self._tried = [1.0] * _CLASSES
        self._taken = [(place + 0.5) / _CLASSES for place in range(_CLASSES)]
        self._all_tried = 4.0
        self.share = _PRIOR

    def chance(self, stated: float) -> float:
        """Probability of acceptance of a token to which the draft model gave the probability `stated`."""
        place = min(int(stated * _CLASSES), _CLASSES - 1)
        return self._taken[place] / self._tried[place]

    def learn(self, stated: float, taken: bool) -> None:
        """Record whether a drafted token was accepted."""
        place = min(int(stated * _CLASSES), _CLASSES - 1)
        if self._tried[place] > _MOST_WEIGHT:
            self._tried[place] *= 0.5
            self._taken[place] *= 0.5
        self._tried[place] += 1
        self._taken[place] += taken
        self._all_tried = min(self._all_tried + 1, _SHARE_WEIGHT)
        self.share += (taken - self.share) / self._all_tried

    def worth(self, step: DraftedStep) -> int:
        """Tokens to draft for each sequence, if that is expected to bring more than plain steps and n-grams."""
        seconds = self.cost.seconds
        wait_s = self.cost.wait_s
        least = PROBE_CREDIT if self.off else 0.0
        if step.limit <= 0 or self.credit < least or not self.cost.has_samples():
            return 0
        rows = step.rows
        asking = step.asking
        own = max(rows - step.again, 1)
        plain_s = seconds(rows)
        token_s = self.token_s_of(asking)
        best_rate = max(own / plain_s * _WORTH, step.rate)
        reached = 1.0
        expected = float(own)
        redone = 0.0
        best = 0
        for count in range(1, step.limit + 1):
            expected += asking * reached * self.share
            redone += reached * (1 - self.share) * count
            reached *= self.share
            step_s = seconds(rows + asking * count)
            if not self._rewinds:
                step_s += redone * (step_s - plain_s) / count
            drafted_s = count * token_s + step.unread * self.prompt_token_s
            rate = expected / (step_s + wait_s + drafted_s)
            if rate > best_rate:
                best = count
                best_rate = rate
        self.trusted = best > 0 and not self.off
        if self.off:
            best = min(best, PROBE_TOKENS)
        # It may have become useful since: what plain steps earned pays for a look, where n-grams have nothing.
        if best or step.rate or self.credit < PROBE_CREDIT:
            return best
        always_right = (own + asking) / (seconds(rows + asking) + wait_s + token_s)
        return 1 if always_right > best_rate else 0

    def token_s_of(self, asking: int) -> float:
        """Seconds of one drafted token for each of so many sequences."""
        return self.token_s * (1 if self.drafter.together else asking)

    def observe(self, read: int, tokens: int, seconds: float) -> None:
        """Learn the cost of drafted tokens from `tokens` one after the other, before which it read `read`.

        Many are read in a step of their own, which a GPU may be given kernel by kernel: it says nothing of a
        drafted token's cost."""
        reading = read * self.prompt_token_s
        if tokens and read < WINDOW and reading < seconds / 2:
            self.token_s += _FOLLOW * ((seconds - reading) / tokens - self.token_s)
        elif read:
            each = max(seconds - tokens * self.token_s, 0.0) / read
            self.prompt_token_s += _FOLLOW * (each - self.prompt_token_s)

    def earn(self) -> None:
        """A plain step's credit."""
        self.credit = max(self.credit, min(self.credit + PLAIN_CREDIT, FIRST_CREDIT))

    def charge(self, net: float) -> None:
        """Add what a draft saved, less what it cost, in tokens of plain steps."""
        self.credit = min(self.credit + net, MOST_CREDIT)
        if self.credit < 0 and not self.off:
            self.off = (
                f"drafts of {self.drafter.name} cost more than they save: {self.accepted} of "
                f"{self.drafted} tokens accepted"
            )
        elif self.off and net > 0:
            self.off = ""


class DraftProposer:
    """Proposer of one sequence with a draft model: as one of n-grams, and by `unread`, `ask` and `answer`."""

    def __init__(
        self,
        seq: int,
        tokens: Sequence[int],
        sampling: SamplingParams,
        model: DraftModel,
        ngrams: NgramProposer,
    ) -> None:
        """seq: its number in the runner. tokens: the prompt."""
        self._seq = seq
        self._sampling = sampling
        self._tokens = list(tokens)
        self._model = model
        self._ngrams = ngrams
        self._begin = 0
        self._read = 0
        """Tokens that the draft model has read."""
        self._chances: tuple[float, ...] = ()
        self._draft_s = self._own_s = 0.0
        """Time of the last draft, until it is counted, and this sequence's part of it."""
        self._by_model = False
        self._drafted = self._accepted = 0
        self._plain_s = self._spent_s = 0.0

    @property
    def drafted(self) -> int:
        """Drafted tokens of both sources."""
        return self._drafted + self._ngrams.drafted

    @property
    def accepted(self) -> int:
        """Those that were right."""
        return self._accepted + self._ngrams.accepted

    @property
    def off(self) -> str:
        """Why there are no drafts of the draft model, in words."""
        return self._model.off

    @property
    def speedup(self) -> float | None:
        """Net gain so far, the draft model's own time included; None before the first draft."""
        plain_s, spent_s = self._ngrams.times_s
        spent_s += self._spent_s
        if self.drafted and spent_s:
            return (plain_s + self._plain_s) / spent_s
        return None

    def fork(self) -> NgramProposer:
        """The same text for another choice, which has drafts by n-grams: a draft model's time is each
        choice's own."""
        return self._ngrams.fork()

    def index(self) -> bool:
        """See NgramProposer."""
        return self._ngrams.index()

    def chances(self, limit: int) -> list[float]:
        """Those of n-grams; see NgramProposer."""
        self._chances = ()
        return self._ngrams.chances(limit)

    def take(self, count: int) -> tuple[int, ...]:
        """A draft by n-grams; see NgramProposer."""
        return self._ngrams.take(count)

    def charge(self, lost: float) -> None:
        """See NgramProposer."""
        self._ngrams.charge(lost)

    # ------------------------------------------------------------------------ the draft model

    def unread(self, each_s: float) -> float:
        """Tokens of the text that the draft model would read for the next draft, as far as they count against
        it. `each_s`: time of a token without drafts."""
        self._widen(each_s)
        behind = max(len(self._tokens) - self._begin - self._read - 1, 0)
        return 1 + min(behind, WINDOW) / _READ_AHEAD

    def ask(self, rows: int, again: int, count: int) -> DraftAsk:
        """Ask for `count` tokens of a step for which `unread` was called; the rest as in DraftedStep."""
        model = self._model
        made = 0
        reached = 1.0
        seconds = model.cost.seconds
        each_s = seconds(rows) / max(rows - again, 1)

        def goes_on(stated: float) -> bool:
            nonlocal reached, made
            made += 1
            reached *= model.chance(stated)
            more_s = model.token_s + seconds(rows + made + 1) - seconds(rows + made)
            return reached * model.share * each_s > more_s

        text = self._tokens[self._begin :]
        return DraftAsk(self._seq, text, self._begin, self._sampling, count, goes_on)

    def answer(self, draft: Draft, drafted_s: float, own_s: float) -> tuple[int, ...]:
        """Take what the draft model answered, after `drafted_s`, of which `own_s` for this sequence."""
        held = draft is not NO_DRAFT
        model = self._model
        usual_s = len(draft.tokens) * model.token_s + self.behind * model.prompt_token_s
        if model.trusted and self.behind >= WINDOW and own_s > usual_s:
            # Reading for the first time, kernel by kernel on a GPU, pays for itself over many drafts.
            own_s = usual_s + (own_s - usual_s) / _READ_AHEAD
        self._read = len(self._tokens) - self._begin if held else 0
        self._draft_s += drafted_s
        self._own_s += own_s
        self._ngrams.withdraw()
        self._chances = draft.chances
        return draft.tokens

    @property
    def behind(self) -> int:
        """Tokens that the draft model has to read before it can guess."""
        return max(len(self._tokens) - self._begin - self._read, 1)

    def _widen(self, each_s: float) -> None:
        """Choose where the draft model's text begins: near the end, or as early as possible once that was
        earned."""
        model = self._model
        length = len(self._tokens)
        earliest = model.drafter.earliest(self._seq, length)
        affordable = int(model.credit / 2 * each_s / max(model.prompt_token_s, 1e-9))
        window = max(WINDOW, affordable)
        # After a long pause, the end alone is cheaper than all that it missed.
        behind = length - self._begin - self._read
        if not self._read or behind > window or self._begin < earliest:
            self._begin = max(earliest, length - window)
            self._read = 0
        cost = (length - earliest) * model.prompt_token_s / each_s
        if self._begin > earliest and model.credit > cost + FIRST_CREDIT:
            self._begin = earliest
            self._read = 0

    def advance(
        self,
        tokens: Sequence[int],
        drafted: int = 0,
        rows: int = 0,
        seconds: float = 0.0,
        again: int = 0,
        of_step: int = 0,
    ) -> None:
        """See NgramProposer."""
        self._tokens.extend(tokens)
        mine = bool(self._chances and drafted)
        if not mine and not self._draft_s and not (again and self._by_model):
            self._by_model = self._by_model and not drafted
            self._ngrams.advance(tokens, drafted, rows, seconds, again, of_step)
            if not drafted:
                self._model.earn()
            return
        self._ngrams.append(tokens)
        accepted = min(drafted, len(tokens) - 1) if mine else 0
        for place, stated in enumerate(self._chances[: min(accepted + 1, drafted)]):
            self._model.learn(stated, place < accepted)
        own = drafted if mine else 0
        self._charge(
            own, accepted, max(rows, drafted + again + 1), seconds, again, max(of_step, own)
        )
        self._by_model = mine
        self._chances = ()
        self._draft_s = self._own_s = 0.0

    def _charge(
        self, drafted: int, accepted: int, rows: int, seconds: float, again: int, of_step: int
    ) -> None:
        """Set what drafts saved against what they cost: their own time, and a wider step for all streams."""
        model = self._model
        cost = self._model.cost
        self._drafted += drafted
        self._accepted += accepted
        model.drafted += drafted
        model.accepted += accepted
        without = max(rows - of_step - again, 1)
        plain = cost.seconds(without)
        self._plain_s += plain * (1 + accepted)
        self._spent_s += seconds + self._draft_s
        # All streams of the step wait for all its drafts, and only this one has its tokens.
        part = (drafted + again) / (of_step + again) if of_step + again else 1.0
        longer = (cost.seconds(rows) + cost.wait_s) / plain - 1
        model.charge(accepted - without * (longer * part + self._own_s / plain))

    def append(self, tokens: Sequence[int]) -> None:
        """See NgramProposer."""
        self._tokens.extend(tokens)
        self._ngrams.append(tokens)
