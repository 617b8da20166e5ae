"""The preset of a prompt: found in its words, kept in the context, and completed."""

import shlex
from typing import TYPE_CHECKING

import click

from localchat.cli.context import AppContext
from localchat.cli.options import AFTER_DASHES, given_flags
from localchat.config.paths import expand_home, find_paths
from localchat.errors import UsageError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from localchat.config.presets import Preset
    from localchat.config.settings import Given

_PRESET = "localchat.cli.preset_options.preset"
"""Key of the context's notes."""


def preset_of(ctx: click.Context) -> "Preset | None":
    """The preset that the prompt names."""
    found: Preset | None = ctx.meta.get(_PRESET)
    return found


def without_preset(ctx: click.Context, words: str) -> str:
    """The words without the `@name` of a preset, which the context keeps. Raises UsageError."""
    from localchat.config.presets import addressed

    if not words.startswith("@") or ctx.meta.get(AFTER_DASHES):
        return words
    app = ctx.find_object(AppContext)
    assert app is not None
    from localchat.cli.document_options import open_library

    _refuse_file(words)
    documents = open_library(app).names()
    ctx.meta[_PRESET], rest = addressed(words, read_presets(app), documents, strict=True)
    return rest


def _refuse_file(words: str) -> None:
    """Raise UsageError for `@FILE` before a question: on the command line a file needs `-f`."""
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
    """The text by the template of the preset; empty where there is nothing to ask."""
    from localchat.config.presets import INPUT

    preset = preset_of(ctx)
    if preset is None or not (text or (preset.template and INPUT not in preset.template)):
        return text
    return preset.question(text)


def chosen_settings(ctx: click.Context) -> "dict[str, Given]":
    """The settings that the command chooses, by flags and by its preset. Raises UsageError."""
    preset = preset_of(ctx)
    return {**(preset.layer() if preset is not None else {}), **given_flags(ctx)}


def read_presets(app: AppContext) -> "dict[str, Preset]":
    """The presets of the settings file, by name. Raises UsageError."""
    from localchat.config.settings_file import read_settings

    return dict(read_settings(find_paths(app.environ).settings_file).presets)


def completions(ctx: click.Context, incomplete: str, *, sign: str = "") -> "list[CompletionItem]":
    """Presets whose name, after `sign`, begins with `incomplete`; none if the settings cannot be read."""
    from click.shell_completion import CompletionItem

    app = ctx.find_object(AppContext)
    if app is None:
        return []
    try:
        presets = read_presets(app)
    except UsageError:
        return []
    return [
        CompletionItem(f"{sign}{name}", help=preset.about)
        for name, preset in sorted(presets.items())
        if f"{sign}{name}".startswith(incomplete)
    ]
