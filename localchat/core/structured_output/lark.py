"""Terms of llguidance's Lark dialect: text, tags that may be control tokens, and JSON."""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from localchat.backend_api.interface import Tokenizer

TEXT = r"/(.|\n)*/"
_META = re.compile(r"[\\.+*?()|\[\]{}^$#&~/-]")


class TagTerms:
    """Writes text with tags for one vocabulary. Tags that are control tokens are written by number."""

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
        self._split: re.Pattern[str] | None = None
        if longest_first:
            self._split = re.compile("|".join(map(re.escape, longest_first)))

    def terms(self, text: str) -> str:
        """Return `text` as terms of a rule."""
        return " ".join(self._literal(part) for part in self._parts(text)) or '""'

    def up_to(self, rule: str, tag: str) -> list[str]:
        """Return the lines of `rule`: any text, up to and including the first `tag`."""
        begin, *tail_parts = self._parts(tag)
        if begin in self._control_tokens:
            return [f"{rule}: {TEXT} {self.terms(tag)}"]
        tail = " ".join(self._literal(part) for part in tail_parts)
        return [
            f"{rule}: {rule}_text {tail}",
            f"{rule}_text[lazy]: /(.|\\n)*{pattern(begin)}/",
        ]

    def _parts(self, text: str) -> list[str]:
        if self._split is None:
            return [text] if text else []
        parts = []
        end = 0
        for match in self._split.finditer(text):
            parts += [text[end : match.start()], match.group()]
            end = match.end()
        return [part for part in (*parts, text[end:]) if part]

    def _literal(self, part: str) -> str:
        number = self._control_tokens.get(part)
        if number is None:
            return literal(part)
        return f"<[{number}]>"


def literal(text: str) -> str:
    """Return plain text as a term."""
    return json.dumps(text, ensure_ascii=False)


def pattern(text: str) -> str:
    """Return a regular expression for exactly this text."""
    return _META.sub(r"\\\g<0>", text).replace("\n", r"\n")


def json_rule(schema: Mapping[str, Any]) -> str:
    """Return the JSON that a schema allows, as a term."""
    return f"%json {json.dumps(schema, ensure_ascii=False)}"
