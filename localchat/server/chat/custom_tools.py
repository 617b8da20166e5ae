"""Custom tools, which take a text. The model sees a function with one argument."""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

PARAMETERS: Final = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
"""Parameters of the function that stands for a custom tool."""


class _Arguments(msgspec.Struct, frozen=True):
    input: str


def arguments_of(text: str) -> str:
    """Return the arguments of a call with this text, as JSON."""
    return msgspec.json.encode(_Arguments(text)).decode()


def input_of(arguments: str) -> str:
    """Return the text of a call: incomplete JSON if the token limit cut off the call."""
    try:
        return msgspec.json.decode(arguments, type=_Arguments).input
    except msgspec.DecodeError:
        return arguments


def description_of(description: str | None, format_: Mapping[str, Any] | None) -> str | None:
    """Return the description of a custom tool, with the grammar that its text must follow."""
    fields: Mapping[str, Any] = format_ or {}
    if isinstance(fields.get("grammar"), Mapping):
        # The chat API nests one level deeper than the Responses API.
        fields = fields["grammar"]
    grammar = fields.get("definition")
    if not isinstance(grammar, str):
        return description
    rule = f"The input must follow this {fields.get('syntax') or ''} grammar:".replace("  ", " ")
    return "\n\n".join(filter(None, (description, f"{rule}\n{grammar}")))
