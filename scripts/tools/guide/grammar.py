"""The phrase grammar: `(a|b)` picks one, `(a|)` may be empty, `<name>` picks from the lexicon,
`[x]` is x itself.

Patterns nest. A pattern is parsed once; writing a phrase is a walk with a seeded random source.
"""

import re
from functools import cache
from random import Random
from typing import TypeAlias

# a text, a reference to the lexicon, a choice between sequences
Part: TypeAlias = "str | Reference | Choice"


class Reference:
    """A reference to the lexicon, `<name>`."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class Choice:
    """`(a|b)`; each option is a sequence of parts."""

    __slots__ = ("options",)

    def __init__(self, options: list[list[Part]]) -> None:
        self.options = options


_TOKENS = re.compile(r"[(|)]|<\w+>|\[.\]|[^(|)<\[]+|.", re.S)


@cache
def parse(pattern: str) -> Choice:
    """Parse a pattern to a tree; raises ValueError for parentheses that do not match."""
    stack: list[list[list[Part]]] = [[[]]]
    for token in _TOKENS.findall(pattern):
        if token == "(":
            stack.append([[]])
        elif token == "|":
            stack[-1].append([])
        elif token == ")":
            if len(stack) == 1:
                raise ValueError(f"unmatched ) in {pattern!r}")
            options = stack.pop()
            stack[-1][-1].append(Choice(options))
        elif token[0] == "<" and token[-1] == ">" and len(token) > 2:
            stack[-1][-1].append(Reference(token[1:-1]))
        elif len(token) == 3 and token[0] == "[" and token[2] == "]":
            stack[-1][-1].append(token[1])
        else:
            stack[-1][-1].append(token)
    if len(stack) != 1:
        raise ValueError(f"unmatched ( in {pattern!r}")
    return Choice(stack[0])


def _walk(parts: list[Part], lexicon: dict[str, list[str]], rng: Random, out: list[str]) -> None:
    for part in parts:
        if isinstance(part, str):
            out.append(part)
        elif isinstance(part, Reference):
            out.append(phrase(rng.choice(lexicon[part.name]), lexicon, rng))
        else:
            _walk(rng.choice(part.options), lexicon, rng, out)


def phrase(pattern: str, lexicon: dict[str, list[str]], rng: Random) -> str:
    """Draw one phrase of the pattern, with tidied blanks."""
    out: list[str] = []
    _walk([parse(pattern)], lexicon, rng, out)
    return re.sub(r"\s+([?,.!])", r"\1", re.sub(r"  +", " ", "".join(out)).strip())
