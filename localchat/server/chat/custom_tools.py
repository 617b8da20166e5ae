"""Custom tools, which take a text instead of arguments: the model calls a function with one argument."""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

PARAMETERS: Final = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
"""Parameters of the function that stands for a custom tool: its text is the one argument."""


class _Arguments(msgspec.Struct, frozen=True):
    input: str


def arguments_of(text: str) -> str:
    """The arguments of a call with this text, as JSON."""
    return msgspec.json.encode(_Arguments(text)).decode()


def input_of(arguments: str) -> str:
    """The text that a custom tool was called with.

    Incomplete JSON, if the token limit cut off the call.
    """
    try:
        return msgspec.json.decode(arguments, type=_Arguments).input
    except msgspec.DecodeError:
        return arguments


def description_of(description: str | None, format_: Mapping[str, Any] | None) -> str | None:
    """The description of a custom tool, with the grammar of its text.

    The client refuses a text that does not follow the grammar.
    """
    given: Mapping[str, Any] = format_ or {}
    inner = given.get("grammar")  # the chat API has one more level than the Responses API
    given = inner if isinstance(inner, Mapping) else given
    grammar = given.get("definition")
    if not isinstance(grammar, str):
        return description
    rule = f"The input must follow this {given.get('syntax') or ''} grammar:".replace("  ", " ")
    return "\n\n".join(part for part in (description, f"{rule}\n{grammar}") if part)
