"""Preset of a prompt: find it in the words, store it in the context, and complete its name."""

import shlex
from typing import TYPE_CHECKING

import click

from localchat.cli.context import AppContext, app_context
from localchat.cli.options import AFTER_DASHES, given_flags
from localchat.config.paths import expand_home, find_paths
from localchat.errors import UsageError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from localchat.config.presets import Preset
    from localchat.config.settings import Given

_PRESET = "localchat.cli.preset_options.preset"
"""Key in the notes of the context."""


def preset_of(ctx: click.Context) -> "Preset | None":
    """Return the preset that the prompt names, or None."""
    preset: Preset | None = ctx.meta.get(_PRESET)
    return preset


def without_preset(ctx: click.Context, words: str) -> str:
    """Store the preset of `@name` in the context, and return the other words. Raises UsageError."""
    from localchat.config.presets import addressed

    if not words.startswith("@") or ctx.meta.get(AFTER_DASHES):
        return words
    app = app_context(ctx)
    from localchat.cli.document_options import open_library

    _refuse_file(words)
    documents = open_library(app).names()
    preset, question_words = addressed(words, read_presets(app), documents, strict=True)
    ctx.meta[_PRESET] = preset
    return question_words


def _refuse_file(words: str) -> None:
    """Raise UsageError for `@FILE` before a question. On the command line a file needs `-f`."""
    name, _, question = words[1:].partition(" ")
    if "." not in name and "/" not in name:
        return
    try:
        is_file = expand_home(name).is_file()
    except (OSError, ValueError):
        return
    if is_file:
        raise UsageError(
            f"@{name} is a file, and @NAME names a preset or documents",
            hint=f"attach it: {shlex.join(['localchat', '-f', name, question or 'Summarize this.'])}",
        )


def question(ctx: click.Context, text: str) -> str:
    """Insert the text into the template of the preset. Return an empty string if there is nothing to ask."""
    from localchat.config.presets import INPUT

    preset = preset_of(ctx)
    if preset is None or not (text or (preset.template and INPUT not in preset.template)):
        return text
    return preset.question(text)


def chosen_settings(ctx: click.Context) -> "dict[str, Given]":
    """Return the settings that flags and preset of a command choose. Raises UsageError."""
    preset = preset_of(ctx)
    settings = preset.layer() if preset is not None else {}
    return settings | given_flags(ctx)


def read_presets(app: AppContext) -> "dict[str, Preset]":
    """Return the presets of the settings file by name. Raises UsageError."""
    from localchat.config.settings_file import read_settings

    return dict(read_settings(find_paths(app.environ).settings_file).presets)


def complete_preset(
    ctx: click.Context, param: click.Parameter, incomplete: str, *, sign: str = ""
) -> "list[CompletionItem]":
    """Complete names of presets after `sign`. Return nothing if the settings are unreadable."""
    from click.shell_completion import CompletionItem

    app = app_context(ctx)
    try:
        presets = read_presets(app)
    except UsageError:
        return []
    return [
        CompletionItem(f"{sign}{name}", help=preset.about)
        for name, preset in sorted(presets.items())
        if f"{sign}{name}".startswith(incomplete)
    ]
