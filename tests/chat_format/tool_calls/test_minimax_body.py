"""Calls whose values stand in tags within tags."""

import json
from typing import Any

import pytest

from localchat.chat_format.tool_calls.parser import CallParser
from tests.support.tool_calls import NAMED, whole

M = "]<]minimax[>["
KINDS: dict[str, Any] = {
    "list": {"type": "array"},
    "map": {"type": "object"},
    "text": {"type": "string"},
    "either": {"type": ["string", "null"]},
}
FILL = {
    "type": "function",
    "function": {"name": "fill", "parameters": {"type": "object", "properties": KINDS}},
}


@pytest.mark.parametrize(
    ("key", "value"), [("list", []), ("map", {}), ("text", ""), ("either", ""), ("other", "")]
)
@pytest.mark.parametrize("blank", ["", "\n"])
def test_nothing_between_its_tags_is_the_empty_value_of_its_kind(
    key: str, value: Any, blank: str
) -> None:
    said = (
        f'{M}<tool_call>\n{M}<invoke name="fill">{M}<{key}>{blank}{M}</{key}>{M}</invoke>\n'
        f"{M}</tool_call>"
    )
    _, calls = whole(CallParser(NAMED["minimax-3"], (FILL,)), said)
    found = json.loads(calls[0][1])[key]
    assert found == value or (not value and found == blank and isinstance(value, str))
