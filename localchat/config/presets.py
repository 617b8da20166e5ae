"""Presets: named instructions, sampling, model and a template of the question, in the settings file.

    [presets.sum]
    system = "You sum texts up in three sentences."
    temperature = 0.2
    template = "Sum this up:\\n\\n{input}"

`@sum` before a prompt uses it. Besides `template`, a preset may contain every setting.
"""

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from localchat.config.settings import Given, check_key, convert
from localchat.errors import UsageError
from localchat.suggestions import closest

INPUT: Final = "{input}"
TEMPLATE: Final = "template"
_MAX_ABOUT: Final = 60
"""Length of a description, in characters."""
_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,39}")
_MENTION: Final = re.compile(rf"@({_NAME.pattern})(?:\s+|$)")


class Preset(msgspec.Struct, frozen=True):
    """Preset of the settings file."""

    name: str
    values: Mapping[str, object]
    """Settings by key."""
    template: str = ""
    """Question with `{input}` for the text; empty for the text alone."""
    origin: str = ""
    """Source of the values, as messages name it."""

    @property
    def about(self) -> str:
        """Template, or else the instructions or the settings, in a line."""
        text = self.template or str(self.values.get("system", ""))
        text = text or ", ".join(f"{key} {value}" for key, value in self.values.items())
        line = " ".join(text.split())
        if len(line) <= _MAX_ABOUT:
            return line
        return f"{line[: _MAX_ABOUT - 1]}…"

    def layer(self) -> dict[str, Given]:
        """Return the settings, for `resolve`."""
        return {key: Given(value, self.origin) for key, value in self.values.items()}

    def question(self, text: str) -> str:
        """Return the question about a text. A template without `{input}` comes before the text."""
        if INPUT in self.template:
            return self.template.replace(INPUT, text)
        return "\n\n".join(part for part in (self.template, text) if part)


class Addressed(NamedTuple):
    """A prompt without the mention of its preset."""

    preset: Preset | None
    text: str


def addressed(
    text: str,
    presets: Mapping[str, Preset],
    documents: Collection[str] = (),
    *,
    strict: bool = False,
) -> Addressed:
    """Split `@name text`. The name of documents stays in the text.

    Raises UsageError for an ambiguous name, and for an unknown name that resembles another. With `strict`, as
    on the command line, it also rejects every other unknown name, unless the line ends there.
    """
    match = _MENTION.match(text)
    if match is None:
        return Addressed(None, text)
    name = match[1]
    if name in documents and name in presets:
        raise UsageError(
            f"@{name} is a preset and the name of documents",
            hint=f"localchat config preset rm {name}, or localchat learn --forget {name}",
        )
    if name in documents:
        return Addressed(None, text)
    if preset := presets.get(name):
        return Addressed(preset, text[match.end() :])
    near = closest(name, [*presets, *documents], min_similarity=0.6)
    # Pasted code such as `@property` ends its line there.
    if near or (strict and "\n" not in match[0]):
        message = f"there is no preset and no document named @{name}"
        if near:
            message += f"; did you mean @{near[0]}?"
        raise UsageError(
            message,
            hint="localchat config preset and localchat learn --list show them. To send @ as text, put -- "
            "before the prompt.",
        )
    return Addressed(None, text)


def check_name(name: str) -> None:
    """Raise UsageError for a name that a preset cannot have."""
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} cannot be the name of a preset",
            hint="a name starts with a letter and consists of letters, digits, - and _",
        )


def read_presets(path: Path, section: object) -> dict[str, Preset]:
    """Check the `[presets]` table of a settings file. Raises UsageError."""
    if not isinstance(section, dict):
        raise UsageError(f"{path}: presets is not a section", hint="as in [presets.sum]")
    return {name: _preset(path, name, table) for name, table in section.items()}


def _preset(path: Path, name: str, table: Any) -> Preset:  # noqa: ANN401 - TOML has no type
    where = f"{path} [presets.{name}]"
    check_name(name)
    if not isinstance(table, dict):
        raise UsageError(f"{where} is not a section", hint="as in [presets.sum]")
    values = {key: value for key, value in table.items() if key != TEMPLATE}
    for key, value in values.items():
        check_key(key, where)
        convert(key, Given(value, where))
    template = table.get(TEMPLATE, "")
    if not isinstance(template, str):
        raise UsageError(f"{where}: the template must be text, not {template!r:.80}")
    return Preset(name, values, template, where)
