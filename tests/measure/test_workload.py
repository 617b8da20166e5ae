"""Workloads: lengths that a server counts as asked for, and prefixes only where the shape says so."""

from statistics import mean

import pytest

from localchat.errors import UsageError
from localchat.measure.workload import (
    SHAPES,
    Shape,
    TokenScale,
    messages,
    parse_shape,
    prose,
)

SCALE = TokenScale.of([(16, 55), (144, 375)])
"""Two and a half tokens a word, and fifteen around them."""


def text(shape: Shape, seed: str) -> str:
    return messages(shape, SCALE, seed, "run")[0]["content"]


def shared_words(one: str, other: str) -> int:
    pairs = list(zip(one.split(), other.split(), strict=False))
    return next((at for at, pair in enumerate(pairs) if pair[0] != pair[1]), len(pairs))


@pytest.mark.parametrize("name", ["chat", "prompt", "writing", "prefix"])
def test_a_prompt_has_the_tokens_of_its_shape(name: str) -> None:
    words = len(text(SHAPES[name], "a").split())
    assert 15 + 2.5 * words == pytest.approx(SHAPES[name].prompt_tokens, abs=3)


def test_prompts_have_on_average_the_length_that_a_server_counts() -> None:
    # The server counts characters. Single prompts are off by 4 %, because sentences differ.
    lengths = []
    for run in range(100):
        probes = [(words, len(prose(words, f"{run} scale {words}"))) for words in (16, 144)]
        scale = TokenScale.of(probes)
        lengths.append(len(messages(Shape("600+4", 600, 4), scale, f"{run}", "run")[0]["content"]))
    assert mean(lengths) == pytest.approx(600, rel=0.02)
    assert all(length == pytest.approx(600, rel=0.15) for length in lengths)


@pytest.mark.parametrize("name", [name for name in SHAPES if name != "prefix"])
def test_two_prompts_share_no_prefix(name: str) -> None:
    assert shared_words(text(SHAPES[name], "a"), text(SHAPES[name], "b")) <= 1


def test_prompts_of_the_shape_prefix_share_most_of_it() -> None:
    one, other = text(SHAPES["prefix"], "a"), text(SHAPES["prefix"], "b")
    assert 2.5 * shared_words(one, other) == pytest.approx(1000, abs=5)
    again = messages(SHAPES["prefix"], SCALE, "a", "another run")[0]["content"]
    assert shared_words(one, again) <= 1


def test_an_edit_asks_for_the_text_that_it_holds() -> None:
    prompt = text(SHAPES["edit"], "a")
    assert "Write this text again" in prompt
    assert prompt.count("\n") > 10


def test_without_usage_lengths_are_estimates() -> None:
    assert TokenScale.of([(16, 0), (144, 0)]) == TokenScale()
    assert TokenScale() != SCALE
    assert TokenScale().words(200) == 143


def test_a_seed_draws_the_same_text() -> None:
    assert prose(20, 1) == prose(20, 1) != prose(20, 2)


def test_lengths_make_a_shape() -> None:
    assert parse_shape("512+128") == Shape("512+128", 512, 128)
    assert parse_shape("chat") is SHAPES["chat"]


@pytest.mark.parametrize("word", ["chta", "512", "0+5", "5+", "+5", "1+99999999", "1+-2", "٣+٣"])
def test_a_wrong_shape_is_refused_with_the_right_ones(word: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_shape(word)
    assert "chat" in caught.value.hint
