"""Routes: the `[routes]` section of the settings file, a small model first and a large one where it is needed.

    [routes.easy]
    small = "qwen3:0.6b"
    large = "qwen3:8b"
    longer_than = 6000              # characters of the conversation: to the large one at once
    regex = "prove|theorem"         # in the last message, in any case of letters
    code = true                     # a code block in the conversation
    tools = true                    # tools to call
    doubt = -0.9                    # mean log probability of the small one's answer below this
    judge = true                    # the small one finds a fault in its answer

The word of a route is `route:easy`, wherever a model is named.
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
    "judge": (bool,),
}
_RULES: Final = ("longer_than", "regex", "code", "tools", "doubt", "judge")


class Route(msgspec.Struct, frozen=True):
    """Two models, and when the large one answers."""

    name: str
    small: str
    """The word of a model. The same for `large`."""
    large: str
    longer_than: int | None = None
    """Characters of the conversation."""
    regex: str = ""
    """In the last message of the user."""
    code: bool = False
    """A code block in the conversation."""
    tools: bool = False
    """Tools to call."""
    doubt: float | None = None
    """Least mean log probability of the small model's answer."""
    judge: bool = False
    """The small model looks for faults in its answer."""

    @property
    def word(self) -> str:
        """The word that finds it again."""
        return f"{PREFIX}{self.name}"

    @property
    def waits(self) -> bool:
        """Whether an answer of the small model is looked at before it is shown."""
        return self.doubt is not None or self.judge


def read_routes(path: Path, section: object) -> dict[str, Route]:
    """Check the `[routes]` table of a settings file. Raises UsageError naming what is wrong."""
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
            raise UsageError(f"{where}: {key} is a route; a route goes to two models")
    if not any(table.get(key) is not None for key in _RULES):
        raise UsageError(
            f"{where} never goes to the large model", hint=f"give one of {', '.join(_RULES)}"
        )
    try:
        re.compile(table.get("regex", ""))
    except re.error as problem:
        raise UsageError(
            f"{where}: regex is not a valid regular expression: {problem}"
        ) from problem
    return Route(name, **table)


def find_route(word: str, routes: Mapping[str, Route]) -> Route:
    """The route of a word with the prefix. Raises UsageError."""
    name = word.removeprefix(PREFIX)
    if found := routes.get(name):
        return found
    known = ", ".join(sorted(routes)) or "none yet"
    raise UsageError(
        f"there is no route {name!r}",
        hint=f"the settings file has {known}, under [routes.NAME]",
    )
