"""A sliding-window model through the engine: what was put away is never taken for more than it is."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from localchat.engine.local.engine import LocalEngine
from localchat.engine.options import EngineOptions
from localchat.engine.request import GenerateRequest, Sampling, TokenIds
from localchat.fit.load_options import LoadOptions
from tests.support.answers import ask
from tests.support.llamacpp_models import VOCAB, WINDOW

DRAW = np.random.default_rng(8)


@pytest.fixture
def engine(models: dict[str, Path]) -> Iterator[LocalEngine]:
    options = EngineOptions(
        load=LoadOptions(context_tokens=1024, threads=1),
        model=models["gemma3"],
        backend="llamacpp",
    )
    engine = LocalEngine(options, notify=lambda sentence: None)
    yield engine
    engine.close()


def _tokens(count: int) -> tuple[int, ...]:
    return tuple(int(token) for token in DRAW.integers(0, VOCAB - 3, count))


def _request(tokens: tuple[int, ...], salt: str) -> GenerateRequest:
    greedy = Sampling(temperature=0)
    return GenerateRequest(
        TokenIds(tokens), greedy, max_tokens=24, ignore_eos=True, salt=salt, logprobs=0
    )


def _odds(engine: LocalEngine, tokens: tuple[int, ...], salt: str) -> list[float]:
    """Log probabilities of the answer, token by token: they tell of a lost past before the text does."""
    return [one.logprob for one in ask(engine, _request(tokens, salt)).logprobs]


@pytest.mark.parametrize("kept", [2 * WINDOW, 3 * WINDOW])
def test_text_that_is_edited_after_another_was_answered_goes_on_as_from_a_cold_cache(
    engine: LocalEngine, kept: int
) -> None:
    prompt = _tokens(4 * WINDOW)
    edited = prompt[:kept] + _tokens(20)
    _odds(engine, prompt, "a")
    _odds(engine, _tokens(60), "another conversation")
    warm, cold = _odds(engine, edited, "a"), _odds(engine, edited, "cold")
    np.testing.assert_allclose(warm, cold, atol=0.005)
    again, anew = _odds(engine, prompt, "a"), _odds(engine, prompt, "cold too")
    np.testing.assert_allclose(again, anew, atol=0.005)
