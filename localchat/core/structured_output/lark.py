"""Terms of llguidance's Lark dialect: text, tags that may be control tokens, and JSON."""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from localchat.backend_api.interface import Tokenizer

TEXT = r"/(.|\n)*/"
_META = re.compile(r"[\\.+*?()|\[\]{}^$#&~/-]")


class TagTerms:
    """Writes text with tags for one vocabulary: a tag that is a control token is written by its number."""

    def __init__(self, tokenizer: Tokenizer, tags: Iterable[str]) -> None:
        self._control_tokens: dict[str, int] = {}
        for tag in tags:
            controls = [
                token for token in tokenizer.encode(tag, special=True) if not tokenizer.piece(token)
            ]
            if len(controls) == 1:
                text = tokenizer.piece(controls[0], special=True).decode("utf-8", "replace")
                if text == tag:
                    self._control_tokens[tag] = controls[0]
        longest_first = sorted(self._control_tokens, key=len, reverse=True)
        self._split = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    def terms(self, text: str) -> str:
        """`text` as terms of a rule."""
        return " ".join(self._literal(part) for part in self._parts(text)) or '""'

    def up_to(self, rule: str, tag: str) -> list[str]:
        """Lines that define `rule`: any text, up to and including the first `tag`."""
        begin, *rest = self._parts(tag)
        if begin in self._control_tokens:
            return [f"{rule}: {TEXT} {self.terms(tag)}"]
        rest_terms = " ".join(self._literal(part) for part in rest)
        return [
            f"{rule}: {rule}_text {rest_terms}",
            f"{rule}_text[lazy]: /(.|\\n)*{pattern(begin)}/",
        ]

    def _parts(self, text: str) -> list[str]:
        if self._split is None:
            return [text] if text else []
        parts = []
        at = 0
        for found in self._split.finditer(text):
            parts += [text[at : found.start()], found.group()]
            at = found.end()
        return [part for part in (*parts, text[at:]) if part]

    def _literal(self, part: str) -> str:
        number = self._control_tokens.get(part)
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
