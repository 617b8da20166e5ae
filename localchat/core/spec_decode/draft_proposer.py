"""Drafts of a draft model beside n-grams: before each step the one that is expected to bring more.

The draft model's guesses cost time of their own, which is measured with every draft and counted against the
tokens that they save. As n-gram drafts, they live on credit (ngram_proposer.py), here one credit for the
engine: how well a draft model fits is a matter of the two models. A useless one costs the first credit once
and 1 % from then on, for short drafts that show whether it still is. To know it cheaply, it first reads only
as many last tokens of a text as half the credit pays, and the whole text once it has earned what that costs.
Reading pays for itself over many drafts of an answer, so it does not count against the first of them alone.

Guesses are drawn with the same noise as the answer's tokens, so that the two models agree as often as their
distributions allow; verification is the one of all drafts, and the text is what it is without.
"""

import time
from collections.abc import Sequence
from typing import Protocol

from localchat.backend_api.drafter import Drafter
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

    def propose(self, limit: int, rows: int = 1, again: int = 0) -> tuple[int, ...]: ...

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


class DraftModel:
    """What an engine knows of its draft model: cost, acceptance, credit. Shared by all sequences."""

    def __init__(self, drafter: Drafter, cost: CostModel) -> None:
        self.drafter = drafter
        self.cost = cost
        self.token_s = drafter.token_s
        self.prompt_token_s = drafter.prompt_token_s
        self.credit = FIRST_CREDIT
        self.drafted = 0
        self.accepted = 0
        self.off = ""
        """Why it does not guess, in words; empty while it does."""
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

    def observe(self, read: int, tokens: int, seconds: float) -> None:
        """Learn the cost of drafted tokens from a draft of `tokens`, before which it read `read`."""
        reading = read * self.prompt_token_s
        if tokens and reading < seconds / 2:
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
                f"the draft model costs more than it saves: {self.accepted} of {self.drafted} tokens "
                "accepted"
            )
        elif self.off and net > 0:
            self.off = ""


class DraftProposer:
    """Proposer of one sequence with a draft model."""

    def __init__(
        self,
        seq: int,
        tokens: Sequence[int],
        sampling: SamplingParams,
        model: DraftModel,
        ngrams: NgramProposer,
        *,
        rewinds: bool = True,
    ) -> None:
        """seq: its number in the runner. tokens: the prompt."""
        self._seq, self._sampling = seq, sampling
        self._tokens = list(tokens)
        self._model, self._ngrams, self._rewinds = model, ngrams, rewinds
        self._begin = 0
        self._read = 0
        """Tokens that the draft model has read."""
        self._chances: tuple[float, ...] = ()
        self._draft_s = 0.0
        """Time of the last draft, until it is counted."""
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
        """None: a draft model is asked by `propose`."""
        return []

    def take(self, count: int) -> tuple[int, ...]:
        """Nothing; see `chances`."""
        return ()

    def charge(self, lost: float) -> None:
        """See NgramProposer."""
        self._ngrams.charge(lost)

    def propose(self, limit: int, rows: int = 1, again: int = 0) -> tuple[int, ...]:
        """See NgramProposer."""
        found = self._ngrams.propose(limit, rows, again)
        self._chances = ()
        count = self._worth(limit, rows, again, len(found))
        if not count:
            return found
        model = self._model
        seconds = model.cost.seconds
        each_s = seconds(rows) / max(rows - again, 1)
        reached, made = 1.0, 0

        def goes_on(stated: float) -> bool:
            nonlocal reached, made
            made += 1
            reached *= model.chance(stated)
            more_s = model.token_s + seconds(rows + made + 1) - seconds(rows + made)
            return reached * model.share * each_s > more_s

        text = self._tokens[self._begin :]
        unread = max(len(text) - self._read, 1)
        started_s = time.perf_counter()
        draft = model.drafter.draft(self._seq, text, self._begin, self._sampling, count, goes_on)
        taken_s = time.perf_counter() - started_s
        model.observe(unread, len(draft.tokens), taken_s)
        self._read = len(text)
        self._draft_s += taken_s
        if not draft.tokens:
            return found
        self._ngrams.withdraw()
        self._chances = draft.chances
        return draft.tokens

    def _worth(self, limit: int, rows: int, again: int, copied: int) -> int:
        """Tokens to draft, where the draft model is expected to bring more than plain steps and n-grams."""
        model, seconds = self._model, self._model.cost.seconds
        least = PROBE_CREDIT if model.off else 0.0
        if limit <= 0 or model.credit < least or not model.cost.has_samples():
            return 0
        own = max(rows - again, 1)
        best_rate = own / seconds(rows) * _WORTH
        if copied:
            best_rate = max(best_rate, self._ngrams.rate)
        self._widen(seconds(rows) / own)
        behind = max(len(self._tokens) - self._begin - self._read - 1, 0)
        unread = 1 + min(behind, WINDOW) / _READ_AHEAD
        reached, expected, redone, best = 1.0, float(own), 0.0, 0
        for count in range(1, limit + 1):
            expected += reached * model.share
            redone += reached * (1 - model.share) * count
            reached *= model.share
            step_s = seconds(rows + count)
            if not self._rewinds:
                step_s += redone * (step_s - seconds(rows)) / count
            rate = expected / (step_s + count * model.token_s + unread * model.prompt_token_s)
            if rate > best_rate:
                best, best_rate = count, rate
        if model.off:
            best = min(best, PROBE_TOKENS)
        # It may have become useful since: what plain steps earned pays for a look, where n-grams have nothing.
        if best or copied or model.credit < PROBE_CREDIT:
            return best
        always_right = (own + 1) / (seconds(rows + 1) + model.token_s)
        return 1 if always_right > best_rate else 0

    def _widen(self, each_s: float) -> None:
        """Choose where the draft model's text begins: near the end, or at 0 once that was earned."""
        model, length = self._model, len(self._tokens)
        affordable = int(model.credit / 2 * each_s / max(model.prompt_token_s, 1e-9))
        window = max(WINDOW, affordable)
        # After a long pause, the end alone is cheaper than all that it missed.
        if not self._read or length - self._begin - self._read > window:
            self._begin, self._read = max(0, length - window), 0
        cost = length * model.prompt_token_s / each_s
        if self._begin and model.credit > cost + FIRST_CREDIT:
            self._begin = self._read = 0

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
        self._charge(
            drafted if mine else 0, accepted, max(rows, drafted + again + 1), seconds, again
        )
        self._by_model, self._chances, self._draft_s = mine, (), 0.0

    def _charge(self, drafted: int, accepted: int, rows: int, seconds: float, again: int) -> None:
        model = self._model
        self._drafted += drafted
        self._accepted += accepted
        model.drafted += drafted
        model.accepted += accepted
        without = max(rows - drafted - again, 1)
        plain = model.cost.seconds(without)
        self._plain_s += plain * (1 + accepted)
        self._spent_s += seconds + self._draft_s
        cost = (model.cost.seconds(rows) + self._draft_s) / plain - 1
        model.charge(accepted - without * cost)

    def append(self, tokens: Sequence[int]) -> None:
        """See NgramProposer."""
        self._tokens.extend(tokens)
        self._ngrams.append(tokens)
