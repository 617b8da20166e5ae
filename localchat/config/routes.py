"""Routes: the `[routes]` section of the settings file. A small model answers first, a large one if needed.

    [routes.easy]
    small = "qwen3:0.6b"
    large = "qwen3:8b"
    longer_than = 6000              # characters of the conversation
    regex = "prove|theorem"         # match in the last message, ignoring case
    code = true                     # a code block in the conversation
    tools = true                    # tools to call
    doubt = -0.9                    # lower mean log probability of the small model's answer

Each rule sends a request to the large model. `route:easy` names this route wherever a model is named.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from localchat.errors import UsageError

PREFIX: Final = "route:"
_KINDS: Final[dict[str, tuple[type, ...]]] = {
    "small": (str,),
    "large": (str,),
    "longer_than": (int,),
    "regex": (str,),
    "code": (bool,),
    "tools": (bool,),
    "doubt": (int, float),
}
_RULES: Final = ("longer_than", "regex", "code", "tools", "doubt")


class Route(msgspec.Struct, frozen=True):
    """Two models, and the rules for the large one."""

    name: str
    small: str
    """Name of the small model, as `-m` accepts it."""
    large: str
    longer_than: int | None = None
    """Longest conversation of the small model, in characters."""
    regex: str = ""
    """Pattern of user messages for the large model."""
    code: bool = False
    """Send conversations with a code block to the large model."""
    tools: bool = False
    """Send requests with tools to the large model."""
    doubt: float | None = None
    """Minimum mean log probability of the small model's answer."""

    @property
    def word(self) -> str:
        """Name of the route wherever a model is named."""
        return f"{PREFIX}{self.name}"


def read_routes(path: Path, section: object) -> dict[str, Route]:
    """Read the `[routes]` table of a settings file. Raises UsageError."""
    if not isinstance(section, dict):
        raise UsageError(f"{path}: routes is not a section", hint="as in [routes.easy]")
    return {name: _route(f"{path} [routes.{name}]", name, table) for name, table in section.items()}


def _route(where: str, name: str, table: object) -> Route:
    if not isinstance(table, dict):
        raise UsageError(f"{where} is not a section", hint='as in [routes.easy], small = "…"')
    for key, value in table.items():
        if key not in _KINDS:
            raise UsageError(
                f"{where}: there is no {key!r}", hint=f"use one of {', '.join(_KINDS)}"
            )
        if not isinstance(value, _KINDS[key]) or (
            isinstance(value, bool) and bool not in _KINDS[key]
        ):
            kind = {str: "text", bool: "true or false"}.get(_KINDS[key][0], "a number")
            raise UsageError(f"{where}: {key} must be {kind}, not {value!r:.80}")
    for key in ("small", "large"):
        if not table.get(key):
            raise UsageError(f"{where} has no {key} model", hint=f'as {key} = "qwen3:0.6b"')
        if str(table[key]).startswith(PREFIX):
            raise UsageError(f"{where}: {key} is a route, but must be a model")
    if not any(table.get(key) is not None for key in _RULES):
        raise UsageError(
            f"{where} never goes to the large model", hint=f"set one of {', '.join(_RULES)}"
        )
    try:
        re.compile(table.get("regex", ""))
    except re.error as problem:
        raise UsageError(
            f"{where}: regex is not a valid regular expression: {problem}"
        ) from problem
    return Route(name, **table)


def find_route(word: str, routes: Mapping[str, Route]) -> Route:
    """Return the route of a name with the prefix. Raises UsageError."""
    name = word.removeprefix(PREFIX)
    if route := routes.get(name):
        return route
    hint = "add it to the settings file as [routes.NAME]"
    if routes:
        hint = f"use one of {', '.join(sorted(routes))}"
    raise UsageError(f"there is no route {name!r}", hint=hint)
