"""Thinking budgets, whatever runs under the loop."""

import pytest

from localchat.engine.events import Reasoning, Text
from localchat.engine.local.engine import LocalEngine
from localchat.engine.request import GenerateRequest, Message, Messages, Sampling


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
