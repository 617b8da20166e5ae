"""Tasks whose outcome a program can check: needles, JSON, tool calls and questions."""

import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import msgspec

from localchat.config.paths import read_input
from localchat.engine.events import Done, Text, ToolCall
from localchat.engine.interface import Engine
from localchat.engine.request import GenerateRequest, Message, Messages, Sampling
from localchat.errors import UsageError, reason
from localchat.measure.records import TaskOutcome
from localchat.measure.workload import NeedleText

_GREEDY: Final = Sampling(temperature=0.0)
_JSON_TOKENS: Final = 256
_NEEDLE_TOKENS: Final = 32
_QUESTION_TOKENS: Final = 256
_SPEED_PROMPT: Final = "Describe a walk through a town by the sea, from morning to evening."
_SPEED_TOKENS: Final = 64
_SPEED_ANSWERS: Final = 3
_STORED_CHARACTERS: Final = 200
_NUMBER: Final = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_FIELD_NAMES: Final = ("title", "city", "owner", "count", "score", "active", "tags", "level", "day")
_TEXTS: Final = ("Lima", "Oslo", "Ada", "Rome", "Nairobi", "Grace", "Quito", "Edsger")
_DAYS: Final = ("monday", "friday", "sunday")
_TOOLS: Final = (
    *("book_table", "send_message", "set_alarm", "add_task"),
    *("find_flight", "play_song", "turn_lamp", "order_part"),
)
_KINDS: Final = ("string", "integer", "boolean", "enum", "array")


class GreedyAnswer(NamedTuple):
    """A complete greedy answer."""

    text: str
    calls: tuple[tuple[str, str], ...]
    """Name and arguments of each tool call."""


def ask(
    engine: Engine,
    prompt: str,
    max_tokens: int,
    *,
    tools: tuple[dict[str, object], ...] = (),
) -> GreedyAnswer:
    """Answer a prompt greedily, without reasoning. Raises LocalchatError."""
    request = GenerateRequest(
        Messages((Message("user", prompt),), tools=tools, thinking="off"),
        _GREEDY,
        max_tokens=max_tokens,
        speculation=False,
    )
    texts = []
    calls = dict[int, list[str]]()
    for event in engine.generate(request):
        match event:
            case Text():
                texts.append(event.text)
            case ToolCall():
                call = calls.setdefault(event.call, ["", ""])
                call[0] = call[0] or event.name
                call[1] += event.arguments
    named_calls = tuple((name, arguments) for name, arguments in calls.values())
    return GreedyAnswer("".join(texts), named_calls)


def decode_rate(engine: Engine) -> float | None:
    """Measure the tokens per second of a single answer, the best of a few. None if none is reported."""
    request = GenerateRequest(
        Messages((Message("user", _SPEED_PROMPT),), thinking="off"),
        _GREEDY,
        max_tokens=_SPEED_TOKENS,
        speculation=False,
    )
    rates = []
    for _ in range(_SPEED_ANSWERS):
        for event in engine.generate(request):
            if isinstance(event, Done) and event.timings.decode_tokens_per_s is not None:
                rates.append(event.timings.decode_tokens_per_s)
    # Other programs only ever make an answer slower.
    return max(rates, default=None)


class SchemaTask(NamedTuple):
    """A prompt whose answer must be JSON of this schema."""

    prompt: str
    schema: dict[str, Any]


class ToolTask(NamedTuple):
    """A prompt whose answer must be a tool call with these arguments."""

    prompt: str
    tool: dict[str, Any]
    name: str
    arguments: dict[str, Any]


def schema_task(number: int) -> SchemaTask:
    """Generate the JSON task of this number, the same on every call."""
    draw = random.Random(f"schema {number}")
    schema = _object_schema(draw, 2 + number % 3)
    if number % 2:
        schema["properties"]["place"] = _object_schema(draw, 2)
        schema["required"].append("place")
    prompt = (
        "Invent an example and write it as one JSON object that fits this JSON schema. Answer with the JSON "
        f"alone.\n{json.dumps(schema)}"
    )
    return SchemaTask(prompt, schema)


def tool_task(number: int) -> ToolTask:
    """Generate the tool task of this number, the same on every call."""
    draw = random.Random(f"tool {number}")
    schema = _object_schema(draw, 1 + number % 3)
    name = _TOOLS[number % len(_TOOLS)]
    arguments = {key: _draw_value(draw, part) for key, part in schema["properties"].items()}
    values = ", ".join(f"{key} {json.dumps(value)}" for key, value in arguments.items())
    function = {"name": name, "description": name.replace("_", " "), "parameters": schema}
    tool = {"type": "function", "function": function}
    return ToolTask(f"Call the tool {name} with {values}.", tool, name, arguments)


def _object_schema(draw: random.Random, count: int) -> dict[str, Any]:
    names = draw.sample(_FIELD_NAMES, count)
    return {
        "type": "object",
        "properties": {name: _field_schema(draw.choice(_KINDS)) for name in names},
        "required": names,
        "additionalProperties": False,
    }


def _field_schema(kind: str) -> dict[str, Any]:
    if kind == "enum":
        return {"type": "string", "enum": list(_DAYS)}
    if kind == "array":
        return {"type": "array", "items": {"type": "string"}}
    return {"type": kind}


def _draw_value(draw: random.Random, schema: Mapping[str, Any]) -> Any:  # noqa: ANN401 - any JSON
    if "enum" in schema:
        return draw.choice(schema["enum"])
    match schema["type"]:
        case "array":
            return draw.sample(_TEXTS, 2)
        case "string":
            return draw.choice(_TEXTS)
        case "boolean":
            return draw.random() < 0.5
    return draw.randrange(2, 99)


def json_outcome(engine: Engine, number: int) -> TaskOutcome:
    """Check whether an answer without a grammar is JSON that fits a generated schema."""
    task = schema_task(number)
    text = ask(engine, task.prompt, _JSON_TOKENS).text
    try:
        passed = fits(_parse_json(text), task.schema)
    except (ValueError, RecursionError):
        passed = False
    return TaskOutcome(f"schema {number + 1}", passed, text[:_STORED_CHARACTERS])


def _parse_json(text: str) -> object:
    """Parse the JSON of an answer, also within a code fence. Raises ValueError."""
    text = text.strip()
    if text.startswith("```"):
        text = text.partition("\n")[2].rpartition("```")[0]
    value: object = json.loads(text)
    return value


def fits(value: object, schema: Mapping[str, Any]) -> bool:
    """Return True if a value fits a generated schema."""
    if "enum" in schema:
        return value in schema["enum"]
    match schema["type"]:
        case "object":
            properties = schema["properties"]
            return (
                isinstance(value, dict)
                and set(schema["required"]) <= set(value) <= set(properties)
                and all(fits(item, properties[key]) for key, item in value.items())
            )
        case "array":
            return isinstance(value, list) and all(fits(item, schema["items"]) for item in value)
        case "string":
            return isinstance(value, str)
        case "boolean":
            return isinstance(value, bool)
    return isinstance(value, int) and not isinstance(value, bool)


def tool_outcome(engine: Engine, number: int) -> TaskOutcome:
    """Check whether a generated tool is called with the arguments of the prompt."""
    task = tool_task(number)
    answer = ask(engine, task.prompt, _JSON_TOKENS, tools=(task.tool,))
    shown = "; ".join(f"{name}({arguments})" for name, arguments in answer.calls) or answer.text
    passed = False
    if len(answer.calls) == 1:
        name, arguments = answer.calls[0]
        try:
            passed = name == task.name and json.loads(arguments or "{}") == task.arguments
        except ValueError:
            passed = False
    return TaskOutcome(task.name, passed, shown[:_STORED_CHARACTERS])


def needle_outcome(engine: Engine, number: int, hay: NeedleText, length: int) -> TaskOutcome:
    """Check whether the model finds the needle of this number."""
    needle = hay.needles[number]
    question = (
        f"{hay.text}\n\nWhat is the code of the {needle.subject}? Answer with the number alone."
    )
    text = ask(engine, question, _NEEDLE_TOKENS).text
    return TaskOutcome(
        f"{length:,} at {needle.depth:.0%}",
        passed=needle.code in text.replace(",", ""),
        answer=text[:_STORED_CHARACTERS],
        length=length,
        depth=needle.depth,
    )


class ExamQuestion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A line of a questions file."""

    question: str
    answer: str | float | tuple[str | float, ...]
    """Right answer, or several."""
    match: Literal["exact", "contains", "number", "regex"] = "exact"
    """Comparison: `exact` ignores case, spaces and a final dot. `number` compares the last number."""

    @property
    def answers(self) -> tuple[str, ...]:
        """Right answers as text."""
        if isinstance(self.answer, tuple):
            answers = self.answer
        else:
            answers = (self.answer,)
        return tuple(f"{answer:g}" if isinstance(answer, float) else answer for answer in answers)


def read_questions(path: Path) -> tuple[ExamQuestion, ...]:
    """Read the questions of a JSONL file. Raises UsageError that names the line."""
    try:
        lines = read_input(path).decode("utf-8").splitlines()
    except OSError as problem:
        raise UsageError(f"--set {path} cannot be read: {reason(problem)}") from problem
    except UnicodeError as problem:
        raise UsageError(f"--set {path} cannot be read: it is not UTF-8") from problem
    return tuple(_parse_questions(path, lines))


def _parse_questions(path: Path, lines: Sequence[str]) -> Iterator[ExamQuestion]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            question = msgspec.json.decode(line, type=ExamQuestion)
            if question.match == "regex":
                for pattern in question.answers:
                    re.compile(pattern)
        except (msgspec.DecodeError, re.error) as problem:
            raise UsageError(
                f"--set {path}: line {number} is not a question: {problem}",
                hint='as in {"question": "What is 6 times 7?", "answer": "42", "match": "number"}',
            ) from problem
        yield question


def question_outcome(engine: Engine, number: int, questions: Sequence[ExamQuestion]) -> TaskOutcome:
    """Check whether the model answers the question of this number right."""
    question = questions[number]
    text = ask(engine, question.question, _QUESTION_TOKENS).text
    passed = any(is_right(text, answer, question.match) for answer in question.answers)
    return TaskOutcome(f"question {number + 1}", passed, text[:_STORED_CHARACTERS])


def is_right(text: str, answer: str, match: str) -> bool:
    """Return True if a text gives an answer, by the rules of `ExamQuestion.match`."""
    if match == "regex":
        return re.search(answer, text) is not None
    if match == "number":
        numbers = _NUMBER.findall(text)
        expected = _NUMBER.findall(answer)
        return bool(numbers and expected) and _value(numbers[-1]) == _value(expected[-1])
    text = _simplified(text)
    answer = _simplified(answer)
    if match == "contains":
        return answer in text
    return answer == text


def _value(number: str) -> float:
    return float(number.replace(",", ""))


def _simplified(text: str) -> str:
    return " ".join(text.casefold().split()).rstrip(".")
