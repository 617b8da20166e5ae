"""Prompt chunks of requests that must compute the same bits cold and warm.

A text is divided into chunks of a fixed length. A picture begins a chunk, and so does the text after it, so
that another question about the same picture reuses all of it. In a cache of slots, so does the text after each
turn of a conversation: other questions reuse a short system prompt, and a follow-up reuses the question before
it.
"""

from bisect import bisect_right
from collections.abc import Container, Sequence

from localchat.backend_api.media import MediaSpan
from localchat.core.kv_cache.manager import KVCacheManager, PrefixHit

_MIN_TURN_TOKENS = 16
"""Tokens after a cut without another cut, because narrow steps cost more per token."""
_MAX_JOINED_TOKENS = 63
"""Widest last chunk that is joined from two. Wider steps compute attention in tiles, narrow ones do not."""


class TurnCuts:
    """Positions between the chunks of a prompt, chosen by the turns in it.

    Each cut depends only on the tokens before it. So prompts with a common prefix have the same cuts in it.
    """

    def __init__(
        self,
        tokens: Sequence[int],
        turn_ends: Container[int],
        chunk: int,
        *,
        continues: bool = False,
    ) -> None:
        """`turn_ends`: ids of the tokens that end a turn. `chunk`: tokens of the longest chunk.

        `continues`: the tokens are the start of later prompts, whose last chunk is not known.
        """
        self._length = len(tokens)
        turns = [end for end, token in enumerate(tokens, 1) if token in turn_ends]
        self._cuts = cuts = [0]
        for end in (*turns, self._length):
            cuts += range(cuts[-1] + chunk, end, chunk)
            inside = end < self._length or (continues and end in turns[-1:])
            if inside and end - cuts[-1] >= _MIN_TURN_TOKENS:
                cuts.append(end)
        if continues or len(cuts) == 1 or cuts[-1:] != turns[-1:]:
            # Turns before the last one are usually cached, so a short question is not joined with them.
            return
        if cuts[-2] and cuts[-2] not in turns:
            # The rest of a long turn stays apart: the next turn of the conversation would compute it again, and
            # here the narrow chunk is a small part of the whole.
            return
        if self._length - cuts[-2] <= min(_MAX_JOINED_TOKENS, chunk):
            # A chunk of a few tokens costs nearly as much as a wider one.
            cuts.pop()

    @property
    def last(self) -> int:
        """Start of the last chunk, which is always computed. With `continues`, the end of the last whole
        chunk."""
        return self._cuts[-1]

    def floor(self, position: int) -> int:
        """Return the last cut up to `position`."""
        return self._cuts[bisect_right(self._cuts, position) - 1]

    def end(self, start: int) -> int:
        """Return the end of the chunk that contains a token of the prompt."""
        index = bisect_right(self._cuts, start)
        if index == len(self._cuts):
            return self._length
        return self._cuts[index]


def find_at_cut(
    kv_cache: KVCacheManager, tokens: Sequence[int], salt: str, cuts: TurnCuts
) -> PrefixHit:
    """Find a prefix with the bits of a fresh computation that ends at a cut."""
    hit = longest = kv_cache.find_prefix(tokens[: cuts.last + 1], salt, 1)
    while (end := cuts.floor(hit.cached)) < hit.cached:
        hit = kv_cache.find_prefix(tokens[: end + 1], salt, 1)
    # A search that ends at a cut finds all its tokens and gives no reason, so take that of the longest one.
    return hit._replace(why_missed=hit.why_missed or longest.why_missed)


def chunk_end(media: Sequence[MediaSpan], start: int, chunk: int) -> int:
    """Return the end of the chunk that contains token `start`."""
    text_start = 0
    for span in media:
        if start < span.start:
            return min(_next(text_start, start, chunk), span.start)
        if start < span.end:
            if span.chunk.whole:
                return span.end
            return min(_next(span.start, start, chunk), span.end)
        text_start = span.end
    return _next(text_start, start, chunk)


def chunk_floor(media: Sequence[MediaSpan], end: int, chunk: int) -> int:
    """Return the last token up to `end` where a reused prefix may end.

    A prefix that ends where a picture begins may come from a text without it, whose chunk was longer.
    """
    text_start = 0
    for span in media:
        if end <= span.start:
            break
        if end < span.end:
            if not span.divisible:
                return span.start
            return end - (end - span.start) % chunk
        text_start = span.end
    return end - (end - text_start) % chunk


def whole_end(media: Sequence[MediaSpan], start: int, end: int) -> int:
    """Return the end of a row that divides no picture that needs a single step.

    The row ends before the picture, or after it if it begins with it.
    """
    for span in media:
        if span.chunk.whole and span.start < end < span.end:
            if span.start > start:
                return span.start
            return span.end
    return end


def _next(first: int, start: int, chunk: int) -> int:
    return start - (start - first) % chunk + chunk
