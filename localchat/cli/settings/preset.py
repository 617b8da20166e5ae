"""Command `localchat config preset`: list, add and remove the presets of the settings file."""

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
    """List, add and remove presets, which @NAME applies.

    \b
    localchat config preset add sum -s "You are brief." --template "Sum this up: {input}"
    cat report.txt | localchat @sum
    localchat @sum "a text"

    A preset consists of settings (such as instructions, model and sampling) and a template of the question.
    Flags override it. Presets are stored in the settings file under [presets.NAME], where you can change them.
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


@command.command("add")
@click.argument("name")
@engine_options(with_model=True, cls=SharedOption)
@click.option("--template", metavar="TEXT", help="The question, with {input} for the text.")
@click.pass_context
def add(ctx: click.Context, /, name: str, **_: object) -> None:
    """Add a preset with these flags."""
    app = app_context(ctx)
    name = name.removeprefix("@")
    file = find_paths(app.environ).settings_file
    if name in read_presets(app):
        raise UsageError(
            f"there is a preset {name!r} already",
            hint=f"change it in {file}, or remove it first: localchat config preset rm {name}",
        )
    from localchat.cli.document_options import open_library

    if name in open_library(app).names():
        raise UsageError(
            f"there are documents @{name} already",
            hint="take another name; localchat learn --list shows them",
        )
    texts: dict[str, object] = {key: setting.value for key, setting in given_flags(ctx).items()}
    if ctx.params[TEMPLATE] is not None:
        texts[TEMPLATE] = ctx.params[TEMPLATE]
    if not texts:
        raise UsageError(
            "a preset needs at least one flag to set",
            hint=f'as in localchat config preset add {name} -s "You are brief." --template "Sum up: {{input}}"',
        )
    write_preset(file, name, texts)
    tell(f"localchat: wrote @{name} to {file}")


@command.command("rm")
@click.argument("name", shell_complete=complete_preset)
@click.pass_obj
def remove(app: AppContext, name: str) -> None:
    """Remove a preset."""
    presets = read_presets(app)
    name = name.removeprefix("@")
    if name not in presets:
        hint = "localchat config preset add creates one"
        if presets:
            hint = did_you_mean(name, presets)
        raise UsageError(f"there is no preset {name!r}", hint=hint)
    file = find_paths(app.environ).settings_file
    remove_preset(file, name)
    tell(f"localchat: removed @{name} from {file}")


def _record(preset: Preset) -> dict[str, Any]:
    record = {"name": preset.name, **preset.values}
    if preset.template:
        record[TEMPLATE] = preset.template
    return record
