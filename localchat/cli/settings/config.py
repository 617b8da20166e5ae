"""Command `localchat config`: show settings with their source, and change them."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import click

from localchat.cli.context import AppContext
from localchat.cli.group import DefaultGroup
from localchat.cli.output import json_line, print_json, print_lines
from localchat.cli.streams import tell
from localchat.config.parameters import PARAMETERS
from localchat.config.paths import find_paths
from localchat.errors import LocalchatError

_SUBCOMMANDS = ("completion", "mcp")
"""Subcommands with a module of their own, which is imported when it is used."""
_NAMES = (
    *("model", "draft", "mmproj", "lora", "remote"),
    *("backend", "llamacpp_library", "tools", "root"),
)
"""Keys whose value names something that may be missing."""


class _ConfigGroup(DefaultGroup):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*super().list_commands(ctx), *_SUBCOMMANDS]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _SUBCOMMANDS:
            return super().get_command(ctx, cmd_name)
        command: click.Command = import_module(f"localchat.cli.settings.{cmd_name}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] in PARAMETERS:
            # `config KEY` and `config KEY VALUE`, as in git.
            verb = "set"
            if len(args) == 1:
                verb = "get"
            args = [verb, *args]
        return super().resolve_command(ctx, args)


@click.group("config", cls=_ConfigGroup, invoke_without_command=True)
def command() -> None:
    """Show and change settings.

    Without a command, it shows the settings. A flag overrides the environment (LOCALCHAT_ and the key in
    capitals), the environment overrides the settings file, and the file overrides the default. In the file,
    [models."NAME"] overrides [defaults].
    """


@command.command("show")
@click.option("--origin", is_flag=True, help="Show the source of each value.")
@click.option("--for", "model", metavar="MODEL", help="Show the settings for this model.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_obj
def show(app: AppContext, origin: bool, model: str | None, as_json: bool) -> None:
    """Print every setting in effect."""
    from localchat.cli.resolve import Inputs

    for notice in Inputs(app, {}).notices:
        tell(f"localchat: {notice}")
    values, origins = _in_effect(app, model)
    sampling, sources = _unset_sampling(app, model, values)
    if as_json:
        rows = {
            key: {
                "value": sampling.get(key, value),
                "origin": sources.get(key, origins[key]),
            }
            for key, value in values.items()
        }
        print_json(app.environ, rows if origin else values)
        return
    width = max(len(key) for key in values)
    lines = []
    for key, value in values.items():
        text = _format(sampling.get(key, value), PARAMETERS[key].default)
        line = f"{key:<{width}} = {text}"
        if origin:
            line += f"  ({sources.get(key, origins[key])})"
        lines.append(line)
    print_lines(app.environ, lines)


@command.command("get")
@click.argument("key")
@click.option("--for", "model", metavar="MODEL", help="Show the setting for this model.")
@click.pass_obj
def get_value(app: AppContext, key: str, model: str | None) -> None:
    """Print one setting in effect."""
    from localchat.config.settings import find_key

    name = find_key(key, "config get")
    values, _ = _in_effect(app, model)
    sampling, _ = _unset_sampling(app, model, values)
    value = sampling.get(name, values[name])
    if not isinstance(value, str):
        value = _format(value, PARAMETERS[name].default)
    print_lines(app.environ, (value,))


@command.command("path")
@click.pass_obj
def path(app: AppContext) -> None:
    """Print the path of the settings file."""
    print_lines(app.environ, (str(find_paths(app.environ).settings_file),))


@command.command("set")
@click.argument("key")
@click.argument("value")
@click.option("--for", "model", metavar="MODEL", help="For this model only.")
@click.pass_obj
def set_value(app: AppContext, key: str, value: str, model: str | None) -> None:
    """Write a setting to the file. Comments are kept."""
    _write(app, key, value, model)


@command.command("unset")
@click.argument("key")
@click.option("--for", "model", metavar="MODEL", help="For this model only.")
@click.pass_obj
def unset(app: AppContext, key: str, model: str | None) -> None:
    """Remove a setting from the file."""
    from localchat.config.settings import find_key
    from localchat.config.settings_file import read_settings

    settings = read_settings(find_paths(app.environ).settings_file)
    section = settings.models.get(model, {}) if model else settings.defaults
    if find_key(key, str(settings.path)) not in section:
        whose = f" for {model}" if model else ""
        tell(f"localchat: {settings.path} has no {key}{whose}; nothing changed")
        return
    _write(app, key, None, model)


@command.command("keys")
def keys() -> None:
    """List every key with its meaning, flag and values."""
    from localchat.config.settings import variable

    for key, parameter in PARAMETERS.items():
        click.echo(f"{key}\n  {parameter.meaning}\n  {parameter.flag} · {variable(key)}")


def _in_effect(app: AppContext, model: str | None) -> tuple[dict[str, Any], Mapping[str, str]]:
    """Return all settings in the table's order, and the source of each. Raises UsageError."""
    import msgspec

    from localchat.config.settings import from_environment, resolve
    from localchat.config.settings_file import read_settings

    file = read_settings(find_paths(app.environ).settings_file)
    layer = file.layer(_names_of(app, model) if model else ())
    settings, origins = resolve(layer, from_environment(app.environ))
    values = msgspec.to_builtins(settings, str_keys=True)
    return {key: values[key] for key in PARAMETERS if key in values}, origins


def _names_of(app: AppContext, model: str) -> tuple[str, ...]:
    """Return the names whose settings apply to a model: also that of the model behind an alias."""
    from localchat.models.resolve import locate

    try:
        return (*locate(model, find_paths(app.environ), "", app.environ).names, model)
    except LocalchatError:
        return (model,)  # the model is not on this machine


def _write(app: AppContext, key: str, value: str | None, model: str | None) -> None:
    from localchat.config.settings import find_key
    from localchat.config.settings_file import write_setting

    file = find_paths(app.environ).settings_file
    write_setting(file, key, value, model)
    tell(f"localchat: wrote {file}")
    if value is not None and (model or find_key(key, "") in _NAMES):
        _report_missing(app, model)


def _report_missing(app: AppContext, model: str | None) -> None:
    """Report the error that the next answer with these settings would end with."""
    from localchat.backend_api.registry import require_for_file
    from localchat.cli.resolve import Inputs, engine_options, resolve_inputs
    from localchat.config.paths import expand_home
    from localchat.tools.root import Root
    from localchat.tools.toolset import parse_groups

    try:
        inputs = Inputs(app, {}, model)
        setup = resolve_inputs(inputs)
        settings = setup.settings
        engine_options(setup)
        if setup.model.remote is None:
            require_for_file(setup.model.path, settings.backend)
        parse_groups(settings.tools, inputs.mcp_servers)
        if settings.root:
            Root(expand_home(settings.root)).close()
    except LocalchatError as problem:
        tell(f"localchat: this does not work yet: {problem.message}")
        for line in problem.hint.splitlines():
            tell(f"  {line}")


def _unset_sampling(
    app: AppContext, model: str | None, values: Mapping[str, Any]
) -> tuple[dict[str, float], dict[str, str]]:
    """Return the sampling values that no setting chooses, and their sources. Empty if the model is unknown."""
    name = model or values["model"]
    if name is None:
        return {}, {}  # each model may recommend other values
    from localchat.config.settings import DEFAULT_SAMPLING
    from localchat.models.recommended_sampling import recommended_sampling
    from localchat.models.resolve import locate

    try:
        paths = find_paths(app.environ)
        advice = recommended_sampling(locate(name, paths, "", app.environ), paths)
    except LocalchatError:
        return {}, {}  # the model is not on this machine
    sampling = {key: value for key, value in DEFAULT_SAMPLING.items() if values[key] is None}
    sources = dict.fromkeys(sampling, "default")
    for key, value in advice.sampling.items():
        if values.get(key, value) is None:
            sampling[key] = value
            sources[key] = f"{advice.entry} in models.toml"
    return sampling, sources


def _format(value: Any, unset: str) -> str:  # noqa: ANN401 - any setting
    if value is None:
        return f"({unset})"
    return json_line(value)
