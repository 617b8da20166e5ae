"""Tools as data: description, effect, and a function that plans calls."""

import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, TypeAlias, TypeVar

import msgspec

from localchat.errors import LocalchatError, UsageError

Effect: TypeAlias = Literal["read", "write", "run", "network"]
"""Strongest effect of a tool. `run` can do anything that its program does."""
_Arguments = TypeVar("_Arguments", bound=msgspec.Struct)
_MAX_ARGUMENTS: Final = 1 << 20
"""Longest arguments of a call, in characters."""


class ToolError(LocalchatError):
    """A call cannot run or has failed. The model reads the message."""

    code = "tool"


class NothingToDo(ToolError):
    """A call would change nothing. It counts as done, without consent."""


class ServerPrompt(NamedTuple):
    """A prompt of an MCP server, which the user sends by a slash command."""

    arguments: tuple[str, ...]
    """Names of the arguments. The last ones may be optional."""
    required: int
    """Number of arguments that it needs."""
    about: str
    render: Callable[[Mapping[str, str]], Awaitable[str]]
    """Returns the text to send. Raises LocalchatError."""

    @property
    def usage(self) -> str:
        """The arguments as the help shows them."""
        names = [name.upper() for name in self.arguments]
        optional = [f"[{name}]" for name in names[self.required :]]
        return " ".join((*names[: self.required], *optional))

    def bound(self, text: str) -> dict[str, str]:
        """Return the arguments in a text, separated by spaces. The last one may contain some.

        Raises UsageError if one is missing.
        """
        words = text.split(maxsplit=max(0, len(self.arguments) - 1))
        if len(words) < self.required or (words and not self.arguments):
            raise UsageError(f"this prompt takes {self.usage or 'no arguments'}", hint=self.about)
        return dict(zip(self.arguments, words, strict=False))


class Plan(NamedTuple):
    """A valid call that can run once the user consents."""

    run: Callable[[], Awaitable[str]]
    """Runs the call and returns its result. Raises LocalchatError."""
    title: str
    """The call on one line, such as `notes/plan.md, lines 1 to 80`. Not sanitized."""
    scope: str
    """Key of the calls that consent for the session covers."""
    scope_text: str
    """The scope as the user reads it, such as `all edits in this folder`. Not sanitized."""
    preview: str = ""
    """Details that consent covers, such as a diff. Not sanitized."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that a model may call."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON schema of the arguments, an object."""
    effect: Effect
    plan: Callable[[Mapping[str, Any]], Awaitable[Plan]]
    """Checks the arguments without any effect. Raises LocalchatError for invalid ones."""

    def offered(self) -> dict[str, Any]:
        """Return the tool as a request offers it to a model."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": dict(self.parameters),
        }
        return {"type": "function", "function": function}


def own_tool(
    name: str,
    description: str,
    effect: Effect,
    arguments: type[_Arguments],
    plan: Callable[[_Arguments], Awaitable[Plan]],
) -> Tool:
    """Return a tool whose arguments are the fields of a struct."""
    _, components = msgspec.json.schema_components([arguments])
    schema = _short_schema(components[arguments.__name__])

    async def checked_plan(values: Mapping[str, Any]) -> Plan:
        try:
            # Lenient, because small models write numbers as text.
            checked = msgspec.convert(dict(values), arguments, strict=False)
        except msgspec.ValidationError as problem:
            raise ToolError(f"the arguments of {name} are invalid: {problem}") from problem
        return await plan(checked)

    return Tool(name, description, schema, effect, checked_plan)


def _short_schema(schema: Any) -> Any:  # noqa: ANN401 - JSON
    """Return a schema without keywords that only cost a small model attention. `plan` still checks them."""
    if not isinstance(schema, dict):
        return schema
    left_out = ("title", "default", "minLength", "maxLength")
    return {key: _short_schema(value) for key, value in schema.items() if key not in left_out}


def parsed_arguments(text: str) -> dict[str, Any]:
    """Parse the arguments of a call. Raises ToolError."""
    if len(text) > _MAX_ARGUMENTS:
        raise ToolError(f"the arguments have more than {_MAX_ARGUMENTS:,} characters")
    try:
        # Models write line breaks inside strings, which strict JSON forbids.
        values = json.loads(text or "{}", strict=False)
    except (ValueError, RecursionError) as problem:
        raise ToolError(f"the arguments are not valid JSON: {problem}") from problem
    if not isinstance(values, dict):
        raise ToolError("the arguments are not a JSON object")
    return values


def bounded(text: str, limit: int) -> str:
    """Cut the middle out of a long text, and note how much is missing. `limit` is in characters."""
    if len(text) <= limit:
        return text
    head = limit * 2 // 3
    tail = limit - head
    cut = len(text) - limit
    return f"{text[:head]}\n[… {cut:,} characters are left out here …]\n{text[-tail:]}"
