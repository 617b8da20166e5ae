"""Chats, structured output, tools and fill in the middle with real models."""

import json
from pathlib import Path

import jsonschema
import pytest

from localchat.engine.events import Prefill, ToolCall
from localchat.engine.local.engine import LocalEngine
from localchat.engine.request import (
    GenerateRequest,
    Grammar,
    Infill,
    Message,
    Messages,
    Sampling,
)
from tests.real.conftest import QWEN, SMOLLM2, OpenEngine, model_path
from tests.support.answers import Answer, ask

GREEDY = Sampling(temperature=0)
QUESTIONS = (
    "My name is Priya and I live in Porto.",
    "What is the capital of Portugal?",
    "Name two rivers.",
    "What is 3 + 4?",
    "Write one sentence about rain.",
    "Which color is the sky?",
    "Name a fruit.",
    "Translate 'good morning' into French.",
    "What do bees make?",
    "Where do I live?",
)
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "languages": {
            "type": "array",
            "items": {"enum": ["English", "French", "German"]},
            "maxItems": 3,
        },
    },
    "required": ["name", "age", "languages"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


@pytest.fixture(params=[SMOLLM2, QWEN])
def chat_engine(request: pytest.FixtureRequest, open_engine: OpenEngine) -> LocalEngine:
    if request.param == SMOLLM2:
        shared: LocalEngine = request.getfixturevalue("smollm2_engine")
        return shared
    return open_engine(model_path(request.param))


def test_ten_turns_of_a_chat_reuse_the_prefix_cache(smollm2: Path, open_engine: OpenEngine) -> None:
    engine = open_engine(smollm2, context_tokens=4096)
    history: list[Message] = []
    answers: list[Answer] = []
    for question in QUESTIONS:
        history.append(Message("user", question))
        answers.append(_chat(engine, history, max_tokens=32))
        history.append(Message("assistant", answers[-1].text))
    assert all(answer.text.strip() for answer in answers)
    first, *later = [_prefill(answer) for answer in answers]
    assert first.cached == 0
    # Every later turn recomputes at most its own question, the last answer and one block.
    assert all(turn.cached >= turn.total - 160 for turn in later)


def test_answers_follow_a_schema(chat_engine: LocalEngine) -> None:
    request = GenerateRequest(
        Messages((Message("user", "Invent a person who speaks two languages. Answer as JSON."),)),
        sampling=GREEDY,
        max_tokens=160,
        grammar=Grammar("json_schema", json.dumps(PERSON)),
    )
    answer = ask(chat_engine, request)
    assert answer.reasons == ["stop"]
    jsonschema.validate(json.loads(answer.text), PERSON)


def test_a_required_tool_is_called_with_valid_arguments(chat_engine: LocalEngine) -> None:
    messages = Messages(
        (Message("user", "What is the weather in Paris now?"),),
        tools=(WEATHER,),
        tool_choice="required",
        parallel_tool_calls=False,
    )
    answer = ask(chat_engine, GenerateRequest(messages, sampling=GREEDY, max_tokens=120))
    calls = [event for event in answer.events if isinstance(event, ToolCall)]
    arguments = json.loads("".join(call.arguments for call in calls))
    assert calls[0].name == "get_weather"
    assert isinstance(arguments["city"], str)
    assert "tool_calls" in answer.reasons


def test_a_gap_in_code_is_filled(qwen: Path, open_engine: OpenEngine) -> None:
    engine = open_engine(qwen)
    infill = Infill("def add(a, b):\n    return ", "\n\n\nprint(add(1, 2))\n")
    answer = ask(engine, GenerateRequest(infill, sampling=GREEDY, max_tokens=16))
    assert answer.text.strip().startswith("a + b")


def _chat(engine: LocalEngine, history: list[Message], max_tokens: int) -> Answer:
    return ask(
        engine, GenerateRequest(Messages(tuple(history)), sampling=GREEDY, max_tokens=max_tokens)
    )


def _prefill(answer: Answer) -> Prefill:
    return next(event for event in answer.events if isinstance(event, Prefill))
