"""Settings file: TOML that the user writes, and the program changes without losing comments.

    [defaults]
    temperature = 0.2

    [models."qwen2.5:7b"]
    context_length = 16384

    [keys]
    "chat.new" = "ctrl+k"

    [remotes.box]
    url = "http://10.0.0.5:8000"

The section of a model overrides `[defaults]`. `[keys]` rebinds keys of the terminal UI, which checks their
names (tui/keymap.py). `[remotes]` names engines on other machines (remotes.py). `[mcp]` are servers of tools
(mcp_servers.py).
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from localchat.config.mcp_servers import (
    McpServer,
    as_table,
    check_server_name,
    read_mcp_servers,
)
from localchat.config.paths import read_input
from localchat.config.remotes import Remote, find_remote, read_remotes
from localchat.config.settings import REMOVED, Given, check_key, convert, find_key
from localchat.errors import LocalchatError, UsageError, os_errors_as, reason
from localchat.suggestions import closest

_SECTIONS = (
    'settings belong under [defaults] or under a model, as [models."NAME"]; keys of the screen under '
    "[keys]; engines on other machines under [remotes.NAME]; "
    "MCP servers under [mcp.NAME]"
)


_MAX_BYTES = 1_000_000
_SECTION_NAMES = ("defaults", "models", "keys", "remotes", "mcp")


class SettingsFile(msgspec.Struct, frozen=True):
    """A checked settings file, by section."""

    path: Path
    defaults: Mapping[str, object]
    models: Mapping[str, Mapping[str, object]]
    keys: Mapping[str, str] = msgspec.field(default_factory=dict)
    remotes: Mapping[str, Remote] = msgspec.field(default_factory=dict)
    mcp_servers: Mapping[str, McpServer] = msgspec.field(default_factory=dict)
    notices: tuple[str, ...] = ()
    """Sentences for the user about sections and removed keys that have no effect."""

    @property
    def variables(self) -> frozenset[str]:
        """Environment variables that the file names for servers."""
        names = [remote.key_env for remote in self.remotes.values()]
        for server in self.mcp_servers.values():
            names += (server.key_env, *server.env)
        return frozenset(names)

    def layer(self, model_names: Iterable[str] = ()) -> dict[str, Given]:
        """Return the settings for a model. Later names override earlier ones."""
        entries = {
            key: Given(value, f"{self.path} [defaults]") for key, value in self.defaults.items()
        }
        for name in model_names:
            for key, value in self.models.get(name, {}).items():
                entries[key] = Given(value, f"{self.path} {_heading(name)}")
        return entries


def read_settings(path: Path) -> SettingsFile:
    """Read and check a settings file. A missing file counts as empty. Raises UsageError."""
    text = _text(path)
    if not text:
        return SettingsFile(path, {}, {})
    from tomllib import TOMLDecodeError, loads

    try:
        table = loads(text)
    except TOMLDecodeError as problem:
        raise UsageError(f"the settings file {path} is not TOML: {problem}") from problem
    notices = [
        f"{path}: {key} was removed, because {REMOVED[key]}. Delete it."
        for key in _without_removed(table)
    ]
    # Another release may have more sections, and one of them must not stop every command of this one.
    for name in table:
        if name in _SECTION_NAMES:
            continue
        advice = _SECTIONS
        if nearest := closest(name, _SECTION_NAMES):
            advice = f"did you mean [{nearest[0]}]?"
        notices.append(f"{path}: there is no section {name!r}, so it has no effect; {advice}")
    models = _table(path, "[models]", table.get("models", {}))
    return SettingsFile(
        path,
        _section(path, "[defaults]", table.get("defaults", {})),
        {name: _section(path, _heading(name), section) for name, section in models.items()},
        _keys(path, table.get("keys", {})),
        read_remotes(path, table.get("remotes", {})),
        read_mcp_servers(path, table.get("mcp", {})),
        tuple(notices),
    )


def _without_removed(table: dict[str, Any]) -> Iterable[str]:
    """Delete the removed keys and sections of a parsed file, and return each once."""
    sections = [table, table.get("defaults"), table.get("keys")]
    models = table.get("models")
    if isinstance(models, dict):
        sections += models.values()
    removed: dict[str, None] = {}
    for section in sections:
        if isinstance(section, dict):
            for key in REMOVED.keys() & section.keys():
                del section[key]
                removed[key] = None
    return removed


def write_setting(path: Path, key: str, text: str | None, model: str | None = None) -> None:
    """Set `key` in the file, or remove it if the text is None, for all models or for one.

    The key may be the name of a flag. Comments, order and blank lines stay. Raises UsageError, and
    LocalchatError if the file cannot be written.
    """
    heading = "[defaults]"
    sections: tuple[str, ...] = ("defaults",)
    if model:
        heading = _heading(model)
        sections = ("models", model)
    key = find_key(key, heading)
    value = None
    if text is not None:
        value = convert(key, Given(text, ""))
    if key == "remote" and value:
        # Every later start would fail with an unknown remote.
        find_remote(str(value), read_settings(path).remotes)
    _change(path, sections, {key: value})


def write_mcp_server(path: Path, server: McpServer) -> None:
    """Add an MCP server, or replace one of its name. Raises UsageError, LocalchatError."""
    check_server_name(server.name)
    remove_mcp_server(path, server.name)
    _change(path, ("mcp", server.name), as_table(server))


def remove_mcp_server(path: Path, name: str) -> None:
    """Remove an MCP server. Raises UsageError, LocalchatError."""
    _change(path, ("mcp",), {name: None})


def _change(path: Path, sections: tuple[str, ...], values: Mapping[str, object]) -> None:
    """Set values in a section of the file, or remove those that are None."""
    from filelock import FileLock

    from localchat.atomic import write_text

    with os_errors_as(LocalchatError, f"the settings file {path} cannot be written"):
        # The file may be a link into a folder of dotfiles.
        target = path.resolve()
        target.parent.mkdir(parents=True, exist_ok=True)
        # Two processes must not lose each other's changes.
        with FileLock(target.with_suffix(".lock")):
            text = _changed(path, sections, values)
            try:
                text.encode()
            except UnicodeEncodeError as problem:
                # Every later command would reject the file.
                raise UsageError(
                    "the settings file is UTF-8, and the new value is not"
                ) from problem
            write_text(path, text)


def _changed(path: Path, sections: tuple[str, ...], values: Mapping[str, object]) -> str:
    """Return the text of the file with the changes."""
    import tomlkit
    from tomlkit.items import Table

    # It raises for a file with errors, which must not be overwritten.
    read_settings(path)
    document = tomlkit.parse(_text(path))
    section: Any = document
    for depth, name in enumerate(sections, 1):
        if name not in section:
            section[name] = tomlkit.table(is_super_table=depth < len(sections))
        section = section[name]
    assert isinstance(section, Table | dict)
    for key, value in values.items():
        if value is not None:
            section[key] = _toml_value(value)
        elif key in section:
            del section[key]
    return tomlkit.dumps(document)


def _text(path: Path) -> str:
    try:
        # Some editors start a file with a byte order mark.
        return read_input(path, _MAX_BYTES).decode("utf-8-sig")
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except UnicodeDecodeError as problem:
        raise UsageError(
            f"the settings file {path} is not UTF-8 (first at byte {problem.start:,})",
            hint="save it as UTF-8 in your editor",
        ) from problem
    except OSError as problem:
        raise UsageError(
            f"the settings file {path} cannot be read: {reason(problem)}",
            hint="LOCALCHAT_CONFIG names the file",
        ) from problem


def _section(path: Path, heading: str, section: object) -> Mapping[str, object]:
    table = _table(path, heading, section)
    for key, value in table.items():
        where = f"{path} {heading}"
        check_key(key, where)
        if key == "model" and heading != "[defaults]":
            raise UsageError(f"{where}: the section of a model cannot name a model")
        convert(key, Given(value, where))
    return table


def _keys(path: Path, section: object) -> dict[str, str]:
    table = _table(path, "[keys]", section)
    for id_, keys in table.items():
        if not isinstance(keys, str):
            raise UsageError(
                f"{path} [keys]: {id_} has no key", hint='keys are text, as "chat.new" = "ctrl+k"'
            )
    return dict(table)


def _table(path: Path, heading: str, section: object) -> Mapping[str, Any]:
    if not isinstance(section, dict):
        raise UsageError(f"{path}: {heading.strip('[]')} is not a section", hint=_SECTIONS)
    return section


def _heading(model: str) -> str:
    return f'[models."{model}"]'


def _toml_value(value: object) -> object:
    """Convert a tuple to a list, and the keys of a table to text."""
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, dict):
        return {str(key): item for key, item in value.items()}
    return value
