"""Service files of `localchat serve`: a systemd user unit and a launchd agent.

Each file starts the installation that printed it. It contains the flags and the `LOCALCHAT_` and `XDG_`
variables of that command, because a service inherits none from a shell.
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
"""Supported service managers."""

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
"""Options whose text may be a path."""
_UVX_CACHE: Final = "archive-v0"
"""Folder in uv's cache with the environments that `uvx` creates."""


class ServiceUnit(NamedTuple):
    """A `serve` command and its variables, as a service manager starts them."""

    program: tuple[str, ...]
    arguments: tuple[str, ...]
    """Arguments after `serve`."""
    environment: dict[str, str]

    @property
    def command(self) -> tuple[str, ...]:
        """All words of the command."""
        return (*self.program, "serve", *self.arguments)


def default_format() -> str:
    """Return the service manager of this platform."""
    return "launchd" if sys.platform == "darwin" else "systemd"


def service(ctx: click.Context, environ: Mapping[str, str]) -> ServiceUnit:
    """Return the unit of a `serve` command, with its program, flags and variables."""
    variables = {
        name: _variable_value(name, value)
        for name, value in sorted(environ.items())
        if (name.startswith("LOCALCHAT_") or name in _KEPT_VARIABLES)
        and name not in _SECRETS
        and value
    }
    return ServiceUnit(_program(), tuple(_arguments(ctx)), variables)


def _variable_value(name: str, value: str) -> str:
    if name in _PATHS:
        return str(expand_home(value).absolute())
    if name == _LIBRARY:
        return _absolute(value)
    return value


def _program() -> tuple[str, ...]:
    """Return the command of this installation with its absolute path.

    Links are not resolved, because an update may move their target.
    """
    program = Path(sys.argv[0])
    if program.name == _NAME:
        path = shutil.which(str(program))
        if path is not None:
            return (str(Path(path).absolute()),)
    return (sys.executable, "-m", "localchat")


def _arguments(ctx: click.Context) -> Iterator[str]:
    """Yield the arguments with absolute paths, without --print-unit."""
    words: list[str] = []
    for param in ctx.command.params:
        name = param.name or ""
        value = ctx.params.get(name)
        if name == "print_unit":
            continue
        if ctx.get_parameter_source(name) is not ParameterSource.COMMANDLINE:
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
    items = value if isinstance(value, tuple) else (value,)
    for item in items:
        if isinstance(item, Path):
            item = item.absolute()
        text = str(item)
        if param.name in _PATH_OPTIONS:
            text = _absolute(text)
        yield max(param.opts, key=len)
        yield text


def _absolute(name: str) -> str:
    """Return the absolute path of a model file or folder. A name stays a name."""
    path = expand_home(name)
    return str(path.absolute()) if path.exists() else name


def cautions(environ: Mapping[str, str]) -> Iterator[str]:
    """Yield warnings to read before the service is installed."""
    for name in _SECRETS:
        if environ.get(name):
            yield f"{name} is not in this file, because others can read it: use --api-key-file FILE"
    if _UVX_CACHE in Path(sys.prefix).parts:
        yield (
            "uvx runs localchat from its cache, which may be deleted later: run `uv tool install` first, and "
            "print this file again"
        )


def unit_file(unit: ServiceUnit, manager: str) -> str:
    """Return the text of the service file for `systemd` or `launchd`."""
    if manager == "systemd":
        return _systemd(unit)
    return _launchd(unit)


def _systemd(unit: ServiceUnit) -> str:
    # Many systems refuse mount namespaces to user services, so the unit uses only settings that need none.
    # It lacks MemoryDenyWriteExecute, because callbacks from native code and compiled kernels need such memory.
    variables = "".join(
        f"Environment={_quoted(f'{name}={value}')}\n" for name, value in unit.environment.items()
    )
    program, *arguments = map(_quoted, unit.command)
    line = " ".join((program, *(argument.replace("$", "$$") for argument in arguments)))
    permanent_errors = (ExitCode.USAGE, ExitCode.MODEL_MISSING, ExitCode.DOES_NOT_FIT)
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
# A rejected flag, or a model that is missing or too large, would fail again at the next start.
RestartPreventExitStatus={" ".join(str(int(code)) for code in permanent_errors)}
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
    """Quote a word of a unit file if necessary, and escape its specifiers."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    escaped = escaped.replace("\n", "\\n").replace("\t", "\\t")
    if text and escaped == text and not set(text) & set(" ';#"):
        return text
    return f'"{escaped}"'


def _launchd(unit: ServiceUnit) -> str:
    import plistlib  # imports an XML parser, which `--help` does not need

    log = str(Path.home() / "Library/Logs/localchat.log")
    values: dict[str, object] = {
        "Label": _LABEL,
        "ProgramArguments": list(unit.command),
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": 30,
        "ExitTimeOut": 30,
        "ProcessType": "Interactive",  # the default throttles it like a background job
        "Umask": 0o077,
        "StandardOutPath": log,
        "StandardErrorPath": log,
        "WorkingDirectory": str(Path.home()),
    }
    if unit.environment:
        values["EnvironmentVariables"] = unit.environment
    return plistlib.dumps(values, sort_keys=False).decode()


def install_lines(unit: ServiceUnit, manager: str) -> Sequence[str]:
    """Return the commands that install the file, show its log, and remove it."""
    variables = [f"{name}={shlex.quote(value)}" for name, value in unit.environment.items()]
    words = (*unit.program, "serve", f"--print-unit={manager}", *unit.arguments)
    print_command = " ".join((*variables, shlex.join(words)))
    if manager == "systemd":
        folder = "~/.config/systemd/user"
        return (
            f"mkdir -p {folder}",
            f"{print_command} > {folder}/{_NAME}.service",
            f"systemctl --user daemon-reload && systemctl --user enable --now {_NAME}",
            f"journalctl --user -u {_NAME} -f            # show its log",
            "loginctl enable-linger                     # keep it running while you are not logged in",
            f"systemctl --user disable --now {_NAME}     # remove it",
        )
    path = f"~/Library/LaunchAgents/{_LABEL}.plist"
    return (
        "mkdir -p ~/Library/LaunchAgents",
        f"{print_command} > {path}",
        f"launchctl bootstrap gui/$(id -u) {path}",
        "tail -f ~/Library/Logs/localchat.log        # show its log",
        f"launchctl bootout gui/$(id -u)/{_LABEL}    # remove it",
    )
