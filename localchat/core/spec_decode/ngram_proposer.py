"""Drafts without a draft model: what followed the last tokens when they stood in the text before.

Where to copy from: the longest match in the sequence itself or in earlier text of the same salt
(ngrams.py), the majority where several places match equally long. After a long copy that ends in a
difference, also the neighbourhood of the place where it ended, with shorter matches: a file with small
edits is caught again at once.

How far: each token of a draft has a probability of acceptance, learned by the length of the match
that led to it; drafts are as long as the expected tokens per second rise (CostModel). Whether at all: drafts
live on credit, in plain steps. What they save is added, what they cost is taken, and a plain step
adds PLAIN_CREDIT; without credit they are off, and a short one is tried when there is credit for it again. So
text that defeats them costs the first credit and 2 %, not more.

Ideas: counts and path probabilities from SuffixDecoding (Oliaro et al. 2025), windows that follow what
was accepted from exllamav3, the ledger against measured plain steps is ours. Drafts are point masses, so
whatever is proposed here changes no text.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from localchat.core.spec_decode.ngram_index import LONGEST, SPAN, NgramIndex
from localchat.core.spec_decode.step_cost import CostModel

FIRST_CREDIT = 1.5
PLAIN_CREDIT = 0.02
MOST_CREDIT = 16.0
"""Two wide drafts that are rejected whole: where 16 rows cost 7 plain steps, one at an edit is bad luck, and
without drafts it would take hundreds of plain steps to earn another try."""
PROBE_CREDIT = 0.5
PROBE_TOKENS = 2
_WORTH = 1.02
_PLACES = 12
_NEIGHBOURHOOD = 64
_TRACKED = 8
_NEAR_IS_WORTH = 6
_DIGEST_AT_ONCE = 8192

_LENGTHS = (0, 1, 2, 3, 4, 5, 7, 10, 16, LONGEST)
# Acceptance to begin with, by the length of the match: anywhere, and near the place that was copied last.
_ANYWHERE = (0.1, 0.1, 0.2, 0.35, 0.5, 0.6, 0.75, 0.87, 0.95, 0.985)
_NEAR = (0.4, 0.45, 0.65, 0.75, 0.85, 0.9, 0.93, 0.96, 0.97, 0.985)
_BELIEF = 3.0
_MEMORY = 40.0


class Acceptance:
    """How often a drafted token was accepted, by the length of the match behind it: Beta counts that forget,
    so that a change of matter shows within tens of tokens."""

    def __init__(self) -> None:
        priors = (*_ANYWHERE, *_NEAR)
        self._tried = [_BELIEF] * len(priors)
        self._taken = [_BELIEF * p for p in priors]

    def kind(self, length: int, near: bool) -> int:
        """The row of the table for a match of `length` tokens."""
        return bisect_right(_LENGTHS, length) - 1 + (len(_LENGTHS) if near else 0)

    def chance(self, kind: int) -> float:
        """Probability that a token drafted from a match of this kind is accepted."""
        return self._taken[kind] / self._tried[kind]

    def learn(self, kind: int, taken: bool) -> None:
        """One drafted token was judged."""
        if self._tried[kind] > _MEMORY:
            self._tried[kind] *= 0.5
            self._taken[kind] *= 0.5
        self._tried[kind] += 1
        self._taken[kind] += taken


class _Place(NamedTuple):
    """A place to copy from: `source.tokens[position]` is the last matched token."""

    source: NgramIndex
    position: int
    length: int
    near: bool


class _Anchor(NamedTuple):
    """Where a copy was lost: the source's token there differs from the one that was said. `at`: length of the
    text with that one."""

    source: NgramIndex
    position: int
    at: int


class NgramProposer:
    """The drafts of one sequence. Single thread; nothing here waits or blocks: `propose` takes 10 to 80 µs.

    The loop calls `propose` when it plans a row, and `advance` once for each step that gave the sequence
    tokens, with drafts or without.
    """

    def __init__(
        self, tokens: Sequence[int], cost: CostModel, earlier: Sequence[NgramIndex] = ()
    ) -> None:
        """`tokens`: the prompt. `earlier`: texts of the same salt (EarlierTexts.of)."""
        self._text = NgramIndex()
        self._waiting = list(tokens)
        self._digested = 0
        self._cost = cost
        self._earlier = tuple(earlier)
        self._acceptance = Acceptance()
        self._credit = FIRST_CREDIT
        self._track: _Place | None = None
        self._anchor: _Anchor | None = None
        self._kinds: list[int] = []
        self._plain_s = 0.0
        self._spent_s = 0.0
        self.drafted = 0
        self.accepted = 0
        self.off = ""
        """Why there are no drafts, in words; empty while there are."""

    @property
    def speedup(self) -> float | None:
        """Net gain so far: what plain steps would have taken over what was taken. None before the first
        draft."""
        return self._plain_s / self._spent_s if self.drafted and self._spent_s else None

    def fork(self) -> "NgramProposer":
        """The same text for another choice; what was learned so far is not taken along."""
        twin = NgramProposer(self._waiting, self._cost, self._earlier)
        twin._text, twin._digested = self._text.copy(), self._digested
        return twin

    def digest(self) -> bool:
        """Take a slice of the prompt (3 ms at most). True when all is taken; until then nothing is
        proposed. `propose` does it too; a loop that is computing the prompt may do it meanwhile."""
        if self._waiting:
            end = self._digested + _DIGEST_AT_ONCE
            self._text.extend(self._waiting[self._digested : end])
            self._digested = end
            if end >= len(self._waiting):
                self._waiting, self._digested = [], 0
        return not self._waiting

    def propose(self, limit: int, rows: int = 1, pad_to: int = 0) -> tuple[int, ...]:
        """Tokens to verify in the next step, `limit` at most, mostly none.

        `rows`: tokens of that step without these drafts, of all sequences (this one's own token
        included). `pad_to`: the step is padded to so many tokens anyway.
        """
        self._track, self._kinds = None, []
        if not self.digest() or limit <= 0:
            return ()
        places = self._places()
        if places:
            self._track = places[0]
        if self.off:
            limit = min(limit, PROBE_TOKENS) if self._credit >= PROBE_CREDIT else 0
        if not places or limit <= 0:
            return ()
        return self._worthwhile(places, limit, rows, pad_to)

    def advance(
        self,
        tokens: Sequence[int],
        drafted: int = 0,
        rows: int = 1,
        seconds: float = 0.0,
        pad_to: int = 0,
    ) -> None:
        """A step gave this sequence `tokens`: the accepted drafts and the sampled token behind them.

        `drafted`: how many of the last proposal went into the step. `rows`: all tokens of the step,
        drafts included. `seconds`: what it took (0: nobody measured).
        """
        accepted = min(drafted, len(tokens) - 1)
        for place, kind in enumerate(self._kinds[: min(accepted + 1, drafted)]):
            self._acceptance.learn(kind, place < accepted)
        self._settle(drafted, accepted, rows, seconds, pad_to)
        if self._waiting:
            self._waiting.extend(tokens)
        else:
            self._follow(tokens)
            self._text.extend(tokens)
        self._track, self._kinds = None, []

    def append(self, tokens: Sequence[int]) -> None:
        """Tokens behind the last that no step sampled: a grammar forced them."""
        if self._waiting:
            self._waiting.extend(tokens)
        else:
            self._text.extend(tokens)

    def _settle(self, drafted: int, accepted: int, rows: int, seconds: float, pad_to: int) -> None:
        self.drafted += drafted
        self.accepted += accepted
        plain = self._cost.seconds(max(rows - drafted, pad_to))
        self._spent_s += seconds
        if not drafted:
            self._plain_s += seconds
            self._credit = max(self._credit, min(self._credit + PLAIN_CREDIT, FIRST_CREDIT))
            return
        self._plain_s += plain * (1 + accepted)
        # Smoothed costs, not this step's: a busy neighbour is not the drafts' fault.
        net = 1 + accepted - self._cost.seconds(max(rows, pad_to)) / plain
        self._credit = min(self._credit + net, MOST_CREDIT)
        if self._credit < 0 and not self.off:
            self.off = (
                f"drafts cost more than they bring on this text: {self.accepted} of {self.drafted} "
                f"tokens accepted"
            )
        elif self.off and net > 0:
            self.off = ""

    def _follow(self, tokens: Sequence[int]) -> None:
        """Move along the source of the last proposal, and remember where a long copy leaves it."""
        track = self._track
        if track is not None:
            source, position, length = track.source.tokens, track.position, track.length
            for said, token in enumerate(tokens):
                position += 1
                if position >= len(source):
                    break
                if source[position] != token:
                    if length >= _TRACKED or (track.near and length >= 2):
                        at = len(self._text) + said + 1
                        self._anchor = _Anchor(track.source, position, at)
                    return
                length += 1
        anchor = self._anchor
        if anchor and len(self._text) + len(tokens) - anchor.at > _NEIGHBOURHOOD:
            self._anchor = None

    def _places(self) -> list[_Place]:
        """The best places to copy from, all matching equally long, the likeliest first."""
        context = self._text.tokens
        best: list[_Place] = []
        most = 0
        for index in (self._text, *self._earlier):
            for position in index.ends(context, _PLACES):
                length = index.matched(context, position)
                if length < SPAN:
                    continue
                if length > most:
                    best, most = [], length
                if length == most:
                    best.append(_Place(index, position, length, False))
        near = self._near(context)
        if near is not None and near.length + _NEAR_IS_WORTH >= most:
            return [near]
        return best

    def _near(self, context: Sequence[int]) -> _Place | None:
        """A place shortly behind the one where a copy was lost."""
        anchor = self._anchor
        if anchor is None:
            return None
        tokens, last = anchor.source.tokens, context[-1]
        end = min(anchor.position + _NEIGHBOURHOOD, len(tokens) - 1)
        age = len(context) - anchor.at
        # The longer ago, the likelier that a word or two are the same by chance.
        least = 1 if age < 6 else 2 if age < 24 else SPAN
        best: _Place | None = None
        for position in range(anchor.position, end):
            if tokens[position] == last:
                length = anchor.source.matched(context, position)
                if length >= least and (best is None or length > best.length):
                    best = _Place(anchor.source, position, length, True)
        if best is None and age == 0 and anchor.position < end:
            # One token was replaced by another, the likeliest edit: go on behind it.
            return _Place(anchor.source, anchor.position, 0, True)
        return best

    def _worthwhile(
        self, places: list[_Place], limit: int, rows: int, pad_to: int
    ) -> tuple[int, ...]:
        """As much of the continuation as makes the step's expected tokens per second highest."""
        cost = self._cost
        draft: list[int] = []
        best, best_rate = 0, rows / cost.seconds(max(rows, pad_to)) * _WORTH
        reached, expected = 1.0, float(rows)
        while len(draft) < limit:
            token, share, places = self._vote(places, draft)
            if token < 0:
                break
            kind = self._acceptance.kind(places[0].length + len(draft), places[0].near)
            reached *= self._acceptance.chance(kind) * share
            expected += reached
            draft.append(token)
            self._kinds.append(kind)
            rate = expected / cost.seconds(max(rows + len(draft), pad_to))
            if rate > best_rate:
                best, best_rate = len(draft), rate
            if reached < 0.02:
                break
        del self._kinds[best:]
        return tuple(draft[:best])

    def _vote(self, places: list[_Place], draft: list[int]) -> tuple[int, float, list[_Place]]:
        """The token that most places have behind `draft`, the first place's among equals; its share of the
        votes; and the places that voted for it. Token -1: no place goes on."""
        votes: list[tuple[int, _Place]] = []
        for place in places:
            at, tokens = place.position + len(draft) + 1, place.source.tokens
            if at < len(tokens):
                votes.append((tokens[at], place))
            elif place.source is self._text:
                # A copy that runs into its own end repeats itself: the period goes on.
                votes.append((draft[at - len(tokens)], place))
        if len(votes) == 1:
            return votes[0][0], 1.0, places
        if not votes:
            return -1, 0.0, []
        token, count = Counter(token for token, _ in votes).most_common(1)[0]
        return token, count / len(votes), [place for voted, place in votes if voted == token]
