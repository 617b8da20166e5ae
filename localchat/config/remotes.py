"""Remote engines: the `[remotes]` section of the settings file, and their names.

    [remotes.box]
    url = "http://10.0.0.5:8000"
    model = "Qwen/Qwen2.5-72B-Instruct"     # without it: the server's first
    key_env = "BOX_KEY"                     # or key_file = "~/.box-key"

A remote model has the name `remote:box`, `remote:box#MODEL`, or `remote:URL`. `--remote box` is a short form.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import msgspec

from localchat.config.paths import expand_home, read_input
from localchat.errors import UsageError, reason
from localchat.proxies import is_loopback
from localchat.suggestions import did_you_mean

PREFIX: Final = "remote:"
_MAX_KEY_BYTES: Final = 1_000_000
_FIELDS: Final = ("url", "model", "key_env", "key_file")


class Remote(msgspec.Struct, frozen=True):
    """A server with the OpenAI API. Its key is read when needed and never stored."""

    name: str
    """Name in the settings file."""
    url: str
    model: str = ""
    """Model to use; empty for the server's first."""
    key_env: str = ""
    """Environment variable with the key."""
    key_file: str = ""
    """File with the key."""

    @property
    def word(self) -> str:
        """Name that `find_remote` accepts."""
        if not self.model:
            return f"{PREFIX}{self.name}"
        return f"{PREFIX}{self.name}#{self.model}"

    @property
    def here(self) -> bool:
        """True if the server is on this machine."""
        return is_loopback(urlsplit(_with_scheme(self.url)).hostname or "")

    def key(self, environ: Mapping[str, str]) -> str:
        """Return the key; empty if none is configured. Raises UsageError if it cannot be read."""
        if self.key_env:
            if key := environ.get(self.key_env, "").strip():
                return key
            raise UsageError(
                f"the remote {self.name} takes its key from {self.key_env}, which is not set",
                hint=f"export {self.key_env}=…",
            )
        if not self.key_file:
            return ""
        path = expand_home(self.key_file)
        try:
            return read_input(path, _MAX_KEY_BYTES).decode("utf-8").strip()
        except (OSError, UnicodeDecodeError) as problem:
            raise UsageError(
                f"the remote {self.name} takes its key from {path}, which cannot be read: {reason(problem)}"
            ) from problem


def read_remotes(path: Path, section: object) -> dict[str, Remote]:
    """Check the `[remotes]` table of a settings file. Raises UsageError."""
    if not isinstance(section, dict):
        raise UsageError(f"{path}: remotes is not a section", hint="as in [remotes.box]")
    remotes = {}
    for name, table in section.items():
        where = f"{path} [remotes.{name}]"
        if not isinstance(table, dict) or not all(
            isinstance(value, str) for value in table.values()
        ):
            raise UsageError(f"{where} must contain text: {', '.join(_FIELDS)}")
        if unknown := sorted(set(table) - set(_FIELDS)):
            raise UsageError(
                f"{where}: there is no {unknown[0]!r}", hint=did_you_mean(unknown[0], _FIELDS)
            )
        if not table.get("url"):
            raise UsageError(f"{where} has no url", hint='as url = "http://127.0.0.1:8000"')
        remotes[name] = Remote(name, **table)
    return remotes


def _with_scheme(address: str) -> str:
    """Return an address with a scheme, HTTP by default."""
    if "://" in address:
        return address
    return f"http://{address}"


def find_remote(name: str, remotes: Mapping[str, Remote]) -> Remote:
    """Return the remote for a name or an address, with or without prefix.

    Raises UsageError for a name that the settings file does not have.
    """
    server, _, model = name.removeprefix(PREFIX).partition("#")
    if remote := remotes.get(server):
        return msgspec.structs.replace(remote, model=model or remote.model)
    address = _with_scheme(server)
    host = urlsplit(address).hostname or ""
    if "://" in server or ":" in server or "." in host or host == "localhost":
        if not address.startswith(("http://", "https://")):
            raise UsageError(
                f"{server!r} is not the address of a server", hint="as in http://127.0.0.1:8000"
            )
        return Remote(server, server, model)
    names = ", ".join(sorted(remotes)) or "none yet"
    raise UsageError(
        f"there is no remote {server!r}",
        hint=f"the settings file has {names}, under [remotes.NAME]; or give an address, as "
        "http://127.0.0.1:8000",
    )
