"""Mixed Markdown of a given length, the same for a seed: model-like text without a model."""

import random
from collections.abc import Iterator

TOKEN_CHARACTERS = 4.2

_TEXT = (
    "the cache keeps keys and values of tokens that were computed before so a prompt with a known "
    "beginning costs less memory bandwidth decides how fast a model writes while compute decides how "
    "fast it reads a draft is checked in one step and only what is equal stays blocks are shared"
)
_WORDS = _TEXT.split()
_CODE = """def share(blocks: dict[int, list[int]], wanted: list[int]) -> int:
    \"\"\"How many tokens of a prompt are known.\"\"\"
    known = 0
    for number, token in enumerate(wanted):
        if token not in blocks.get(number, []):  # the first that differs ends it
            break
        known += 1
    return known
"""


def markdown(tokens: float, seed: int) -> str:
    """About so many tokens of paragraphs, lists, tables and code."""
    chance = random.Random(seed)
    parts: list[str] = []
    length = 0
    while length < tokens * TOKEN_CHARACTERS:
        parts.append(_part(chance, len(parts)))
        length += len(parts[-1]) + 2
    return "\n\n".join(parts)[: int(tokens * TOKEN_CHARACTERS)]


def pieces(text: str) -> Iterator[str]:
    """The text in pieces of a token each, 4.2 characters on average."""
    at = 0.0
    while at < len(text):
        yield text[int(at) : int(at + TOKEN_CHARACTERS)]
        at += TOKEN_CHARACTERS


def _part(chance: random.Random, number: int) -> str:
    match number % 7:
        case 1:
            return f"## {_sentence(chance, 4)}"
        case 3:
            return "\n".join(
                f"- **{_sentence(chance, 2)}** {_sentence(chance, 9)}" for _ in range(4)
            )
        case 4:
            return f"```python\n{_CODE}```"
        case 6:
            rows = "\n".join(
                f"| {_sentence(chance, 2)} | {chance.random():.3f} |" for _ in range(4)
            )
            return f"| what | share |\n|---|---:|\n{rows}"
        case _:
            return " ".join(
                f"{_sentence(chance, 9)} *{_sentence(chance, 2)}* `{chance.choice(_WORDS)}`."
                for _ in range(4)
            )


def _sentence(chance: random.Random, words: int) -> str:
    return " ".join(chance.choice(_WORDS) for _ in range(words))
