"""Prompt chunks of requests that must compute the same bits cold and warm.

A text is divided into chunks of a fixed length. A picture begins a chunk, and so does the text after it, so
that another question about the same picture reuses all of it.
"""

from collections.abc import Sequence

from localchat.backend_api.media import MediaSpan


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
    """Return the last token up to `end` at which a reused prefix with exact bits may end.

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
    """Return the end of a row, moved out of a picture that needs a single step.

    The row ends before the picture, or after it if it begins with it.
    """
    for span in media:
        if span.chunk.whole and span.start < end < span.end:
            return span.start if span.start > start else span.end
    return end


def _next(first: int, start: int, chunk: int) -> int:
    return start - (start - first) % chunk + chunk
