"""Workloads of a benchmark: the shapes of its requests, and their texts.

Every text is drawn from a seed, so that no two requests share a prefix unless their shape says so.
"""

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from localchat.errors import UsageError
from localchat.measure.sample_text import sample_sentences

Message = dict[str, str]
Kind = Literal["unique", "prefix", "edit", "file"]

_MOST_TOKENS: Final = 1_000_000
_LEAST_WORDS: Final = 4
_EDIT_LINE_WORDS: Final = 4
_TASK: Final = "Continue this text in the same style."


def prose(words: int, seed: int | str) -> str:
    """Compose natural English text. Texts of different seeds share no prefix.

    Sentences come in random order, and repeat only if a text is longer than all of them.
    """
    draw = random.Random(seed)
    chosen = [f"{draw.randrange(10**9)}."]
    while len(chosen) < words:
        sentences = list(sample_sentences())
        draw.shuffle(sentences)
        for sentence in sentences:
            chosen += sentence.split()
            if len(chosen) >= words:
                break
    return " ".join(chosen[:words])


@dataclass(frozen=True, slots=True)
class Shape:
    """Lengths of a request and its answer."""

    name: str
    prompt_tokens: int
    """Of all messages together, the shared part included."""
    output_tokens: int
    kind: Kind = "unique"
    """`prefix`: most of the prompt is the same for all; `edit`: the answer repeats most of the prompt."""
    about: str = ""
    prompts: tuple[tuple[Message, ...], ...] = ()
    """Conversations of a file, for the kind `file`."""


SHAPES: Final[Mapping[str, Shape]] = {
    shape.name: shape
    for shape in (
        Shape("chat", 200, 200, about="a question and its answer"),
        Shape("prompt", 2000, 50, about="a long text and a short answer"),
        Shape("writing", 50, 500, about="a short question and a long answer"),
        Shape("prefix", 1200, 100, "prefix", "1,000 tokens that all requests share, and 200 more"),
        Shape("edit", 400, 400, "edit", "a file that is written again with a change"),
    )
}
_SHARED_SHARE: Final = 5 / 6
"""Of the prompt of the shape `prefix`."""


def parse_shape(word: str) -> Shape:
    """A shape by its name, or by its lengths as 512+128. Raises UsageError."""
    if shape := SHAPES.get(word):
        return shape
    prompt, plus, output = word.partition("+")
    lengths = _length(prompt), _length(output)
    if not plus or not all(0 < length <= _MOST_TOKENS for length in lengths):
        raise UsageError(
            f"--shape: there is no shape {word!r}",
            hint=f"use one of {', '.join(SHAPES)}; or give the tokens of prompt and answer, as 512+128",
        )
    return Shape(word, *lengths)


def _length(text: str) -> int:
    return int(text) if text.isascii() and text.isdecimal() else 0


@dataclass(frozen=True, slots=True)
class TokenScale:
    """Number of tokens that a server makes of our words, and of what it puts around them."""

    tokens_per_word: float = 1.4
    overhead_tokens: float = 0.0
    """Of the chat template."""
    known: bool = False
    """False: the server reported no usage, and the lengths of prompts are estimates."""

    @classmethod
    def of(cls, measured: Iterable[tuple[int, int]]) -> "TokenScale":
        """The scale that two pairs of words and prompt tokens show; a guess where they show none."""
        (few, fewer_tokens), (many, more_tokens) = measured
        per_word = (more_tokens - fewer_tokens) / (many - few)
        if not fewer_tokens or per_word <= 0:
            return cls()
        return cls(per_word, fewer_tokens - few * per_word, known=True)

    def words(self, tokens: float, *, whole_prompt: bool = True) -> int:
        """Words that make this many tokens. whole_prompt: the template's own tokens count too."""
        text = tokens - (self.overhead_tokens if whole_prompt else 0.0)
        return max(round(text / self.tokens_per_word), _LEAST_WORDS)


def messages(shape: Shape, scale: TokenScale, seed: str, run: str) -> list[Message]:
    """The messages of one request. seed: of this request; run: of the benchmark, for what requests share."""
    if shape.kind == "prefix":
        shared = scale.words(shape.prompt_tokens * _SHARED_SHARE, whole_prompt=False)
        own = max(scale.words(shape.prompt_tokens) - shared, _LEAST_WORDS)
        return [_user(f"{prose(shared, f'{run} prefix')} {prose(own, seed)}")]
    if shape.kind == "edit":
        words = prose(scale.words(shape.prompt_tokens - 20), seed).split()
        lines = [
            " ".join(words[at : at + _EDIT_LINE_WORDS])
            for at in range(0, len(words), _EDIT_LINE_WORDS)
        ]
        text = "\n".join(lines)
        return [_user(f"{text}\n\nWrite this text again; replace {words[0]} by {words[1]}.")]
    if shape.kind == "file":
        return list(random.Random(seed).choice(shape.prompts))
    count = max(scale.words(shape.prompt_tokens) - len(_TASK.split()), _LEAST_WORDS)
    return [_user(f"{prose(count, seed)}\n\n{_TASK}")]


def earlier_turn(context_tokens: int, scale: TokenScale, seed: str) -> list[Message]:
    """An earlier question and answer of about `context_tokens`; empty for none."""
    if not context_tokens:
        return []
    text = prose(scale.words(context_tokens, whole_prompt=False), seed)
    return [_user(text), {"role": "assistant", "content": "Noted."}]


def chat_body(
    messages: list[Message], output_tokens: int, fields: Mapping[str, Any]
) -> dict[str, Any]:
    """A streamed chat completion. fields: what the server takes besides."""
    return {
        "messages": messages,
        "max_tokens": output_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        **fields,
    }


def _user(text: str) -> Message:
    return {"role": "user", "content": text}
