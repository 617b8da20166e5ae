"""Thinking budgets: reasoning has so many tokens and no more, in every family, and then the answer comes."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from localchat.chat_format.reasoning_parser import REASONING_FAMILIES, THINK, ReasoningFamily
from localchat.core.input_processor import InputProcessor
from localchat.engine.events import Reasoning, ToolCall
from localchat.engine.request import GenerateRequest, Grammar, Message, Messages, Sampling
from localchat.errors import UsageError
from tests.support.chat_templates import RENDER_PROCESS, reasoning_template
from tests.support.engine_core_bench import Bench, Received, _Model, capabilities
from tests.support.greedy import NEARLY_GREEDY
from tests.support.scripted_backend import EOS, VOCAB, Logits, ScriptedTokenizer

AHEAD: dict[str, Any] = {"block_tokens": 4, "depth": 2}
KINDS: tuple[dict[str, Any], ...] = ({}, AHEAD, {"depth": 2})
TOKENIZER = ScriptedTokenizer()
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
ANSWER = "It is so."


def thinker(
    family: ReasoningFamily, *, opened: bool, answer: str = ANSWER, closing: str = ""
) -> Logits:
    """Reasons for ever, in a text of which drafts can be made, and answers once it is stopped."""
    opens = "" if opened else family.opens[0]
    closing = closing or family.closing(again=True)

    def logits(tokens: list[int], prompt_tokens: int) -> NDArray[np.float32]:
        said = b"".join(TOKENIZER.piece(one, special=True) for one in tokens[prompt_tokens:])
        text = said.decode()
        row = np.zeros(VOCAB, np.float32)
        thoughts, closed, _ = text[len(opens) :].partition(closing)
        script = opens + "abc" * 200
        if closed:
            script = opens + thoughts + closing + answer
        coming = TOKENIZER.encode(script[len(text) :], special=True)
        row[coming[0] if coming else EOS] = 30
        return row

    return logits


CONTEXT = 800


def bench(family: ReasoningFamily, logits: Logits, *, opened: bool, **kind: Any) -> Bench:
    """A bench whose model has a template of this family."""
    # Tools are described in the prompt, because these templates do not show them.
    made = Bench(capabilities(**{"context_tokens": CONTEXT, "kv_tokens": CONTEXT, **kind}), logits)
    model = _Model(TOKENIZER)
    model.info = replace(model.info, chat_template=reasoning_template(family, is_open=opened))
    made.input_processor = InputProcessor(model, CONTEXT, {}, made.sent.append, RENDER_PROCESS)
    assert made.input_processor.format.reasoning_family is family
    return made


def asked(budget: int | None, **fields: Any) -> GenerateRequest:
    prompt = Messages((Message("user", "hi"),), think_budget=budget, **fields.pop("prompt", {}))
    fields.setdefault("max_tokens", 300)
    return GenerateRequest(prompt, Sampling(temperature=NEARLY_GREEDY), **fields)


def thoughts(received: Received, choice: int = 0) -> str:
    parts = [one for one in received.all(Reasoning) if one.choice == choice]
    return "".join(part.text for part in parts)


@pytest.mark.parametrize("kind", KINDS, ids=["one step", "a step ahead", "of slots"])
@pytest.mark.parametrize("opened", [True, False])
@pytest.mark.parametrize("family", REASONING_FAMILIES, ids=lambda family: family.name)
def test_reasoning_has_as_many_tokens_as_its_budget_in_every_family(
    family: ReasoningFamily, opened: bool, kind: dict[str, Any]
) -> None:
    stage = bench(family, thinker(family, opened=opened), opened=opened, **kind)
    longest_end = len(TOKENIZER.encode(family.closing(again=True), special=True))
    for budget in (1, 30):
        received = stage.say(asked(budget))
        assert thoughts(received) == ("abc" * 20)[:budget]
        assert budget < received.done.usage.reasoning_tokens <= budget + longest_end
        assert received.text() == ANSWER
        assert received.finished()[0].reason == "stop"


@pytest.mark.parametrize("kind", KINDS, ids=["one step", "a step ahead", "of slots"])
@pytest.mark.parametrize("opened", [True, False])
def test_a_budget_of_nothing_lets_the_answer_begin(opened: bool, kind: dict[str, Any]) -> None:
    logits = thinker(THINK, opened=False)
    if opened:  # the closing tag is a part of the prompt
        logits = thinker(THINK, opened=True, closing="I")
    received = bench(THINK, logits, opened=opened, **kind).say(asked(0))
    assert thoughts(received) == ""
    assert received.text() == (ANSWER if not opened else received.text()) and received.text()


def test_reasoning_that_ends_by_itself_is_left_alone() -> None:
    def logits(tokens: list[int], prompt_tokens: int) -> NDArray[np.float32]:
        script = TOKENIZER.encode("ab</think>Yes.", special=True)
        row = np.zeros(VOCAB, np.float32)
        at = len(tokens) - prompt_tokens
        row[script[at] if at < len(script) else EOS] = 30
        return row

    received = bench(THINK, logits, opened=True).say(asked(3))
    assert (thoughts(received), received.text()) == ("ab", "Yes.")
    assert received.done.usage.reasoning_tokens == len([*"ab", "</think>"])


def test_without_a_budget_reasoning_goes_on_to_the_limit() -> None:
    received = bench(THINK, thinker(THINK, opened=True), opened=True).say(asked(None))
    assert len(thoughts(received)) == received.done.usage.reasoning_tokens == 300
    assert received.finished()[0].reason == "length"


@pytest.mark.parametrize("kind", KINDS, ids=["one step", "a step ahead", "of slots"])
def test_drafts_are_made_within_the_budget_and_after_it(kind: dict[str, Any]) -> None:
    logits = thinker(THINK, opened=True, answer="xyz" * 30)
    stage = bench(THINK, logits, opened=True, **kind)
    received = stage.say(asked(40, max_tokens=200))
    assert len(thoughts(received)) == 40
    assert received.text() == "xyz" * 30
    assert received.done.speculation.accepted > 10


@pytest.mark.parametrize("kind", KINDS, ids=["one step", "a step ahead", "of slots"])
def test_each_choice_has_a_budget_of_its_own(kind: dict[str, Any]) -> None:
    received = bench(THINK, thinker(THINK, opened=True), opened=True, **kind).say(asked(5, n=3))
    for choice in range(3):
        assert (thoughts(received, choice), received.text(choice)) == ("abcab", ANSWER)
    assert received.done.usage.reasoning_tokens == 3 * len([*"abcab", "</think>"])


@pytest.mark.parametrize("kind", KINDS, ids=["one step", "a step ahead", "of slots"])
@pytest.mark.parametrize("logprobs", [None, 2])
def test_a_form_binds_the_answer_after_the_budget(
    kind: dict[str, Any], logprobs: int | None
) -> None:
    logits = thinker(THINK, opened=True, answer='{"a": 1}')
    grammar = Grammar("json_schema", '{"type": "object", "properties": {"a": {"type": "integer"}}}')
    stage = bench(THINK, logits, opened=True, **kind)
    received = stage.say(asked(6, grammar=grammar, logprobs=logprobs))
    assert (thoughts(received), received.text()) == ("abcabc", '{"a": 1}')


@pytest.mark.parametrize("name", ["harmony", "solar"])
def test_reasoning_that_opens_again_is_closed_at_once(name: str) -> None:
    (family,) = (family for family in REASONING_FAMILIES if family.name == name)
    closed = family.closing(again=False)
    again = closed + family.opens[1]
    opens = family.opens[0]

    def logits(tokens: list[int], prompt_tokens: int) -> NDArray[np.float32]:
        """Opens its reasoning again after the first close, and answers after the second."""
        said = b"".join(TOKENIZER.piece(one, special=True) for one in tokens[prompt_tokens:])
        text = said.decode()
        thought, ended, rest = text[len(opens) :].partition(closed)
        if not ended:
            script = opens + "abc" * 99
        elif family.closing(again=True) not in rest:
            script = opens + thought + again + "x" * 99
        else:
            script = text.partition(family.closing(again=True))[0]
            script += family.closing(again=True) + ANSWER
        coming = TOKENIZER.encode(script[len(text) :], special=True)
        row = np.zeros(VOCAB, np.float32)
        row[coming[0] if coming else EOS] = 30
        return row

    stage = bench(family, logits, opened=False)
    received = stage.say(asked(4, prompt={"tools": (TOOL,)}, max_tokens=300))
    assert not received.all(ToolCall)
    assert (thoughts(received), received.text()) == ("abca", ANSWER)


@pytest.mark.parametrize(
    ("source", "budget"),
    [("{{ messages[0].content }}<think>", 1024), ("{{ reasoning_effort }}<think>", None)],
)
def test_an_effort_is_a_budget_where_the_template_knows_none(
    source: str, budget: int | None
) -> None:
    model = _Model(TOKENIZER)
    model.info = replace(model.info, chat_template=source)
    made = InputProcessor(model, CONTEXT, {}, print, RENDER_PROCESS)
    prompt = Messages((Message("user", "hi"),), template_options={"reasoning_effort": "low"})
    assert made.format.render(prompt).think_budget == budget
    assert made.format.render(replace_budget(prompt, 9)).think_budget == 9


def replace_budget(prompt: Messages, budget: int) -> Messages:
    return Messages(prompt.messages, template_options=prompt.template_options, think_budget=budget)


def test_a_negative_budget_is_refused() -> None:
    stage = bench(THINK, thinker(THINK, opened=True), opened=True)
    with pytest.raises(UsageError, match="think_budget is -1"):
        stage.ask(asked(-1))
