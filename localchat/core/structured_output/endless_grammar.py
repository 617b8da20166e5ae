"""Endless grammars: a rule of Lark whose every alternative needs the same rule again.

No text ends such a rule, so an answer would be cut off at its limit. Only the references between rules matter:
strings, regular expressions and JSON schemas count as text that ends, and so does syntax that is unknown here.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Final

_TEXT: Final = re.compile(
    r'"(?:\\.|[^"\\\n])*"?i?|(?://|#)[^\n]*|/(?:\\.|[^/\\\n])+/?[a-z]*'
    r"|<[^>\n]{1,200}>|@[\w-]+|%(?:json|regex)\s*"
)
_DIRECTIVE: Final = re.compile(r"^[ \t]*%.*$", re.MULTILINE)
_HEAD: Final = re.compile(
    r"^[ \t]*[!?]?(\w+)(?:\.-?\d+)?[ \t]*(?:\[[^\]\n]*\])?[ \t]*:", re.MULTILINE
)
_TERM: Final = re.compile(r"->\s*\w+|\w+|\{[^}]*\}|~\s*\d+|[()\[\]|?*]")
_OPTIONAL: Final = re.compile(r"[?*]|[{~]\s*[0,]")
_ANY: Final = " 0 "
"""Stands for a text. No rule has this name."""
_MAX_PASSES: Final = 64
"""Limit of the work for a hostile grammar."""


def endless_rule(lark: str) -> str:
    """Return a rule that no text ends and that the start of the grammar reaches. Empty: none."""
    if "::" in lark or "%lark" in lark:
        return ""
    rules = _rules(_without_text(lark))
    names = list(rules)
    endless = set(names)
    for _ in range(_MAX_PASSES):
        before = len(endless)
        for name in names:
            if name in endless and _ends(rules[name], endless):
                endless.discard(name)
        if len(endless) == before:
            reached = _reached(rules)
            return next((name for name in sorted(names) if name in endless & reached), "")
        names.reverse()
    return ""


def _without_text(lark: str) -> str:
    """Replace strings, regular expressions and JSON by a name without a rule. Remove comments."""
    pieces: list[str] = []
    end = 0
    while match := _TEXT.search(lark, end):
        pieces.append(lark[end : match.start()])
        end = match.end()
        if match[0].startswith(("//", "#")):
            continue
        pieces.append(_ANY)
        if match[0].startswith("%"):
            try:
                _, end = json.JSONDecoder().raw_decode(lark, end)
            except (ValueError, RecursionError):
                continue
    return "".join((*pieces, lark[end:]))


def _rules(lark: str) -> dict[str, list[str]]:
    """Return the terms and operators of each rule."""
    lark = _DIRECTIVE.sub("", lark)
    heads = list(_HEAD.finditer(lark))
    ends = [head.start() for head in heads[1:]] + [len(lark)]
    # Without any head, there is one end too many.
    return {
        head[1]: _TERM.findall(lark, head.end(), end)
        for head, end in zip(heads, ends, strict=False)
    }


def _ends(terms: Sequence[str], endless: Collection[str]) -> bool:
    """Return True if an alternative of a rule needs none of the endless rules."""
    groups: list[tuple[bool, bool]] = []
    """Whether an alternative before each open group ends, and whether the items before it do."""
    any_ends = False
    items_end = True
    last_ends = True
    for term in terms:
        match term:
            case "(" | "[":
                groups.append((any_ends, items_end and last_ends))
                # Brackets are optional.
                any_ends = term == "["
                items_end = last_ends = True
            case ")" | "]" if groups:
                last_ends = any_ends or (items_end and last_ends)
                any_ends, items_end = groups.pop()
            case "|":
                any_ends = any_ends or (items_end and last_ends)
                items_end = last_ends = True
            case _ if _OPTIONAL.match(term):
                last_ends = True
            case _ if term.isidentifier() or term.isdecimal():
                items_end = items_end and last_ends
                last_ends = term not in endless
    return any_ends or (items_end and last_ends)


def _reached(rules: Mapping[str, Sequence[str]]) -> set[str]:
    """Return the names of the rules that the start refers to, directly or not."""
    reached: set[str] = set()
    waiting = ["start"]
    while waiting:
        name = waiting.pop()
        if name in rules and name not in reached:
            reached.add(name)
            waiting += rules[name]
    return reached
