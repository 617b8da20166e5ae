"""Workload of a measurement: shapes of requests, and texts for them.

Every text is drawn from a seed, so that two requests share a prefix only if their shape says so.
"""

import random
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import cycle
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple

import msgspec
from msgspec import Meta

from localchat.config.paths import read_input
from localchat.errors import UsageError, reason

Message = dict[str, str]
Kind = Literal["unique", "prefix", "edit", "file", "disruption"]

SAMPLE_TEXT: Final = "sample text"
"""Name of the package's own text in results."""
_SENTENCE: Final = re.compile(
    r"(?:(?<=[.?!]\s)|(?<=\n))[A-Z][A-Za-z0-9 ,;:'()%-]{24,260}[.?!](?=\s)"
)
"""A sentence in plain words, without code, markup or tables."""
_MAX_TOKENS: Final = 1_000_000
_MIN_WORDS: Final = 4
_EDIT_LINE_WORDS: Final = 4
_TASKS: Final = (
    "What would you object to in this text?",
    "Explain the main point of this text to a beginner.",
    "What should the author write next, and why?",
    "Which questions does this text leave open?",
    "Tell me something that this text does not mention.",
    "Give this text a title, and explain your choice.",
)
"""Tasks whose answers have to be written, and do not copy the text."""
_FILE_ANSWER_TOKENS: Final = 200
"""Answer length of a prompts file that states none."""


def sample_text() -> str:
    """Return about 60 kB of prose, code, tables and dialogue, written for this project."""
    return files("localchat.measure").joinpath("text.txt").read_text("utf-8")


@cache
def sample_sentences() -> tuple[str, ...]:
    """Return the plain English sentences of the sample text."""
    sentences = _SENTENCE.findall(sample_text())
    return tuple(dict.fromkeys(sentence.replace("\n", " ") for sentence in sentences))


def prose(words: int, seed: int | str) -> str:
    """Return connected English text. Texts with different seeds share no prefix.

    It starts at a random sentence of the sample, and repeats only if it is longer than the sample.
    """
    draw = random.Random(seed)
    sentences = sample_sentences()
    start = draw.randrange(len(sentences))
    chosen = [f"{draw.randrange(10**9)}."]
    for sentence in cycle(sentences[start:] + sentences[:start]):
        if len(chosen) >= words:
            break
        chosen += sentence.split()
    return " ".join(chosen[:words])


@dataclass(frozen=True, slots=True)
class Shape:
    """Lengths of a request and its answer."""

    name: str
    prompt_tokens: int
    """Length of all messages, including the shared part."""
    output_tokens: int
    kind: Kind = "unique"
    """`prefix` requests share most of the prompt, and answers of `edit` repeat most of it."""
    about: str = ""
    prompts: tuple[tuple[Message, ...], ...] = ()
    """Conversations of a prompts file, for the kind `file`. Stored results leave them out."""
    prompt_count: int = 0


SHAPES: Final[Mapping[str, Shape]] = {
    shape.name: shape
    for shape in (
        Shape("chat", 200, 200, about="a question and its answer"),
        Shape("prompt", 2000, 50, about="a long text and a short answer"),
        Shape("writing", 50, 500, about="a short question and a long answer"),
        Shape("prefix", 1200, 100, "prefix", "1,000 tokens that all requests share, and 200 more"),
        Shape("edit", 400, 400, "edit", "a file that is written again with a change"),
        Shape("disruption", 200, 300, "disruption", "streams, between which long prompts arrive"),
    )
}
BURST: Final = Shape("burst", 2000, 8)
"""Prompts that arrive while the streams of a disruption decode: one for each stream."""
DISRUPTION_CLIENTS: Final = 4
_PREFIX_SHARE: Final = 5 / 6
"""Shared part of a prompt of the shape `prefix`."""


def parse_shape(text: str) -> Shape:
    """Return a shape by name or by lengths, such as 512+128. Raises UsageError."""
    if shape := SHAPES.get(text):
        return shape
    prompt, plus, output = text.partition("+")
    lengths = _parse_length(prompt), _parse_length(output)
    if not plus or not all(0 < length <= _MAX_TOKENS for length in lengths):
        raise UsageError(
            f"--shape: unknown shape {text!r}",
            hint=f"use one of {', '.join(SHAPES)}; or give the tokens of prompt and answer, as 512+128",
        )
    return Shape(text, *lengths)


def _parse_length(text: str) -> int:
    if text.isascii() and text.isdecimal():
        return int(text)
    return 0


class _PromptMessage(msgspec.Struct, frozen=True):
    role: Annotated[str, Meta(min_length=1)]
    content: Annotated[str, Meta(min_length=1)]


class _PromptBody(msgspec.Struct, frozen=True):
    messages: Annotated[list[_PromptMessage], Meta(min_length=1)] | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None


class _PromptLine(_PromptBody, frozen=True):
    """A line with `prompt`, `messages`, or `body` as in the input of `localchat batch`."""

    prompt: Annotated[str, Meta(min_length=1)] | None = None
    body: _PromptBody | None = None


def prompt_shape(path: Path) -> Shape:
    """Read a prompts file as a shape that draws from its lines. Raises UsageError."""
    try:
        text = read_input(path).decode("utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise UsageError(f"--prompts {path} cannot be read: {reason(problem)}") from problem
    prompts: list[tuple[Message, ...]] = []
    output_tokens = 0
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            conversation, max_tokens = _parse_prompt(path, number, line)
            prompts.append(conversation)
            output_tokens = max(output_tokens, max_tokens)
    if not prompts:
        raise UsageError(f"--prompts {path} has no prompts")
    return conversations_shape(path.name, prompts, output_tokens)


def conversations_shape(
    name: str, prompts: Sequence[tuple[Message, ...]], output_tokens: int = 0
) -> Shape:
    """Return a shape that draws from these conversations. output_tokens: 0 for a usual answer."""
    # An estimate at four characters per token. Results show the server's own count.
    characters = sum(len(message["content"]) for prompt in prompts for message in prompt)
    return Shape(
        name,
        prompt_tokens=max(round(characters / len(prompts) / 4), 1),
        output_tokens=output_tokens or _FILE_ANSWER_TOKENS,
        kind="file",
        prompts=tuple(prompts),
        prompt_count=len(prompts),
    )


def _parse_prompt(path: Path, number: int, line: str) -> tuple[tuple[Message, ...], int]:
    """Return the messages of a line, and its token limit, or 0 without one."""
    try:
        parsed = msgspec.json.decode(line, type=_PromptLine)
    except msgspec.DecodeError as problem:
        raise UsageError(f"--prompts {path}: line {number} cannot be used: {problem}") from problem
    if parsed.prompt is not None:
        return (_user(parsed.prompt),), parsed.max_tokens or 0
    body = parsed.body or parsed
    if not body.messages:
        raise UsageError(
            f"--prompts {path}: line {number} has no prompt",
            hint='a line is {"prompt": "..."} or {"messages": [{"role": "user", "content": "..."}]}',
        )
    conversation = tuple(
        {"role": message.role, "content": message.content} for message in body.messages
    )
    return conversation, body.max_tokens or 0


@dataclass(frozen=True, slots=True)
class TokenScale:
    """Tokens that a server makes of our words, and of the chat template around them.

    Sentences differ: a prompt of 600 tokens is off by 7 % (standard deviation with SmolLM2's tokenizer).
    Results show the server's own counts.
    """

    tokens_per_word: float = 1.4
    overhead_tokens: float = 0.0
    """Tokens of the chat template."""

    @classmethod
    def of(cls, probes: Iterable[tuple[int, int]]) -> "TokenScale":
        """Fit a short and a long probe, each (words, prompt tokens). Falls back to a guess."""
        (words, tokens), (more_words, more_tokens) = probes
        per_word = (more_tokens - tokens) / (more_words - words)
        if not tokens or per_word <= 0:
            return cls()
        return cls(per_word, tokens - words * per_word)

    def words(self, tokens: float, *, whole_prompt: bool = True) -> int:
        """Return the words for this many tokens. A whole prompt spends some on the template."""
        if whole_prompt:
            tokens -= self.overhead_tokens
        return max(round(tokens / self.tokens_per_word), _MIN_WORDS)


def messages(shape: Shape, scale: TokenScale, seed: str, run_id: str) -> list[Message]:
    """Write the messages of a request. Requests of one `run_id` share the prefix of a `prefix` shape."""
    if shape.kind == "file":
        return list(random.Random(seed).choice(shape.prompts))
    if shape.kind == "prefix":
        shared = scale.words(shape.prompt_tokens * _PREFIX_SHARE, whole_prompt=False)
        own = max(scale.words(shape.prompt_tokens) - shared, _MIN_WORDS)
        return [_user(f"{prose(shared, f'{run_id} prefix')} {prose(own, seed)}")]
    if shape.kind == "edit":
        words = prose(scale.words(shape.prompt_tokens - 20), seed).split()
        starts = range(0, len(words), _EDIT_LINE_WORDS)
        text = "\n".join(" ".join(words[start : start + _EDIT_LINE_WORDS]) for start in starts)
        return [_user(f"{text}\n\nWrite this text again; replace {words[0]} by {words[1]}.")]
    task = random.Random(seed).choice(_TASKS)
    count = max(scale.words(shape.prompt_tokens) - len(task.split()), _MIN_WORDS)
    return [_user(f"{prose(count, seed)}\n\n{task}")]


def chat_body(
    messages: list[Message], output_tokens: int, fields: Mapping[str, Any]
) -> dict[str, Any]:
    """Build a streamed chat completion with additional fields."""
    return {
        "messages": messages,
        "max_tokens": output_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        **fields,
    }


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


_COLORS: Final = ("amber", "violet", "silver", "green", "crimson", "ivory", "copper", "azure")
_THINGS: Final = ("door", "garden", "vault", "bridge", "tower", "cellar", "ship", "lantern")
_NEEDLE_TOKENS: Final = 16
_NEEDLE_ROOM_TOKENS: Final = 96
"""Room for a needle's question, its answer and the chat template."""


class Needle(NamedTuple):
    """A fact hidden in a long text."""

    depth: float
    """Position in the text, from 0 to 1."""
    subject: str
    code: str


class NeedleText(NamedTuple):
    """A long text with needles. The questions about them share the text as a prefix."""

    text: str
    needles: tuple[Needle, ...]


def needle_text(length: int, depths: int, tokens_per_word: float) -> NeedleText:
    """Write a text of about `length` tokens with evenly spread needles. Deterministic."""
    draw = random.Random(f"needles {length}")
    subjects = [f"{color} {thing}" for color in _COLORS for thing in _THINGS]
    text_tokens = length - _NEEDLE_ROOM_TOKENS - _NEEDLE_TOKENS * depths
    count = max(int(text_tokens / tokens_per_word), 8)
    words = prose(count, f"hay {length}").split()
    needles = []
    for number, subject in enumerate(draw.sample(subjects, depths)):
        depth = number / (depths - 1) if depths > 1 else 0.5
        needles.append(Needle(depth, subject, str(draw.randrange(10000, 99999))))
    # From the end, so that a sentence moves no needle that is still to come.
    for needle in reversed(needles):
        words.insert(
            int(needle.depth * count), f"The code of the {needle.subject} is {needle.code}."
        )
    return NeedleText(" ".join(words), tuple(needles))
