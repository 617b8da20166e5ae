"""Remote engines: the `[remotes]` section of the settings file, and which remote a word means.

    [remotes.box]
    url = "http://10.0.0.5:8000"
    model = "Qwen/Qwen2.5-72B-Instruct"     # without it: the server's first
    key_env = "BOX_KEY"                     # or key_file = "~/.box-key"

The word of a remote model is `remote:box`, `remote:box#MODEL`, or `remote:URL`; `--remote box` is short for it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import msgspec

from localchat.config.paths import expand_home
from localchat.errors import UsageError
from localchat.proxies import is_loopback

PREFIX: Final = "remote:"
_FIELDS: Final = ("url", "model", "key_env", "key_file")


class Remote(msgspec.Struct, frozen=True):
    """A server with the OpenAI API. Its key is read when needed and never kept."""

    name: str
    """The user's name for it."""
    url: str
    model: str = ""
    """Empty: the server's first."""
    key_env: str = ""
    """The environment variable that holds the key."""
    key_file: str = ""
    """The file that holds the key."""

    @property
    def word(self) -> str:
        """The word that finds it again."""
        return f"{PREFIX}{self.name}" + (f"#{self.model}" if self.model else "")

    @property
    def here(self) -> bool:
        """Whether it is on this machine."""
        address = self.url if "://" in self.url else f"http://{self.url}"
        host = urlsplit(address).hostname or ""
        return is_loopback(host)

    def key(self, environ: Mapping[str, str]) -> str:
        """The key; empty without one. Raises UsageError where it is configured and cannot be read."""
        if self.key_env:
            if found := environ.get(self.key_env, "").strip():
                return found
            raise UsageError(
                f"the remote {self.name} takes its key from {self.key_env}, which is not set",
                hint=f"export {self.key_env}=…",
            )
        if not self.key_file:
            return ""
        path = expand_home(self.key_file)
        try:
            return path.read_text("utf-8").strip()
        except (OSError, UnicodeDecodeError) as problem:
            raise UsageError(
                f"the remote {self.name} takes its key from {path}, which cannot be read: {problem}"
            ) from problem


def read_remotes(path: Path, section: object) -> dict[str, Remote]:
    """Check the `[remotes]` table of a settings file. Raises UsageError naming what is wrong."""
    if not isinstance(section, dict):
        raise UsageError(f"{path}: remotes is not a section", hint="as in [remotes.box]")
    found = {}
    for name, table in section.items():
        where = f"{path} [remotes.{name}]"
        if not isinstance(table, dict) or not all(isinstance(one, str) for one in table.values()):
            raise UsageError(f"{where} has to hold text: {', '.join(_FIELDS)}")
        if unknown := sorted(set(table) - set(_FIELDS)):
            raise UsageError(
                f"{where}: there is no {unknown[0]!r}", hint=f"use one of {', '.join(_FIELDS)}"
            )
        if not table.get("url"):
            raise UsageError(f"{where} has no url", hint='as url = "http://127.0.0.1:8000"')
        found[name] = Remote(name, **table)
    return found


def find_remote(word: str, remotes: Mapping[str, Remote]) -> Remote:
    """The remote for a word, with or without its prefix: a name in the settings file, or an address.

    Raises UsageError.
    """
    server, _, model = word.removeprefix(PREFIX).partition("#")
    if known := remotes.get(server):
        return msgspec.structs.replace(known, model=model or known.model)
    address = server if "://" in server else f"http://{server}"
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
