"""Converts GBNF, llama.cpp's form of grammars, to Lark in linear time.

Rules without recursion become terminals, which llguidance matches faster. llguidance's own converter takes
quadratic time, and rejects names that differ in a hyphen, in case or from `start`, and most `\\u` escapes.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from localchat.core.structured_output.lark import literal

_TERM: Final = re.compile(
    r'(?P<blank>\s+|#[^\r\n]*)|(?P<head>[\w-]+)\s*::=|(?P<name>[\w-]+)|"(?P<text>(?:\\.|[^"\\])*)"'
    r"|\[(?P<negation>\^?)(?P<set>(?:\\.|[^\]\\])*)\]|\{\s*(?P<low>\d+)\s*(?P<comma>,?)\s*(?P<high>\d*)\s*\}"
    r"|(?P<any>\.)|(?P<operator>[|()*+?])",
    re.DOTALL,
)
_CHARACTER: Final = r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)|."
_CHARACTERS: Final = re.compile(_CHARACTER, re.DOTALL)
_RANGE: Final = re.compile(rf"({_CHARACTER})(?:-({_CHARACTER}))?", re.DOTALL)
_ESCAPES: Final = {"n": "\n", "r": "\r", "t": "\t"}
_ANY: Final = r"/(.|\n)/"
_ROOT: Final = "root"
_START: Final = "start"
"""Lark's name of the root, which cannot be a terminal."""


class LarkGrammar(NamedTuple):
    """A converted grammar."""

    source: str
    names: Mapping[str, str]
    """Names of the rules in GBNF, by their names in Lark."""


def lark_from_gbnf(gbnf: str) -> LarkGrammar:
    """Convert a grammar. Raises ValueError with the fault."""
    rules: dict[str, list[re.Match[str]]] = {}
    terms: list[re.Match[str]] | None = None
    for term in _terms(gbnf):
        if term["head"]:
            terms = rules[term["head"]] = []
        elif terms is None:
            raise ValueError("it does not begin with a rule")
        else:
            terms.append(term)
    if _ROOT not in rules:
        raise ValueError(f"there is no rule {_ROOT!r}")
    references = {
        name: {term["name"] for term in terms if term["name"]} for name, terms in rules.items()
    }
    for missing in set().union(*references.values()) - set(rules):
        raise ValueError(f"the rule {missing!r} is missing")
    names = _lark_names(rules, _terminals(references))
    lines = [f"{names[name]}: {_expression(terms, names)}\n" for name, terms in rules.items()]
    if names[_ROOT] != _START:
        lines.append(f"{_START}: {names[_ROOT]}\n")
    return LarkGrammar("".join(lines), {lark: name for name, lark in names.items()})


def _terms(gbnf: str) -> Iterator[re.Match[str]]:
    position = 0
    while position < len(gbnf):
        term = _TERM.match(gbnf, position)
        if term is None:
            line = gbnf.count("\n", 0, position) + 1
            raise ValueError(f"line {line} cannot be read at {gbnf[position : position + 20]!r}")
        position = term.end()
        if term["blank"] is None:
            yield term


def _terminals(references: Mapping[str, set[str]]) -> set[str]:
    """Return the rules that refer to no recursive rule, directly or not."""
    users: dict[str, list[str]] = {name: [] for name in references}
    for name, targets in references.items():
        for target in targets:
            users[target].append(name)
    unresolved = {name: len(targets) for name, targets in references.items()}
    waiting = [name for name, count in unresolved.items() if not count]
    terminals: set[str] = set()
    while waiting:
        name = waiting.pop()
        terminals.add(name)
        for user in users[name]:
            unresolved[user] -= 1
            if not unresolved[user]:
                waiting.append(user)
    return terminals


def _lark_names(rules: Mapping[str, object], terminals: set[str]) -> dict[str, str]:
    """Return a unique name for each rule, in capitals for a terminal."""
    names: dict[str, str] = {}
    used = {_START}
    for index, name in enumerate(rules):
        if name == _ROOT and name not in terminals:
            names[name] = _START
            continue
        lark = re.sub(r"\W", "_", name, flags=re.ASCII).lower()
        while lark in used or not lark[0].isalpha():
            lark = f"rule_{index}_{lark}"
        used.add(lark)
        names[name] = lark
        if name in terminals:
            names[name] = lark.upper()
    return names


def _expression(terms: list[re.Match[str]], names: Mapping[str, str]) -> str:
    """Return the alternatives of a rule. An empty one becomes an empty text."""
    pieces: list[str] = []
    is_empty = True
    for term in terms:
        operator = term["operator"]
        if is_empty and operator in ("|", ")"):
            pieces.append('""')
        is_empty = operator in ("|", "(")
        if operator:
            pieces.append(operator)
        elif term["name"]:
            pieces.append(names[term["name"]])
        elif term["text"] is not None:
            pieces.append(literal("".join(map(_character, _CHARACTERS.findall(term["text"])))))
        elif term["low"]:
            high = term["high"] if term["comma"] else term["low"]
            pieces.append(f"{{{term['low']},{high}}}")
        elif term["any"]:
            pieces.append(_ANY)
        else:
            pieces.append(_character_set(term))
    if is_empty:
        pieces.append('""')
    # Lark reads operators as part of the term before them.
    return re.sub(r" (?=[*+?{])", "", " ".join(pieces))


def _character_set(term: re.Match[str]) -> str:
    """Return the regular expression of a set such as `[^a-z\\n]`."""
    ranges = (
        "-".join(f"\\x{{{ord(_character(end)):x}}}" for end in ends if end)
        for ends in _RANGE.findall(term["set"])
    )
    return f"/[{term['negation']}{''.join(ranges)}]/"


def _character(text: str) -> str:
    """Return the character that is written so. Raises ValueError if it does not exist."""
    if not text.startswith("\\"):
        return text
    if len(text) == 2:
        return _ESCAPES.get(text[1], text[1])
    code = int(text[2:], 16)
    if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
        raise ValueError(f"there is no character {text}")
    return chr(code)
