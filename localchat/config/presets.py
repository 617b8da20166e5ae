"""Presets: named instructions, sampling, model and a template of the question, in the settings file.

    [presets.sum]
    system = "You sum texts up in three sentences."
    temperature = 0.2
    template = "Sum this up:\\n\\n{input}"

`@sum` before a prompt uses it. Every setting may stand in a preset, beside `template`.
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
_ABOUT_LENGTH: Final = 60
"""Characters."""
_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,39}")
_MENTION: Final = re.compile(rf"@({_NAME.pattern})(?:\s+|$)")


class Preset(msgspec.Struct, frozen=True):
    """One preset of the settings file, checked."""

    name: str
    values: Mapping[str, object]
    """Settings by key."""
    template: str = ""
    """The question, with `{input}` for the text; empty: the text itself."""
    origin: str = ""
    """The source of the values, a phrase."""

    @property
    def about(self) -> str:
        """One line: the template, else the instructions, else the settings."""
        words = self.template or str(self.values.get("system", ""))
        words = words or ", ".join(f"{key} {value}" for key, value in self.values.items())
        line = " ".join(words.split())
        if len(line) <= _ABOUT_LENGTH:
            return line
        return f"{line[: _ABOUT_LENGTH - 1]}…"

    def layer(self) -> dict[str, Given]:
        """Its settings, for `resolve`."""
        return {key: Given(value, self.origin) for key, value in self.values.items()}

    def question(self, text: str) -> str:
        """The question about a text. A template without `{input}` comes before it."""
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

    Raises UsageError for a name that is both, and for an unknown one that resembles a known one. `strict`:
    for every unknown one whose line goes on, as a prompt on the command line has it."""
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
        guess = f"; did you mean @{near[0]}?" if near else ""
        raise UsageError(
            f"there is no preset and no document named @{name}{guess}",
            hint="localchat config preset and localchat learn --list show them. To send @ as text, put -- "
            "before the prompt.",
        )
    return Addressed(None, text)


def check_name(name: str) -> None:
    """Raise UsageError unless this can be the name of a preset."""
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} cannot be the name of a preset",
            hint="a name begins with a letter and has letters, digits, - and _",
        )


def read_presets(path: Path, section: object) -> dict[str, Preset]:
    """Check the `[presets]` table of a settings file. Raises UsageError naming what is wrong."""
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
