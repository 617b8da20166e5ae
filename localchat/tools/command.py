"""Tool that runs a command in the root folder: isolated where the system allows it, and always with consent."""

import asyncio
import os
import re
import shutil
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from localchat.tools.root import Root
from localchat.tools.tool import Plan, Tool, bounded, own_tool

_TIMEOUT_S: Final = 120
_MAX_TIMEOUT_S: Final = 600
_MAX_OUTPUT: Final = 30_000
_MAX_READ_BYTES: Final = 4 << 20
"""Output after which a command is ended, because nothing reads the rest."""
_PROBE_S: Final = 10
_DRAIN_S: Final = 0.2
_SECRET: Final = re.compile(
    r"KEY|TOKEN|SECRET|PASSW|PASSPHRASE|CREDENTIAL|AUTH|COOKIE|_DSN$|_PAT$|_PWD$", re.IGNORECASE
)
_SECRET_VALUE: Final = re.compile(r"://[^/\s:@]*:[^/\s@]+@")
"""A URL with a password, such as that of a database or a proxy."""
_SOCKETS: Final = (
    "SSH_AUTH_SOCK",
    "DBUS_SESSION_BUS_ADDRESS",
    "DISPLAY",
    "WAYLAND_DISPLAY",
    "XDG_RUNTIME_DIR",
    "DOCKER_HOST",
)
"""Variables that lead to services outside."""
_HIDDEN: Final = ("/run/user", "/run/dbus", "/run/systemd", "/run/docker.sock", "/run/containerd")
_NO_OUTPUT: Final = "The command succeeded without output."
NOT_ISOLATED: Final = (
    "Commands are not isolated on this system (no bubblewrap, no user namespaces): they can reach the "
    "network and write outside of the folder."
)


class CommandArguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    command: Annotated[str, Meta(min_length=1, max_length=20_000, description="Command of sh.")]
    timeout_s: Annotated[int, Meta(ge=1, le=_MAX_TIMEOUT_S)] = _TIMEOUT_S


class Isolation:
    """How commands are kept from the network and from files outside of a folder. Found at the first use."""

    def __init__(self, root: Path) -> None:
        self._root = str(root)
        self._prefix: tuple[str, ...] | None = None

    async def prefix(self) -> tuple[str, ...]:
        """Return the program before a command. Empty if nothing isolates it."""
        if self._prefix is None:
            self._prefix = ()
            # No folder is outside of the top one.
            candidates = () if self._root == "/" else (self._bubblewrap(), self._namespaces())
            for candidate in filter(None, candidates):
                with suppress(OSError):
                    output = await _run((*candidate, "true"), Path("/"), dict(os.environ), _PROBE_S)
                    if output == _NO_OUTPUT:
                        self._prefix = candidate
                        break
        return self._prefix

    def _bubblewrap(self) -> tuple[str, ...]:
        program = shutil.which("bwrap")
        if program is None:
            return ()
        words = [
            program,
            *["--unshare-all", "--cap-drop", "ALL", "--die-with-parent", "--new-session"],
        ]
        words += ["--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp"]
        for path in _HIDDEN:
            if Path(path).is_dir():
                words += ("--tmpfs", path)
            elif Path(path).exists():
                words += ("--ro-bind", "/dev/null", path)
        return (*words, "--bind", self._root, self._root, "--chdir", self._root, "--")

    def _namespaces(self) -> tuple[str, ...]:
        if not sys.platform.startswith("linux"):
            return ()
        script = Path(__file__).with_name("sandbox_child.py")
        return (sys.executable, "-I", "-S", str(script), self._root)


def command_tool(root: Root, environ: Mapping[str, str]) -> Tool:
    """Return the tool that runs commands with this environment, without its secrets."""
    isolation = Isolation(root.path)

    async def plan(arguments: CommandArguments) -> Plan:
        prefix = await isolation.prefix()
        preview = arguments.command
        if not prefix:
            preview += f"\n\n{NOT_ISOLATED}"

        async def run() -> str:
            words = (*prefix, "sh", "-c", arguments.command)
            return await _run(words, root.path, _environment(environ), arguments.timeout_s)

        title = " ".join(arguments.command.split())
        # Consent for the session covers this very command only. Without the prefix, the command
        # `mcp files_write` would have the scope of that tool.
        return Plan(run, title, f"command {arguments.command}", "this exact command", preview)

    return own_tool(
        "run_command",
        "Run a shell command in the working folder and return its output. There is no network.",
        "run",
        CommandArguments,
        plan,
    )


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    kept = {
        name: value
        for name, value in environ.items()
        if not _SECRET.search(name) and not _SECRET_VALUE.search(value) and name not in _SOCKETS
    }
    return kept | {"TERM": "dumb", "NO_COLOR": "1", "PAGER": "cat", "GIT_TERMINAL_PROMPT": "0"}


async def drain(process: asyncio.subprocess.Process) -> None:
    """Read the remaining output of an ended process, so that its pipe closes.

    The event loop may end right after a cancelled call. Waits a moment for programs that kept the pipe."""
    assert process.stdout is not None
    with suppress(TimeoutError):
        async with asyncio.timeout(_DRAIN_S):
            while await process.stdout.read(1 << 16):
                pass


async def _run(
    words: tuple[str, ...], folder: Path, environ: dict[str, str], timeout_s: int
) -> str:
    """Run a program to its end, and return its output with its exit status."""
    process = await asyncio.create_subprocess_exec(
        *words,
        cwd=folder,
        env=environ,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    output = bytearray()
    ending = ""
    try:
        async with asyncio.timeout(timeout_s):
            assert process.stdout is not None
            while piece := await process.stdout.read(1 << 16):
                output += piece
                if len(output) > _MAX_READ_BYTES:
                    ending = f"ended, because its output is longer than {_MAX_READ_BYTES >> 20} MB"
                    break
            else:
                await process.wait()
    except TimeoutError:
        ending = f"ended, because it took longer than {timeout_s} s"
    finally:
        # Also programs that it left running in the background end.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        await drain(process)
    text = bounded(output.decode("utf-8", "replace").rstrip("\n"), _MAX_OUTPUT)
    status = process.returncode
    if not ending and status == 0:
        return text or _NO_OUTPUT
    return f"{text}\n[{ending or f'exit status {status}'}]".lstrip("\n")
