"""Command `localchat config`: shows settings with their origin, and changes them."""

from collections.abc import Mapping
from typing import Any

import click

from localchat.cli.context import AppContext
from localchat.cli.group import DefaultGroup
from localchat.cli.output import print_json, print_lines
from localchat.cli.settings import completion, cp, preset
from localchat.cli.streams import tell
from localchat.config.paths import find_paths
from localchat.config.settings import DEFAULT_SAMPLING, UNSET
from localchat.errors import LocalchatError


@click.group("config", cls=DefaultGroup, invoke_without_command=True)
def command() -> None:
    """Show and change settings, presets and aliases.

    Without a command, it shows them. A flag wins over the environment (LOCALCHAT_ and the key in capitals), the
    environment over the settings file, and the file over the default. In the file, [models."NAME"] wins over
    [defaults].
    """


@command.command("show")
@click.option("--origin", is_flag=True, help="Show the source of each value.")
@click.option("--for", "model", metavar="MODEL", help="Show the settings for this model.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_obj
def show(app: AppContext, origin: bool, model: str | None, as_json: bool) -> None:
    """Print every setting in effect."""
    values, origins = _in_effect(app, model)
    decided, sources = _decided(app, model, values)
    if as_json:
        rows = {
            key: {
                "value": decided.get(key, value),
                "origin": sources.get(key, origins[key]),
            }
            for key, value in values.items()
        }
        print_json(app.environ, rows if origin else values)
        return
    width = max(len(key) for key in values)
    lines = []
    for key, value in values.items():
        text = _written(decided.get(key, value), UNSET.get(key, "unset"))
        suffix = f"  ({sources.get(key, origins[key])})" if origin else ""
        lines.append(f"{key:<{width}} = {text}{suffix}")
    print_lines(app.environ, lines)


@command.command("get")
@click.argument("key")
@click.option("--for", "model", metavar="MODEL", help="Show the setting for this model.")
@click.pass_obj
def get_value(app: AppContext, key: str, model: str | None) -> None:
    """Print one setting in effect."""
    from localchat.config.settings import find_key

    name = find_key(key, "config get")
    values = _in_effect(app, model)[0]
    value = _decided(app, model, values)[0].get(name, values[name])
    text = value if isinstance(value, str) else _written(value, UNSET.get(name, "unset"))
    print_lines(app.environ, (text,))


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
    _write(app, key, None, model)


@command.command("keys")
def keys() -> None:
    """List every key with its meaning, flag and values."""
    from localchat.config.settings import KEYS, variable

    for key, words in KEYS.items():
        click.echo(
            f"{key}\n  {words.about} It takes {words.valid}.\n  {words.flag} · {variable(key)}"
        )


for _module in (preset, cp, completion):
    command.add_command(_module.command)


def _in_effect(app: AppContext, model: str | None) -> tuple[dict[str, Any], Mapping[str, str]]:
    """All settings, and where each comes from. Raises UsageError."""
    import msgspec

    from localchat.config.settings import from_environment, resolve
    from localchat.config.settings_file import read_settings

    file = read_settings(find_paths(app.environ).settings_file)
    settings, origins = resolve(
        file.layer((model,) if model else ()), from_environment(app.environ)
    )
    return msgspec.to_builtins(settings, str_keys=True), origins


def _write(app: AppContext, key: str, value: str | None, model: str | None) -> None:
    from localchat.config.settings import find_key
    from localchat.config.settings_file import write_setting

    file = find_paths(app.environ).settings_file
    write_setting(
        file, find_key(key, f'[models."{model}"]' if model else "[defaults]"), value, model
    )
    tell(f"localchat: wrote {file}")


def _decided(
    app: AppContext, model: str | None, values: Mapping[str, Any]
) -> tuple[dict[str, float], dict[str, str]]:
    """Return the sampling that the model or the engine decides, and the source of each value."""
    unset = [key for key in DEFAULT_SAMPLING if values[key] is None]
    found = {key: DEFAULT_SAMPLING[key] for key in unset}
    sources = dict.fromkeys(unset, "default")
    word = model or values["model"]
    if word is None:
        return found, sources
    from localchat.models.recommended_sampling import recommended_sampling
    from localchat.models.resolve import locate

    try:
        paths = find_paths(app.environ)
        advice = recommended_sampling(locate(word, paths, "", app.environ), paths)
    except LocalchatError:
        return found, sources  # the model is not here, so nothing more is known
    for key, value in advice.sampling.items():
        if values.get(key, value) is None:
            found[key] = value
            sources[key] = f"{advice.entry} in models.toml"
    return found, sources


def _written(value: Any, unset: str) -> str:  # noqa: ANN401 - any setting
    import msgspec

    if value is None:
        return f"({unset})"
    return msgspec.json.encode(value).decode()
