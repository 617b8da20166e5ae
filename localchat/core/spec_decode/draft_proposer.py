"""Drafts of a draft model, or of a model's own prediction heads, beside n-grams.

Before each step the planner takes those that are expected to bring more (draft_planner.py). The draft model's
guesses cost time of their own, which is measured with every draft and counted against the tokens that they
save. As n-gram drafts, they live on credit (draft_credit.py), here one credit for the engine: how well a draft
model fits is a matter of the two models. A useless one costs the first credit once and less than 1 % from then
on, for short drafts that show whether it still is. To know it cheaply, it first reads only as many last tokens
of a text as half the credit pays, and the whole text once it has earned what that costs.

The first readings of any cost may be far too high: kernels are compiled, or launched one by one. So they are
neither charged in full nor believed: lengths that would pay if they were wrong are tried until there are more.

Guesses are drawn with the same noise as the answer's tokens, so that the two models agree as often as their
distributions allow; verification is the one of all drafts, and the text is what it is without.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from localchat.backend_api.drafter import NO_DRAFT, Draft, DraftAsk, Drafter
from localchat.backend_api.interface import SamplingParams
from localchat.core.spec_decode.ngram_proposer import NgramProposer
from localchat.core.spec_decode.step_cost import CostModel, Readings

FIRST_CREDIT = 2.0
PLAIN_CREDIT = 0.0075
MOST_CREDIT = 64.0
PROBE_CREDIT = 1.0
PROBE_TOKENS = 2
WINDOW = 16
"""Tokens of a text from which a draft model can guess at all."""
_WORTH = 1.02
_HOPED = 1.05
"""What another length must promise over the best known one, if steps so wide are cheaper than seen."""
_MOST_STEPS = 8
"""Plain steps that a draft costs at most."""
_CLASSES = 8
_MOST_WEIGHT = 60.0
_SHARE_WEIGHT = 40.0
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
    fresh: bool
    """The draft model has next to nothing to read first."""
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
        self._guessing, self._reading = Readings(), Readings()
        self.token_s = self._guessing.add(drafter.token_s)
        self.prompt_token_s = self._reading.add(drafter.prompt_token_s)
        self.credit = FIRST_CREDIT
        self.drafted = 0
        self.accepted = 0
        self.off = ""
        """Why it does not guess, in words; empty while it does."""
        self._pays = True
        """Whether drafts were expected to, when last asked."""
        self._tried = [1.0] * _CLASSES
        self._taken = [(place + 0.5) / _CLASSES for place in range(_CLASSES)]
        self._all_tried, self.share = 4.0, _PRIOR

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
        if step.limit <= 0 or self.credit < (PROBE_CREDIT if self.off else 0.0):
            return 0
        best, rate = self._best(step, self.cost.seconds)
        self._pays = best > 0
        if self.off:
            best = min(best, PROBE_TOKENS)
        # It may have become useful since, or cost less than the first readings told: what plain steps earned
        # pays for a look, where n-grams have nothing. Several in a row, as it reads before the first alone.
        if step.rate or self.credit < (PROBE_CREDIT if step.fresh else FIRST_CREDIT):
            return best
        hoped, better = self._best(step, self.cost.hoped)
        if better > _HOPED * rate and not self.off:
            return hoped
        return best or 1

    def _best(self, step: DraftedStep, seconds: Callable[[int], float]) -> tuple[int, float]:
        """Tokens to draft for each sequence, 0 where none pay, and the tokens a second that are expected.

        `seconds`: of a step by its rows."""
        rows, asking, share = step.rows, step.asking, self.share
        own, plain_s = max(rows - step.again, 1), seconds(rows)
        token_s = self.token_s_of(asking)
        best, best_rate = 0, max(own / plain_s * _WORTH, step.rate)
        reached, expected, redone = 1.0, float(own), 0.0
        for count in range(1, step.limit + 1):
            expected += asking * reached * share
            redone += reached * (1 - share) * count
            reached *= share
            step_s = max(seconds(rows + asking * count), plain_s)
            if not self._rewinds:
                step_s += redone * (step_s - plain_s) / count
            rate = expected / (step_s + self.cost.wait_s + count * token_s)
            if rate > best_rate:
                best, best_rate = count, rate
        return best, best_rate

    def token_s_of(self, asking: int) -> float:
        """Seconds of one drafted token for each of so many sequences."""
        return self.token_s * (1 if self.drafter.together else asking)

    def observe(self, read: int, tokens: int, seconds: float) -> float:
        """Learn the cost of drafted tokens from `tokens` one after the other, before which it read `read`, but
        for the few that texts got since their last drafts. Returns what such a draft costs.

        Many are read in a step of their own, which a GPU may be given kernel by kernel: it says nothing of a
        drafted token's cost. While there are few readings it costs a plain step at most, and a few later:
        one that was slow by chance would end all drafts."""
        if read:
            each_s = max(seconds - tokens * self.token_s, 0.0) / read
            self.prompt_token_s = self._reading.add(each_s)
        elif tokens:
            self.token_s = self._guessing.add(seconds / tokens)
        readings = self._reading if read else self._guessing
        most_s = self.cost.seconds(1) * (1 if readings.few else _MOST_STEPS)
        return min(seconds if read else tokens * self.token_s, most_s)

    def earn(self) -> None:
        """A plain step's credit."""
        self.credit = max(self.credit, min(self.credit + PLAIN_CREDIT, FIRST_CREDIT))

    def charge(self, net: float) -> None:
        """Add what a draft saved, less what it cost, in tokens of plain steps."""
        self.credit = min(self.credit + net, MOST_CREDIT)
        if net <= 0 and (self.credit < 0 or not self._pays) and not self.off:
            self.off = (
                f"drafts of {self.drafter.name} cost more than they save: {self.accepted} of "
                f"{self.drafted} tokens accepted"
            )
        elif self.off and net > 0:
            self.off = ""


class DraftProposer:
    """Proposer of one sequence with a draft model: as one of n-grams, and by `widen`, `ask` and `answer`."""

    def __init__(
        self,
        seq: int,
        tokens: Sequence[int],
        sampling: SamplingParams,
        model: DraftModel,
        ngrams: NgramProposer,
    ) -> None:
        """seq: its number in the runner. tokens: the prompt."""
        self._seq, self._sampling = seq, sampling
        self._tokens = list(tokens)
        self._model, self._ngrams = model, ngrams
        self._begin = 0
        self._read = 0
        """Tokens that the draft model has read."""
        self._chances: tuple[float, ...] = ()
        self._draft_s = self._own_s = 0.0
        """Time of the last draft, until it is counted, and this sequence's part as it is charged."""
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
        return (plain_s + self._plain_s) / spent_s if self.drafted and spent_s else None

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

    def ask(self, rows: int, again: int, count: int) -> DraftAsk:
        """Ask for `count` tokens of a step for which `widen` was called; the rest as in DraftedStep."""
        model, made, reached = self._model, 0, 1.0
        seconds = model.cost.hoped
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
        """Take what the draft model answered, after `drafted_s`. `own_s`: this sequence's part as it is
        charged."""
        self._read = 0 if draft is NO_DRAFT else len(self._tokens) - self._begin
        self._draft_s += drafted_s
        self._own_s += own_s
        self._ngrams.withdraw()
        self._chances = draft.chances
        return draft.tokens

    @property
    def behind(self) -> int:
        """Tokens that the draft model has to read before it can guess."""
        return max(len(self._tokens) - self._begin - self._read, 1)

    def widen(self, each_s: float) -> None:
        """Choose where the draft model's text begins: near the end, or as early as possible once that was
        earned. `each_s`: time of a token without drafts."""
        model, length = self._model, len(self._tokens)
        earliest = model.drafter.earliest(self._seq, length)
        affordable = int(model.credit / 2 * each_s / max(model.prompt_token_s, 1e-9))
        window = max(WINDOW, affordable)
        # After a long pause, the end alone is cheaper than all that it missed.
        behind = length - self._begin - self._read
        if not self._read or behind > window or self._begin < earliest:
            self._begin, self._read = max(earliest, length - window), 0
        cost = (length - earliest) * model.prompt_token_s / each_s
        if self._begin > earliest and model.credit > cost + FIRST_CREDIT:
            self._begin, self._read = earliest, 0

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
        self._by_model, self._chances = mine, ()
        self._draft_s = self._own_s = 0.0

    def _charge(
        self, drafted: int, accepted: int, rows: int, seconds: float, again: int, of_step: int
    ) -> None:
        """Set what drafts saved against what they cost: their own time, and a wider step for all streams."""
        model, cost = self._model, self._model.cost
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
        longer = (cost.hoped(rows) + cost.wait_s) / plain - 1
        model.charge(accepted - without * (longer * part + self._own_s / plain))

    def append(self, tokens: Sequence[int]) -> None:
        """See NgramProposer."""
        self._tokens.extend(tokens)
        self._ngrams.append(tokens)
