"""Command `localchat config preset`: list and change the presets of the settings file."""

from typing import Any

import click

from localchat.cli.context import AppContext, app_context
from localchat.cli.group import DefaultGroup
from localchat.cli.options import SharedOption, engine_options, given_flags
from localchat.cli.output import print_json, print_lines, table
from localchat.cli.preset_options import complete_preset, read_presets
from localchat.cli.streams import tell
from localchat.config.paths import find_paths
from localchat.config.presets import TEMPLATE, Preset
from localchat.config.settings_file import remove_preset, write_preset
from localchat.errors import UsageError
from localchat.suggestions import did_you_mean


@click.group("preset", cls=DefaultGroup, invoke_without_command=True)
def command() -> None:
    """List and edit presets, which @NAME applies.

    \b
    localchat config preset add sum -s "You are brief." --template "Sum this up: {input}"
    cat report.txt | localchat @sum
    localchat @sum "a text"

    A preset consists of settings (such as instructions, model and sampling) and a template of the question.
    Flags override it. Presets are stored in the settings file under [presets.NAME].
    """


@command.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_obj
def list_presets(app: AppContext, as_json: bool) -> None:
    """List the presets."""
    presets = read_presets(app)
    if as_json:
        print_json(app.environ, [_record(presets[name]) for name in sorted(presets)])
    elif presets:
        rows = [(f"@{name}", presets[name].about) for name in sorted(presets)]
        print_lines(app.environ, table(("PRESET", "WHAT IT DOES"), rows))
    else:
        tell("localchat: there are no presets; localchat config preset add NAME creates one")


@command.command("show")
@click.argument("name", shell_complete=complete_preset)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_obj
def show(app: AppContext, name: str, as_json: bool) -> None:
    """Print one preset."""
    record = _record(_preset(app, name))
    if as_json:
        print_json(app.environ, record)
    else:
        print_lines(app.environ, (f"{key}: {value}" for key, value in record.items()))


def _change_options(function: Any) -> Any:  # noqa: ANN401 - a decorator keeps the type
    function = engine_options(with_model=True, cls=SharedOption)(function)
    return click.option(
        "--template", metavar="TEXT", help="The question, with {input} for the text."
    )(function)


@command.command("add")
@click.argument("name")
@_change_options
@click.pass_context
def add(ctx: click.Context, /, name: str, **_: object) -> None:
    """Add a preset with these flags."""
    app = app_context(ctx)
    if name.removeprefix("@") in read_presets(app):
        raise UsageError(
            f"there is a preset {name!r} already",
            hint=f"localchat config preset edit {name} changes it",
        )
    from localchat.cli.document_options import open_library

    if name.removeprefix("@") in open_library(app).names():
        raise UsageError(
            f"there are documents @{name.removeprefix('@')} already",
            hint="take another name; localchat learn --list shows them",
        )
    _write(ctx, app, name.removeprefix("@"))


@command.command("edit")
@click.argument("name", shell_complete=complete_preset)
@click.option("--unset", multiple=True, metavar="KEY", help="Remove a key. Repeatable.")
@_change_options
@click.pass_context
def edit(ctx: click.Context, /, name: str, unset: tuple[str, ...], **_: object) -> None:
    """Change the settings that these flags name."""
    app = app_context(ctx)
    preset = _preset(app, name)
    keys = set(preset.values)
    if preset.template:
        keys.add(TEMPLATE)
    for key in unset:
        if key not in keys:
            raise UsageError(
                f"@{preset.name} has no {key!r}", hint=did_you_mean(key, keys) if keys else ""
            )
    _write(ctx, app, preset.name, unset)


@command.command("rm")
@click.argument("name", shell_complete=complete_preset)
@click.pass_obj
def remove(app: AppContext, name: str) -> None:
    """Remove a preset."""
    file = find_paths(app.environ).settings_file
    remove_preset(file, _preset(app, name).name)
    tell(f"localchat: removed @{name.removeprefix('@')} from {file}")


def _write(ctx: click.Context, app: AppContext, name: str, unset: tuple[str, ...] = ()) -> None:
    texts: dict[str, object | None] = dict.fromkeys(unset)
    texts |= {key: setting.value for key, setting in given_flags(ctx).items()}
    if ctx.params[TEMPLATE] is not None:
        texts[TEMPLATE] = ctx.params[TEMPLATE]
    if not texts:
        raise UsageError(
            "a preset needs at least one flag to set",
            hint=f'as in localchat config preset add {name} -s "You are brief." --template "Sum up: {{input}}"',
        )
    file = find_paths(app.environ).settings_file
    write_preset(file, name, texts)
    tell(f"localchat: wrote @{name} to {file}")


def _preset(app: AppContext, name: str) -> Preset:
    presets = read_presets(app)
    name = name.removeprefix("@")
    if name not in presets:
        hint = "localchat config preset add creates one"
        if presets:
            hint = did_you_mean(name, presets)
        raise UsageError(f"there is no preset {name!r}", hint=hint)
    return presets[name]


def _record(preset: Preset) -> dict[str, Any]:
    record = {"name": preset.name, **preset.values}
    if preset.template:
        record[TEMPLATE] = preset.template
    return record
