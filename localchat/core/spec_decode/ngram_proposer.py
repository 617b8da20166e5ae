"""N-gram proposer: drafts without a draft model, from what followed the last tokens earlier in the text.

Source: the longest match in the sequence itself (ngram_index.py), and the majority where several matches are
equally long. After a long copy that ends in a difference, it also searches near the position where the copy
ended and accepts shorter matches there, so that a file with small edits is found again at once. Texts of other
requests are no source: they rarely help, and flatter a benchmark.

Each drafted token has a probability of acceptance, learned by the length of the match that led to it. Proposals
that were not drafted teach it too, at no cost, because the next token shows whether they were right. A new text
starts with the rates of earlier texts. The planner turns these probabilities into draft lengths
(draft_planner.py).

Counts and path probabilities follow SuffixDecoding (Oliaro et al. 2025), windows that follow accepted tokens
follow exllamav3. Drafts are point masses, so no proposal changes the text.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from localchat.core.spec_decode.acceptance import AcceptanceRates
from localchat.core.spec_decode.ngram_index import LONGEST, SPAN, NgramIndex

_MIN_CHANCE = 0.02
"""Tokens that are less likely to be accepted are not drafted."""
_MAX_SOURCES = 12
_NEAR_TOKENS = 64
_LONG_COPY = 8
_NEAR_BONUS = 6
"""Tokens by which a match elsewhere must be longer than one near the last copy."""

_LENGTHS = (0, 1, 2, 3, 4, 5, 7, 10, 16, LONGEST)
"""Lower bounds of the classes of match lengths."""
_ANYWHERE = (0.1, 0.1, 0.2, 0.35, 0.5, 0.6, 0.75, 0.87, 0.95, 0.985)
_NEAR = (0.4, 0.45, 0.65, 0.75, 0.85, 0.9, 0.93, 0.96, 0.97, 0.985)
"""Prior acceptance by the length of the match: anywhere, and near the position that was copied last."""


def match_kind(length: int, *, near: bool) -> int:
    """Return the class of a match of `length` tokens, an index into the rates."""
    return bisect_right(_LENGTHS, length) - 1 + (len(_LENGTHS) if near else 0)


def common_rates() -> AcceptanceRates:
    """Return the common acceptance rates of a new engine, by class of match."""
    return AcceptanceRates((*_ANYWHERE, *_NEAR), prior_tokens=8, memory_tokens=200)


def match_rates(common: AcceptanceRates) -> AcceptanceRates:
    """Return the acceptance rates of a new text, by class of match. `common`: those of all texts."""
    return common.of_new_text(prior_tokens=3, memory_tokens=30)


class _CopySource(NamedTuple):
    """A position to copy from: the last matched token of the text."""

    position: int
    length: int
    near: bool


class _LostCopy(NamedTuple):
    """End of a copy: the token there differs from the generated one."""

    position: int
    text_tokens: int
    """Length of the text, including the token that differs."""


class NgramProposer:
    """Drafts of one sequence, for a single thread.

    `chances` takes 10 to 100 µs, three times as much in a text that repeats itself, and never waits. The engine
    core calls `advance` once for each step that gave the sequence tokens, with drafts or without.
    """

    def __init__(self, tokens: Sequence[int], rates: AcceptanceRates | None = None) -> None:
        """`tokens`: the prompt. `rates`: common rates of the engine's texts. None: start with the priors."""
        self._text = NgramIndex(tokens)
        self._common_rates = rates or common_rates()
        self._rates = match_rates(self._common_rates)
        self._copying: _CopySource | None = None
        self._lost_copy: _LostCopy | None = None
        self._draft: list[int] = []
        self._kinds: list[int] = []

    def fork(self) -> "NgramProposer":
        """Return a proposer for another choice with the same text, without what this one learned."""
        twin = NgramProposer((), self._common_rates)
        twin._text = self._text.copy()
        return twin

    def index(self) -> bool:
        """Index a slice of the appended tokens (3 ms at most). Return True when all are indexed.

        Until then there are no drafts. `chances` does it too, so texts without drafts are never indexed. The
        core calls it while a long prompt is computed.
        """
        return self._text.chain()

    def may_propose(self) -> bool:
        """Return whether `chances` may return something, without a search for the best match."""
        if not self.index():
            return False
        return self._lost_copy is not None or self._text.repeats()

    def chances(self, limit: int) -> list[float]:
        """Return the probabilities that the first 1, 2, ... drafted tokens are all accepted.

        At most `limit` tokens. Empty if nothing matches.
        """
        self.withdraw()
        if limit <= 0 or not self.index():
            return []
        sources = self._sources()
        if not sources:
            return []
        self._copying = sources[0]
        return self._extrapolate(sources, limit)

    def take(self, count: int) -> tuple[int, ...]:
        """Draft the first `count` of the tokens whose chances were returned last."""
        del self._draft[count:]
        del self._kinds[count:]
        return tuple(self._draft)

    def withdraw(self) -> None:
        """Forget the last proposal, because other drafts go into the step."""
        self._copying = None
        self._draft = []
        self._kinds = []

    def advance(self, tokens: Sequence[int]) -> None:
        """Append the tokens of a step: the accepted drafts and the sampled token after them.

        Learn from the last proposal, even if none of it was drafted: its first token can still be compared.
        """
        # Tokens after the first wrong one cannot be compared with the model's.
        for kind, draft, token in zip(self._kinds, self._draft, tokens, strict=False):
            self._rates.learn(kind, draft == token)
        self._follow_copy(tokens)
        self._text.extend(tokens)
        self.withdraw()

    def append(self, tokens: Sequence[int]) -> None:
        """Append tokens without learning from them.

        A grammar forced them, another source drafted them, or the step had too many rows for drafts.
        """
        if self._draft:
            self.withdraw()
        self._text.extend(tokens)

    def _follow_copy(self, tokens: Sequence[int]) -> None:
        """Follow the source of the last proposal, and remember where a long copy leaves it."""
        copying = self._copying
        if copying is not None:
            source = self._text.tokens
            position = copying.position
            length = copying.length
            for offset, token in enumerate(tokens):
                position += 1
                if position >= len(source):
                    break
                if source[position] != token:
                    if length >= _LONG_COPY or (copying.near and length >= 2):
                        text_tokens = len(self._text) + offset + 1
                        self._lost_copy = _LostCopy(position, text_tokens)
                    return
                length += 1
        lost = self._lost_copy
        if lost and len(self._text) + len(tokens) - lost.text_tokens > _NEAR_TOKENS:
            self._lost_copy = None

    def _sources(self) -> list[_CopySource]:
        """Return the best positions to copy from, all with equally long matches, the likeliest first."""
        context = self._text.tokens
        sources: list[_CopySource] = []
        longest = SPAN
        for position in self._text.find(context, _MAX_SOURCES):
            length = self._text.match_length(context, position)
            if length > longest:
                sources = []
                longest = length
            if length == longest:
                sources.append(_CopySource(position, length, near=False))
        near = self._source_near_lost_copy(context)
        if near is not None and (not sources or near.length + _NEAR_BONUS >= longest):
            return [near]
        return sources

    def _source_near_lost_copy(self, context: Sequence[int]) -> _CopySource | None:
        """Return a position shortly after the one where a copy ended."""
        lost = self._lost_copy
        if lost is None:
            return None
        tokens = self._text.tokens
        last = context[-1]
        end = min(lost.position + _NEAR_TOKENS, len(tokens) - 1)
        age = len(context) - lost.text_tokens
        # The longer ago the copy ended, the likelier it is that one or two tokens match by chance.
        min_length = SPAN
        if age < 6:
            min_length = 1
        elif age < 24:
            min_length = 2
        best: _CopySource | None = None
        for position in range(lost.position, end):
            if tokens[position] == last:
                length = self._text.match_length(context, position)
                if length >= min_length and (best is None or length > best.length):
                    best = _CopySource(position, length, near=True)
        if best is None and age == 0 and lost.position < end:
            # The likeliest edit replaces one token by another: continue after it.
            return _CopySource(lost.position, 0, near=True)
        return best

    def _extrapolate(self, sources: list[_CopySource], limit: int) -> list[float]:
        """Draft the continuation of the sources. Return the chances of its tokens."""
        chances: list[float] = []
        length = sources[0].length
        near = sources[0].near
        chance = 1.0
        for token, share in _votes([self._continuation(source, limit) for source in sources]):
            if chance < _MIN_CHANCE or token < 0:
                break
            kind = match_kind(length + len(chances), near=near)
            chance *= self._rates.rate(kind) * share
            chances.append(chance)
            self._draft.append(token)
            self._kinds.append(kind)
        return chances

    def _continuation(self, source: _CopySource, limit: int) -> list[int]:
        """Return up to `limit` tokens that follow in a source."""
        start = source.position + 1
        tokens = self._text.tokens[start : start + limit].tolist()
        if len(tokens) < limit:
            # A copy that reaches its own end repeats itself, so its period continues.
            tokens = (tokens * (limit // len(tokens) + 1))[:limit]
        return tokens


def _votes(runs: list[list[int]]) -> Iterator[tuple[int, float]]:
    """Yield the token with which most runs continue, with its share of the votes. Ties go to the first run.

    A run that voted for another token has no vote from there on. A text that repeats itself calls this in
    nearly every step, so a stretch on which all runs agree is not counted token by token.
    """
    voters = [(0, run) for run in runs if run]
    leader: list[int] = []
    index = 0
    while voters:
        if voters[0][1] is not leader:
            leader = voters[0][1]
            voters = [(_agreement(leader, run, index), run) for _, run in voters]
        end = min(agreed for agreed, _ in voters)
        for token in leader[index:end]:
            yield token, 1.0
        index = end
        voters = [voter for voter in voters if len(voter[1]) > index]
        if voters:
            token, count = Counter(run[index] for _, run in voters).most_common(1)[0]
            yield token, count / len(voters)
            voters = [voter for voter in voters if voter[1][index] == token]
            index += 1


def _agreement(leader: list[int], run: list[int], start: int) -> int:
    """Return the index where two runs that agree before `start` first differ."""
    end = min(len(leader), len(run))
    if leader[start:end] == run[start:end]:
        return end
    return next(index for index in range(start, end) if leader[index] != run[index])
