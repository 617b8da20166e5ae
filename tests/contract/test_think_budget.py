"""Thinking budgets, whatever runs under the loop."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import pytest

import localchat
from localchat.backend_api.interface import OpenModel
from localchat.backend_api.registry import choose_for_file
from localchat.chat_format.reasoning_parser import REASONING_FAMILIES, ReasoningFamily
from localchat.core.input_processor import InputProcessor
from localchat.engine.events import Reasoning, Text
from localchat.engine.local.engine import LocalEngine
from localchat.engine.request import GenerateRequest, Message, Messages, Sampling
from tests.support.chat_templates import RENDER_PROCESS, reasoning_template
from tests.support.engine_core_bench import _Model


def reasoned(engine: LocalEngine, budget: int | None) -> tuple[str, str]:
    """Reasoning and text of an answer that goes on inside reasoning."""
    asked = (Message("user", "abc"), Message("assistant", "<think>abc"))
    prompt = Messages(asked, think_budget=budget, continue_last=True)
    request = GenerateRequest(prompt, Sampling(temperature=0.0), max_tokens=60, ignore_eos=True)
    events = list(engine.generate(request))
    thought = "".join(event.text for event in events if isinstance(event, Reasoning))
    text = "".join(event.text for event in events if isinstance(event, Text))
    return thought, text


@pytest.mark.parametrize("budget", [1, 8, 21])
def test_reasoning_ends_with_its_budget_and_the_answer_begins(
    shared: LocalEngine, budget: int
) -> None:
    endless, nothing = reasoned(shared, None)
    assert len(endless) >= 40 and not nothing
    thought, text = reasoned(shared, budget)
    assert endless.startswith(thought)
    assert len(shared.tokenize(thought)) == budget < len(endless)
    assert "think" not in text


@pytest.fixture(scope="module")
def model(backend: tuple[str, Path]) -> Iterator[OpenModel]:
    """A model without its weights. That of llama.cpp is the guide, whose tokens are of several letters."""
    name, path = backend
    path = (
        Path(localchat.__file__).with_name("guide") / "guide.gguf" if "llamacpp" in name else path
    )
    opened = choose_for_file(path, name).backend.open(path, print)
    yield opened
    opened.close()


@pytest.mark.parametrize(
    "is_open", [True, False], ids=["opened by the prompt", "opened by the model"]
)
@pytest.mark.parametrize("family", REASONING_FAMILIES, ids=lambda family: family.name)
def test_the_tokens_of_a_model_are_counted_in_every_family(
    model: OpenModel, family: ReasoningFamily, is_open: bool
) -> None:
    tokenizer = model.tokenizer
    described = _Model(tokenizer)
    template = reasoning_template(family, is_open=is_open)
    described.info = replace(described.info, chat_template=template)
    processor = InputProcessor(described, 2048, {}, print, RENDER_PROCESS)
    assert processor.format.reasoning_family is family
    thoughts = tokenizer.encode("Größer als 3.2 🙂? So sums of 東京, sums, and more.")
    for tokens in (1, 2, len(thoughts), 200):
        prompt = Messages((Message("user", "hi"),), think_budget=tokens)
        state, _ = processor.accept(1, GenerateRequest(prompt))
        budget = state.sequences[0].think_budget
        assert budget is not None
        for token in () if is_open else tokenizer.encode(family.opens[0], special=True):
            assert budget.forced is None
            budget.push(token)
        coming = cycle(thoughts)
        for _token in range(tokens):
            assert budget.forced is None
            budget.push(next(coming))
        written = b""
        while (forced := budget.forced) is not None:
            written += tokenizer.piece(forced, special=True)
            budget.push(forced)
        assert written.decode() == family.closing(again=True)
        budget.push(thoughts[0])
        assert budget.forced is None
