"""Tasks whose outcome a program can check: needles, JSON, tool calls, questions; and greedy texts."""

import json
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, Literal, NamedTuple

import msgspec

from localchat.engine.events import Text, ToolCall
from localchat.engine.interface import Engine
from localchat.engine.request import GenerateRequest, Message, Messages, Sampling
from localchat.errors import UsageError, reason
from localchat.measure.quality_record import GreedyText, TaskOutcome
from localchat.measure.schemas import fits, json_value, schema_task, tool_task
from localchat.measure.workload import prose

GREEDY_PROMPTS: Final = (
    "Explain in three sentences why the sky is blue.",
    "Write a Python function that returns the median of a list.",
    "Name four things to check before a long walk in the mountains.",
    "Translate into German: The train to the coast leaves at ten past nine.",
    "How do I start a server that my editor can use?",
    "A shop sells pens at 3 for 2 euros. What do 12 pens cost? Think step by step.",
)
_GREEDY: Final = Sampling(temperature=0.0)
_GREEDY_TOKENS = 96
_JSON_TOKENS = 256
_NEEDLE_TOKENS = 32
_QUESTION_TOKENS = 256
_SHOWN: Final = 200
_COLORS: Final = ("amber", "violet", "silver", "green", "crimson", "ivory", "copper", "azure")
_THINGS: Final = ("door", "garden", "vault", "bridge", "tower", "cellar", "ship", "lantern")
_ROOM_TOKENS: Final = 96
"""Of a needle's question, its answer and the chat template."""
_NUMBER: Final = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


class Asked(NamedTuple):
    """A gathered answer."""

    text: str
    pieces: tuple[str, ...]
    """By tokens, or by words where none are named."""
    calls: tuple[tuple[str, str], ...]
    """Name and arguments of each tool call."""


def ask(
    engine: Engine,
    prompt: str,
    max_tokens: int,
    *,
    tools: tuple[dict[str, object], ...] = (),
    logprobs: bool = False,
) -> Asked:
    """Ask greedily, without reasoning. Raises LocalchatError."""
    request = GenerateRequest(
        Messages((Message("user", prompt),), tools=tools, thinking="off"),
        _GREEDY,
        max_tokens=max_tokens,
        logprobs=0 if logprobs else None,
        speculation=False,
    )
    texts = []
    pieces = []
    calls = dict[int, list[str]]()
    for event in engine.generate(request):
        match event:
            case Text():
                texts.append(event.text)
                pieces += [one.text.decode("utf-8", "replace") for one in event.logprobs]
            case ToolCall():
                call = calls.setdefault(event.call, ["", ""])
                call[0] = call[0] or event.name
                call[1] += event.arguments
    text = "".join(texts)
    named = tuple((name, arguments) for name, arguments in calls.values())
    return Asked(text, tuple(pieces) or tuple(re.findall(r"\S+\s*|\s+", text)), named)


# ---------------------------------------------------------------------------- greedy texts


def greedy_text(engine: Engine, prompt: str, base: GreedyText | None) -> GreedyText:
    """The greedy answer, and where it parts from the first model's."""
    pieces = ask(engine, prompt, _GREEDY_TOKENS, logprobs=True).pieces
    if base is None or base.pieces == pieces:
        return GreedyText(prompt, pieces)
    both = zip(base.pieces, pieces, strict=False)
    least = min(len(base.pieces), len(pieces))
    same = next((at for at, (one, two) in enumerate(both) if one != two), least)
    return GreedyText(prompt, pieces, same)


# ---------------------------------------------------------------------------- JSON and tools


def json_outcome(engine: Engine, number: int) -> TaskOutcome:
    """Whether an answer without a grammar is JSON that fits a generated schema."""
    task = schema_task(number)
    text = ask(engine, task.prompt, _JSON_TOKENS).text
    try:
        passed = fits(json_value(text), task.schema)
    except (ValueError, RecursionError):
        passed = False
    return TaskOutcome(f"schema {number + 1}", passed, text[:_SHOWN])


def tool_outcome(engine: Engine, number: int) -> TaskOutcome:
    """Whether a generated tool is called with the arguments that were named."""
    task = tool_task(number)
    found = ask(engine, task.prompt, _JSON_TOKENS, tools=(task.tool,))
    shown = "; ".join(f"{name}({arguments})" for name, arguments in found.calls) or found.text
    passed = False
    if len(found.calls) == 1 and found.calls[0][0] == task.name:
        try:
            passed = json.loads(found.calls[0][1] or "{}") == task.arguments
        except ValueError:
            passed = False
    return TaskOutcome(task.name, passed, shown[:_SHOWN])


# ---------------------------------------------------------------------------- needles


class NeedleText(NamedTuple):
    """A long text with a needle at each depth; its questions share the text as a prefix."""

    text: str
    needles: tuple[tuple[float, str, str], ...]
    """(depth, what is asked for, code)."""


def needle_text(length: int, depths: int, tokens_per_word: float) -> NeedleText:
    """A text of about `length` tokens, always the same, with needles from its beginning to its end."""
    draw = random.Random(f"needles {length}")
    subjects = [f"{color} {thing}" for color in _COLORS for thing in _THINGS]
    count = max(int((length - _ROOM_TOKENS - 16 * depths) / tokens_per_word), 8)
    words = prose(count, f"hay {length}").split()
    needles = []
    for number, subject in enumerate(draw.sample(subjects, depths)):
        depth = number / (depths - 1) if depths > 1 else 0.5
        needles.append((depth, subject, str(draw.randrange(10000, 99999))))
    for depth, subject, code in reversed(needles):
        words.insert(int(depth * count), f"The code of the {subject} is {code}.")
    return NeedleText(" ".join(words), tuple(needles))


def needle_outcome(engine: Engine, found: NeedleText, at: int, length: int) -> TaskOutcome:
    """Whether the needle of this number is found."""
    depth, subject, code = found.needles[at]
    question = f"{found.text}\n\nWhat is the code of the {subject}? Answer with the number alone."
    text = ask(engine, question, _NEEDLE_TOKENS).text
    name = f"{length:,} at {depth:.0%}"
    return TaskOutcome(name, code in text.replace(",", ""), text[:_SHOWN], length, depth)


# ---------------------------------------------------------------------------- questions


class ExamQuestion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A line of a questions file."""

    question: str
    answer: str | float | tuple[str | float, ...]
    """One right answer, or several."""
    match: Literal["exact", "contains", "number", "regex"] = "exact"
    """`exact`: the whole answer, apart from case, spaces and a final dot; `number`: its last number."""

    @property
    def answers(self) -> tuple[str, ...]:
        """The right answers as text."""
        many = self.answer if isinstance(self.answer, tuple) else (self.answer,)
        return tuple(f"{one:g}" if isinstance(one, float) else one for one in many)


def read_questions(path: Path) -> tuple[ExamQuestion, ...]:
    """The questions of a JSONL file. Raises UsageError that names the line."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeError) as problem:
        shown = reason(problem) if isinstance(problem, OSError) else "it is not UTF-8"
        raise UsageError(f"--set {path} cannot be read: {shown}") from problem
    return tuple(_questions(path, lines))


def _questions(path: Path, lines: Sequence[str]) -> Iterator[ExamQuestion]:
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
                f"--set {path}: line {number} is no question: {problem}",
                hint='as in {"question": "What is 6 times 7?", "answer": "42", "match": "number"}',
            ) from problem
        yield question


def question_outcome(engine: Engine, number: int, question: ExamQuestion) -> TaskOutcome:
    """Whether a question is answered right."""
    text = ask(engine, question.question, _QUESTION_TOKENS).text
    passed = any(is_right(text, answer, question.match) for answer in question.answers)
    return TaskOutcome(f"question {number + 1}", passed, text[:_SHOWN])


def is_right(text: str, answer: str, match: str) -> bool:
    """Whether a text gives an answer. match: see ExamQuestion."""
    if match == "regex":
        return re.search(answer, text) is not None
    if match == "number":
        found = _NUMBER.findall(text)
        wanted = _NUMBER.findall(answer)
        return bool(found and wanted) and _number(found[-1]) == _number(wanted[-1])
    one, two = (" ".join(each.casefold().split()).rstrip(".") for each in (text, answer))
    return two in one if match == "contains" else one == two


def _number(text: str) -> float:
    return float(text.replace(",", ""))
