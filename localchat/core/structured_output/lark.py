"""Pieces of llguidance's Lark dialect: literals in which control tokens are tokens, text up to a tag, JSON."""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from localchat.backend_api.interface import Tokenizer

TEXT = r"/(.|\n)*/"
_META = re.compile(r"[\\.+*?()|\[\]{}^$#&~/-]")


class Markup:
    """Texts with tags, for one vocabulary: a tag that is a control token is no text there and stands in a
    grammar by its number."""

    def __init__(self, tokenizer: Tokenizer, tags: Iterable[str]) -> None:
        self._numbers: dict[str, int] = {}
        for tag in tags:
            controls = [
                token for token in tokenizer.encode(tag, special=True) if not tokenizer.piece(token)
            ]
            if len(controls) == 1:
                said = tokenizer.piece(controls[0], special=True).decode("utf-8", "replace")
                if said == tag:
                    self._numbers[tag] = controls[0]
        longest_first = sorted(self._numbers, key=len, reverse=True)
        self._split = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    def terms(self, text: str) -> str:
        """`text` as terms of a rule."""
        return " ".join(self._literal(part) for part in self._parts(text)) or '""'

    def up_to(self, rule: str, tag: str) -> list[str]:
        """Lines that define `rule`: any text, and then the first `tag` in it."""
        begin, *rest = self._parts(tag)
        if begin in self._numbers:
            return [f"{rule}: {TEXT} {self.terms(tag)}"]
        behind = " ".join(self._literal(part) for part in rest)
        return [f"{rule}: {rule}_text {behind}", f"{rule}_text[lazy]: /(.|\\n)*{pattern(begin)}/"]

    def _parts(self, text: str) -> list[str]:
        if self._split is None:
            return [text] if text else []
        parts, at = [], 0
        for found in self._split.finditer(text):
            parts += [text[at : found.start()], found.group()]
            at = found.end()
        return [part for part in (*parts, text[at:]) if part]

    def _literal(self, part: str) -> str:
        number = self._numbers.get(part)
        return literal(part) if number is None else f"<[{number}]>"


def literal(text: str) -> str:
    """Plain text as a term."""
    return json.dumps(text, ensure_ascii=False)


def pattern(text: str) -> str:
    """A regular expression for exactly this text."""
    return _META.sub(r"\\\g<0>", text).replace("\n", r"\n")


def json_rule(schema: Mapping[str, Any]) -> str:
    """JSON that a schema allows, as a term."""
    return f"%json {json.dumps(schema, ensure_ascii=False)}"
