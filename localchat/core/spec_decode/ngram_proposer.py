"""N-gram proposer: drafts without a draft model, from what followed the last tokens earlier in the text.

Source: the longest match in the sequence itself or in earlier text of the same salt (ngram_index.py), the
majority where several match equally long. After a long copy that ends in a difference it also searches near
the place where the copy ended, with shorter matches: a file with small edits is found again at once.

Length: each drafted token has a probability of acceptance, learned by the length of the match that led to
it; a draft is as long as the expected tokens per second rise (draft_lengths.py).

Credit: a text whose drafts do not pay has none for a while (draft_credit.py).

Ideas: counts and path probabilities from SuffixDecoding (Oliaro et al. 2025), windows that follow accepted
tokens from exllamav3; the credit against measured plain steps is ours. Drafts are point masses, so no
proposal changes the text.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from localchat.core.spec_decode.draft_credit import DraftCredit, DraftFund
from localchat.core.spec_decode.draft_lengths import best_lengths
from localchat.core.spec_decode.ngram_index import LONGEST, SPAN, NgramIndex
from localchat.core.spec_decode.step_cost import CostModel

PROBE_TOKENS = 2
_LEAST_CHANCE = 0.02
"""Tokens that are less likely to be accepted are not drafted."""
_MOST_SOURCES = 12
_NEAR_TOKENS = 64
_LONG_COPY = 8
_NEAR_IS_WORTH = 6

_LENGTHS = (0, 1, 2, 3, 4, 5, 7, 10, 16, LONGEST)
# Prior acceptance by the length of the match: anywhere, and near the place that was copied last.
_ANYWHERE = (0.1, 0.1, 0.2, 0.35, 0.5, 0.6, 0.75, 0.87, 0.95, 0.985)
_NEAR = (0.4, 0.45, 0.65, 0.75, 0.85, 0.9, 0.93, 0.96, 0.97, 0.985)
_PRIOR_WEIGHT = 3.0
_MAX_WEIGHT = 40.0


class AcceptanceRates:
    """Acceptance of drafted tokens by the length of their match, as Beta counts.

    The counts forget, so that a change of subject shows within tens of tokens.
    """

    def __init__(self) -> None:
        priors = (*_ANYWHERE, *_NEAR)
        self._tried = [_PRIOR_WEIGHT] * len(priors)
        self._taken = [_PRIOR_WEIGHT * p for p in priors]

    def kind(self, length: int, near: bool) -> int:
        """Row of the table for a match of `length` tokens."""
        return bisect_right(_LENGTHS, length) - 1 + (len(_LENGTHS) if near else 0)

    def chance(self, kind: int) -> float:
        """Probability that a token drafted from a match of this kind is accepted."""
        return self._taken[kind] / self._tried[kind]

    def learn(self, kind: int, taken: bool) -> None:
        """Record whether one drafted token was accepted."""
        if self._tried[kind] > _MAX_WEIGHT:
            self._tried[kind] *= 0.5
            self._taken[kind] *= 0.5
        self._tried[kind] += 1
        self._taken[kind] += taken


class _CopySource(NamedTuple):
    """A place to copy from: `source.tokens[position]` is the last matched token."""

    source: NgramIndex
    position: int
    length: int
    near: bool


class _LostCopy(NamedTuple):
    """Where a copy ended: the source's token there differs from the generated one."""

    source: NgramIndex
    position: int
    at: int
    """Length of the text, including the token that differs."""


class NgramProposer:
    """Drafts of one sequence, for a single thread. `propose` takes 10 to 100 µs, three times as much
    in a text that repeats itself, and never waits.

    The engine core calls `propose` when it schedules a row, and `advance` once for each step that gave the
    sequence tokens, with drafts or without.
    """

    def __init__(
        self,
        tokens: Sequence[int],
        cost: CostModel,
        earlier: Sequence[NgramIndex] = (),
        *,
        rewinds: bool = True,
        fund: DraftFund | None = None,
    ) -> None:
        """`tokens`: the prompt. `earlier`: texts of the same salt (EarlierTexts.of). `rewinds`: rejected drafts
        are truncated; otherwise the accepted ones before them are computed again. `fund`: what all texts of
        the engine share; None: its own."""
        self._text = NgramIndex(tokens)
        self._cost = cost
        self._earlier = tuple(earlier)
        self._rewinds = rewinds
        self._acceptance = AcceptanceRates()
        self._credit = DraftCredit(fund or DraftFund())
        self._copying: _CopySource | None = None
        self._lost_copy: _LostCopy | None = None
        self._draft: list[int] = []
        self._kinds: list[int] = []
        self._plain_s = 0.0
        self._spent_s = 0.0
        self.rate = 0.0
        """Tokens a second, of all sequences of the step, that the last proposal promised."""
        self.drafted = 0
        self.accepted = 0
        self.off = ""
        """Why there are no drafts, in words; empty while there are."""

    @property
    def speedup(self) -> float | None:
        """Net gain so far: the time of plain steps over the time taken. None before the first draft."""
        if self.drafted and self._spent_s:
            return self._plain_s / self._spent_s
        return None

    @property
    def times_s(self) -> tuple[float, float]:
        """Time of plain steps for the tokens so far, and the time taken."""
        return self._plain_s, self._spent_s

    def withdraw(self) -> None:
        """Forget the last proposal: others go into the step."""
        self._copying = None
        self._draft = []
        self._kinds = []

    def fork(self) -> "NgramProposer":
        """The same text for another choice; what was learned so far is not copied."""
        fund = self._credit.fund
        twin = NgramProposer((), self._cost, self._earlier, rewinds=self._rewinds, fund=fund)
        twin._text = self._text.copy()
        return twin

    def index(self) -> bool:
        """Index a slice of what was appended (3 ms at most). True when all is indexed; until then there are
        no drafts.

        `chances` does it too, so that texts without drafts are not indexed; the core calls it while a long
        prompt is computed.
        """
        return self._text.chain()

    def propose(self, limit: int, rows: int = 1, again: int = 0) -> tuple[int, ...]:
        """Tokens to verify in the next step, `limit` at most, mostly none.

        `rows`: tokens of that step without these drafts, of all sequences (this one's own token included).
        `again`: how many of them are computed a second time.
        """
        (length,), self.rate = best_lengths(
            [self.chances(limit)], rows, self._cost, limit, again=again, rewinds=self._rewinds
        )
        return self.take(length)

    def chances(self, limit: int) -> list[float]:
        """Chances of the next tokens, `limit` at most: each that all up to there are accepted.

        Empty: nothing to go by, or no credit.
        """
        self.withdraw()
        if self.off:
            limit = min(limit, PROBE_TOKENS) if self._credit.allows_probe else 0
        if limit <= 0 or self._credit.exhausted or not self.index():
            return []
        sources = self._sources()
        if not sources:
            return []
        self._copying = sources[0]
        return self._extrapolate(sources, limit)

    def take(self, count: int) -> tuple[int, ...]:
        """Draft the first `count` of the tokens whose chances were asked last."""
        del self._draft[count:], self._kinds[count:]
        return tuple(self._draft)

    def advance(
        self,
        tokens: Sequence[int],
        drafted: int = 0,
        rows: int = 0,
        seconds: float = 0.0,
        again: int = 0,
        of_step: int = 0,
    ) -> None:
        """Append a step's `tokens`: the accepted drafts and the sampled token after them.

        `drafted`: how many of the last proposal went into the step. `rows`: all tokens of the step, drafts
        included, `seconds`: its time; 0: its cost says nothing about drafts. `again`: tokens of the step that
        were computed a second time, because earlier drafts were rejected. `of_step`: the drafts of all
        sequences, where there are others'.
        """
        accepted = min(drafted, len(tokens) - 1)
        for place, kind in enumerate(self._kinds[: min(accepted + 1, drafted)]):
            self._acceptance.learn(kind, place < accepted)
        self.drafted += drafted
        self.accepted += accepted
        if not drafted and not again:
            self._spent_s += seconds
            self._plain_s += seconds
            self._credit.fund.earn()
        elif rows:
            self._settle(drafted, accepted, rows, seconds, again, max(of_step, drafted))
        self._follow_copy(tokens)
        self._text.extend(tokens)
        self.withdraw()

    def append(self, tokens: Sequence[int]) -> None:
        """Append tokens without learning from them: a grammar forced them, or the step has too many rows for
        drafts."""
        self._text.extend(tokens)

    def _settle(
        self, drafted: int, accepted: int, rows: int, seconds: float, again: int, of_step: int
    ) -> None:
        """Set what a step's drafts saved against what they cost."""
        without = max(rows - of_step - again, 1)
        plain = self._cost.seconds(without)
        self._spent_s += seconds
        self._plain_s += self._cost.seconds(without) * (1 + accepted)
        # Smoothed costs, not this step's: another program on the CPU is not the drafts' fault.
        # All streams of the step wait for all its drafts, and only this one has its tokens.
        longer = (self._cost.seconds(rows) + self._cost.wait_s) / plain - 1
        net = accepted - without * longer * (drafted + again) / (of_step + again)
        self._credit.add(net)
        if net > 0:
            self.off = ""
        else:
            self._switch_off()

    def charge(self, lost: float) -> None:
        """Count tokens that all streams lost by waiting for a draft that was not made after all."""
        self._credit.add(-lost)
        self._switch_off()

    def _switch_off(self) -> None:
        """Have no drafts, where there is nothing left to pay for them."""
        if self._credit.exhausted and not self.off:
            self.off = (
                f"drafts cost more than they save on this text: {self.accepted} of {self.drafted} "
                f"tokens accepted"
            )

    def _follow_copy(self, tokens: Sequence[int]) -> None:
        """Follow the source of the last proposal, and remember where a long copy leaves it."""
        copying = self._copying
        if copying is not None:
            source = copying.source.tokens
            position = copying.position
            length = copying.length
            for offset, token in enumerate(tokens):
                position += 1
                if position >= len(source):
                    break
                if source[position] != token:
                    if length >= _LONG_COPY or (copying.near and length >= 2):
                        at = len(self._text) + offset + 1
                        self._lost_copy = _LostCopy(copying.source, position, at)
                    return
                length += 1
        lost = self._lost_copy
        if lost and len(self._text) + len(tokens) - lost.at > _NEAR_TOKENS:
            self._lost_copy = None

    def _sources(self) -> list[_CopySource]:
        """The best places to copy from, all matching equally long, the likeliest first."""
        context = self._text.tokens
        best: list[_CopySource] = []
        most = 0
        for index in (self._text, *self._earlier):
            for position in index.find(context, _MOST_SOURCES):
                length = index.match_length(context, position)
                if length < SPAN:
                    continue
                if length > most:
                    best = []
                    most = length
                if length == most:
                    best.append(_CopySource(index, position, length, False))
        near = self._source_near_lost_copy(context)
        if near is not None and near.length + _NEAR_IS_WORTH >= most:
            return [near]
        return best

    def _source_near_lost_copy(self, context: Sequence[int]) -> _CopySource | None:
        """A place shortly after the one where a copy ended."""
        lost = self._lost_copy
        if lost is None:
            return None
        tokens = lost.source.tokens
        last = context[-1]
        end = min(lost.position + _NEAR_TOKENS, len(tokens) - 1)
        age = len(context) - lost.at
        # The longer ago, the likelier that one or two tokens are the same by chance.
        least = 1 if age < 6 else 2 if age < 24 else SPAN
        best: _CopySource | None = None
        for position in range(lost.position, end):
            if tokens[position] == last:
                length = lost.source.match_length(context, position)
                if length >= least and (best is None or length > best.length):
                    best = _CopySource(lost.source, position, length, True)
        if best is None and age == 0 and lost.position < end:
            # One token was replaced by another, the likeliest edit: continue after it.
            return _CopySource(lost.source, lost.position, 0, True)
        return best

    def _extrapolate(self, sources: list[_CopySource], limit: int) -> list[float]:
        """Draft what the sources go on with; returns the chances of its tokens."""
        chances: list[float] = []
        length = sources[0].length
        near = sources[0].near
        chance = 1.0
        for token, share in _votes([self._continuation(each, limit) for each in sources]):
            if chance < _LEAST_CHANCE or token < 0:
                break
            kind = self._acceptance.kind(length + len(chances), near)
            chance *= self._acceptance.chance(kind) * share
            chances.append(chance)
            self._draft.append(token)
            self._kinds.append(kind)
        return chances

    def _continuation(self, place: _CopySource, limit: int) -> list[int]:
        """Up to `limit` tokens that follow in a source."""
        tokens = place.source.tokens
        after = place.position + 1
        found = tokens[after : after + limit].tolist()
        if len(found) < limit and place.source is self._text:
            # A copy that runs into its own end repeats itself: the period goes on.
            found = (found * (limit // len(found) + 1))[:limit]
        return found


def _votes(runs: list[list[int]]) -> Iterator[tuple[int, float]]:
    """Tokens that most runs go on with, the first run's among equals, each with its share of the votes.

    Runs that voted for another token have no vote from there on. A text that repeats itself asks for this in
    nearly every step, so a stretch on which all agree is not voted on token by token.
    """
    voters = [(0, run) for run in runs if run]
    leader: list[int] = []
    at = 0
    while voters:
        if voters[0][1] is not leader:
            leader = voters[0][1]
            voters = [(_agreement(leader, run, at), run) for _, run in voters]
        until = min(agreed for agreed, _ in voters)
        for token in leader[at:until]:
            yield token, 1.0
        at = until
        voters = [voter for voter in voters if len(voter[1]) > at]
        if voters:
            token, count = Counter(run[at] for _, run in voters).most_common(1)[0]
            yield token, count / len(voters)
            voters = [voter for voter in voters if voter[1][at] == token]
            at += 1


def _agreement(leader: list[int], run: list[int], begin: int) -> int:
    """Where two runs that agree before `begin` end to agree."""
    size = min(len(leader), len(run))
    if leader[begin:size] == run[begin:size]:
        return size
    return next(at for at in range(begin, size) if leader[at] != run[at])
