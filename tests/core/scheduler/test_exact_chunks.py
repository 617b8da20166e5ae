"""Chunks of prompts with pictures."""

from dataclasses import dataclass

from localchat.backend_api.media import MediaSpan, placeholder_ids
from localchat.core.scheduler.exact_chunks import chunk_end, chunk_floor, whole_end


@dataclass(frozen=True)
class Picture:
    tokens: int
    divisible: bool = True
    whole: bool = False
    encoded: bool = True

    @property
    def ids(self) -> tuple[int, ...]:
        return placeholder_ids(b"picture", self.tokens, divisible=self.divisible)


def ends(media: tuple[MediaSpan, ...], length: int) -> list[int]:
    """Return the ends of all chunks of 10 tokens."""
    chunks = [0]
    while chunks[-1] < length:
        chunks.append(chunk_end(media, chunks[-1], 10))
    return chunks[1:]


def test_picture_and_the_text_after_it_begin_chunks() -> None:
    media = (MediaSpan(13, Picture(25)), MediaSpan(40, Picture(5, divisible=False)))
    assert ends((), 30) == [10, 20, 30]
    assert ends(media, 60) == [10, 13, 23, 33, 38, 40, 45, 55, 65]


def test_picture_that_needs_one_step_is_one_chunk() -> None:
    media = (MediaSpan(4, Picture(25, divisible=False, whole=True)),)
    assert ends(media, 40) == [4, 29, 39, 49]
    assert [whole_end(media, 0, end) for end in (3, 4, 5, 28, 29)] == [3, 4, 4, 4, 29]
    assert whole_end(media, 4, 10) == 29


def test_reused_prefix_ends_at_a_chunk_that_a_fresh_prompt_has_too() -> None:
    media = (MediaSpan(13, Picture(25)), MediaSpan(40, Picture(5, divisible=False)))
    fresh = {0, *ends(media, 70)}
    for end in range(70):
        floor = chunk_floor(media, end, 10)
        assert floor <= end
        assert floor in fresh
    # A text without the picture may agree up to its start, in a longer chunk.
    assert chunk_floor(media, 13, 10) == 10
    assert chunk_floor(media, 38, 10) == 38
    assert chunk_floor(media, 44, 10) == 40
