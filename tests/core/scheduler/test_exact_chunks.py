"""Chunks of prompts with pictures and with turns."""

from dataclasses import dataclass

import pytest

from localchat.backend_api.media import MediaSpan, placeholder_ids
from localchat.core.scheduler.exact_chunks import TurnCuts, chunk_end, chunk_floor, whole_end


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


END = 1


def cuts_of(*turns: int) -> list[int]:
    """Return the starts of the chunks of a prompt. Each turn but the last ends with END."""
    tokens = [token for turn in turns for token in (*[0] * (turn - 1), END)]
    tokens[-1] = 0
    cuts = TurnCuts(tokens, {END}, 100)
    starts = [0]
    while (end := cuts.end(starts[-1])) < len(tokens):
        starts.append(end)
    assert starts[-1] == cuts.last
    return starts


def test_turn_ends_a_chunk_unless_it_ends_soon_after_another_cut() -> None:
    assert cuts_of(300) == [0, 100, 200]
    assert cuts_of(30, 250) == [0, 30, 130, 230]
    assert cuts_of(30, 5, 250) == [0, 30, 130, 230]
    assert cuts_of(105, 250) == [0, 100, 200, 300]


def test_short_last_chunk_is_joined_with_the_one_before() -> None:
    assert cuts_of(30, 20, 4) == [0, 30]
    assert cuts_of(30, 70, 4) == [0, 30, 100]
    assert cuts_of(20, 4) == [0]


def test_rest_of_a_long_turn_is_not_joined_with_the_start_of_the_answer() -> None:
    # The question ends a chunk, so the next turn of the conversation reuses all of it.
    assert cuts_of(30, 130, 4) == [0, 30, 130, 160]
    assert cuts_of(140, 4) == [0, 100, 140]


def test_common_prefix_has_the_same_cuts_in_every_prompt() -> None:
    turns = (30, 250, 4, 70, 20, 20, 130)
    tokens = [token for turn in turns for token in (*[0] * (turn - 1), END)]
    whole = TurnCuts(tokens, {END}, 100)
    for length in range(1, len(tokens)):
        cuts = TurnCuts([*tokens[:length], 0], {END}, 100)
        assert cuts.last == whole.floor(cuts.last)
        for position in range(cuts.last):
            assert cuts.end(position) == whole.end(position)


def test_short_question_is_not_joined_with_the_turn_before_it() -> None:
    assert cuts_of(30, 8, 4) == [0, 30]
    assert cuts_of(30, 20, 8, 4) == [0, 30, 50]


@pytest.mark.parametrize("turns", [(300,), (30, 250), (30, 20), (20, 70, 30), (20, 100), (20, 9)])
def test_chunks_of_a_text_are_those_of_every_later_prompt(turns: tuple[int, ...]) -> None:
    text = [token for turn in turns for token in (*[0] * (turn - 1), END)]
    whole = TurnCuts(text, {END}, 64, continues=True)
    assert whole.last <= len(text) < whole.last + 64
    for rest in ([0] * 70, [*[0] * 20, END, 0, 0], [*[0] * 6, END, 0, 0]):
        later = TurnCuts([*text, *rest], {END}, 64)
        starts = [start for start in range(len(text)) if whole.floor(start) == start]
        assert all(later.floor(start) == start for start in (*starts, whole.last))
