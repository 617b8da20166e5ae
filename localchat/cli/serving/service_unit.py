"""Service files of `localchat serve`: a systemd user unit and a launchd agent.

Each starts the installation that printed it, with its flags and its `LOCALCHAT_` and `XDG_` variables, because
a service inherits neither from a shell.
"""

import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import click
from click.core import ParameterSource

from localchat.config.paths import expand_home
from localchat.errors import ExitCode

FORMATS: Final = ("systemd", "launchd")
"""The service managers that a unit can be printed for."""

_NAME: Final = "localchat"
_LABEL: Final = "localchat.serve"
_SECRETS: Final = ("LOCALCHAT_API_KEY",)
_KEPT_VARIABLES: Final = (
    *("XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME"),
    *("HF_HOME", "HF_ENDPOINT"),
)
_PATHS: Final = ("LOCALCHAT_CONFIG", "LOCALCHAT_DATA_DIR", "LOCALCHAT_MODELS")
_LIBRARY: Final = "LOCALCHAT_LLAMACPP_LIBRARY"
_PATH_OPTIONS: Final = ("llamacpp_library",)
"""Options that are read as text, and may be a path."""
_UVX_CACHE: Final = "archive-v0"
"""Folder of uv's cache with the environments that `uvx` makes."""


class ServiceUnit(NamedTuple):
    """A `serve` command and its variables, as a service manager starts them."""

    program: tuple[str, ...]
    arguments: tuple[str, ...]
    """After `serve`."""
    environment: dict[str, str]

    @property
    def command(self) -> tuple[str, ...]:
        """All words of the command."""
        return (*self.program, "serve", *self.arguments)


def default_format() -> str:
    """The service manager of this platform."""
    return "launchd" if sys.platform == "darwin" else "systemd"


def service(ctx: click.Context, environ: Mapping[str, str]) -> ServiceUnit:
    """The service of a `serve` command: its program, the flags on its command line, its variables."""
    kept = {
        name: _kept_value(name, value)
        for name, value in sorted(environ.items())
        if (name.startswith("LOCALCHAT_") or name in _KEPT_VARIABLES)
        and name not in _SECRETS
        and value
    }
    return ServiceUnit(_program(), tuple(_arguments(ctx)), kept)


def _kept_value(name: str, value: str) -> str:
    if name in _PATHS:
        return str(expand_home(value).absolute())
    return _absolute(value) if name == _LIBRARY else value


def _program() -> tuple[str, ...]:
    """This installation's command by its absolute path; links stay, for an update may move their target."""
    started = Path(sys.argv[0])
    if started.name == _NAME:
        found = shutil.which(str(started))
        if found is not None:
            return (str(Path(found).absolute()),)
    return (sys.executable, "-m", "localchat")


def _arguments(ctx: click.Context) -> Iterator[str]:
    """Arguments of the command line, with absolute paths. The flag that prints the unit is left out."""
    words: list[str] = []
    for param in ctx.command.params:
        name, value = param.name or "", ctx.params.get(param.name or "")
        given = ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE
        if not given or name == "print_unit":
            continue
        if isinstance(param, click.Argument):
            words.append(_absolute(str(value)))
        elif isinstance(param, click.Option):
            yield from _option(param, value)
    if words and words[0].startswith("-"):
        yield "--"
    yield from words


def _option(param: click.Option, value: object) -> Iterator[str]:
    if isinstance(value, bool):
        yield max(param.opts if value else param.secondary_opts, key=len)
        return
    for one in value if isinstance(value, tuple) else (value,):
        text = str(one.absolute()) if isinstance(one, Path) else str(one)
        text = _absolute(text) if param.name in _PATH_OPTIONS else text
        yield from (max(param.opts, key=len), text)


def _absolute(word: str) -> str:
    """The path of a model file or folder from the root; a name stays a name."""
    path = expand_home(word)
    return str(path.absolute()) if path.exists() else word


def cautions(environ: Mapping[str, str]) -> Iterator[str]:
    """Warnings before the service is installed."""
    for name in _SECRETS:
        if environ.get(name):
            yield f"{name} is not in this file, because others can read it: use --api-key-file FILE"
    if _UVX_CACHE in Path(sys.prefix).parts:
        yield (
            "uvx runs localchat from its cache, which may be gone later: `uv tool install` it first, and print "
            "this again"
        )


# ---------------------------------------------------------------------------- the files


def unit_file(what: ServiceUnit, manager: str) -> str:
    """The text of the service file for `systemd` or `launchd`."""
    if manager == "systemd":
        return _systemd(what)
    return _launchd(what)


def _systemd(what: ServiceUnit) -> str:
    # Only what works without a mount namespace, which many systems refuse to services of a user; no
    # MemoryDenyWriteExecute, because callbacks from native code and compiled kernels need such memory.
    variables = "".join(
        f"Environment={_quoted(f'{name}={value}')}\n" for name, value in what.environment.items()
    )
    program, *arguments = map(_quoted, what.command)
    line = " ".join((program, *(each.replace("$", "$$") for each in arguments)))
    hopeless = (ExitCode.USAGE, ExitCode.MODEL_MISSING, ExitCode.DOES_NOT_FIT)
    return f"""\
# The server of localchat as a service of one user.

[Unit]
Description=localchat: language models over HTTP
StartLimitIntervalSec=600
StartLimitBurst=5

[Service]
Type=exec
ExecStart={line}
{variables}Restart=on-failure
RestartSec=5
# A flag that is refused, a model that is missing or too large: the next start would end the same way.
RestartPreventExitStatus={" ".join(str(int(each)) for each in hopeless)}
# The server ends the processes of its models itself.
KillMode=mixed
TimeoutStopSec=30
UMask=0077
NoNewPrivileges=yes
LockPersonality=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK
SystemCallArchitectures=native

[Install]
WantedBy=default.target
"""


def _quoted(text: str) -> str:
    """A word of a unit file: quoted where it must be, without specifiers."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    escaped = escaped.replace("\n", "\\n").replace("\t", "\\t")
    plain = escaped == text and text and not set(text) & set(" ';#")
    return text if plain else f'"{escaped}"'


def _launchd(what: ServiceUnit) -> str:
    import plistlib  # with its XML parser; `--help` needs none

    log = str(Path.home() / "Library/Logs/localchat.log")
    values: dict[str, object] = {
        "Label": _LABEL,
        "ProgramArguments": list(what.command),
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": 30,
        "ExitTimeOut": 30,
        "ProcessType": "Interactive",  # the default slows it down as a background job
        "Umask": 0o077,
        "StandardOutPath": log,
        "StandardErrorPath": log,
        "WorkingDirectory": str(Path.home()),
    }
    if what.environment:
        values["EnvironmentVariables"] = what.environment
    return plistlib.dumps(values, sort_keys=False).decode()


def install_lines(what: ServiceUnit, manager: str) -> Sequence[str]:
    """Commands that install the file, see its log, and remove it."""
    variables = [f"{name}={shlex.quote(value)}" for name, value in what.environment.items()]
    words = (*what.program, "serve", f"--print-unit={manager}", *what.arguments)
    print_it = " ".join((*variables, shlex.join(words)))
    if manager == "systemd":
        place = "~/.config/systemd/user"
        return (
            f"mkdir -p {place}",
            f"{print_it} > {place}/{_NAME}.service",
            f"systemctl --user daemon-reload && systemctl --user enable --now {_NAME}",
            f"journalctl --user -u {_NAME} -f            # its log",
            "loginctl enable-linger                     # it also runs while you are not logged in",
            f"systemctl --user disable --now {_NAME}     # takes it back",
        )
    place = f"~/Library/LaunchAgents/{_LABEL}.plist"
    return (
        "mkdir -p ~/Library/LaunchAgents",
        f"{print_it} > {place}",
        f"launchctl bootstrap gui/$(id -u) {place}",
        "tail -f ~/Library/Logs/localchat.log        # its log",
        f"launchctl bootout gui/$(id -u)/{_LABEL}    # takes it back",
    )
