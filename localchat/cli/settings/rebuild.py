"""Run `localchat doctor --rebuild`."""

import sys
import time
from typing import TYPE_CHECKING, Final

import click

from localchat.cli.context import AppContext
from localchat.cli.streams import Terminal, tell
from localchat.config.paths import find_paths
from localchat.errors import LocalchatError, UsageError
from localchat.units import duration

if TYPE_CHECKING:
    from localchat.backend_api.interface import Backend, Rebuilder, RebuildProgress

BEST: Final = "best"
"""Value of --rebuild for the most useful build."""
UNDO: Final = "undo"


def rebuild(app: AppContext, choice: str, *, yes: bool) -> None:
    """Build for this machine, after asking, or remove a build. `choice`: BEST, UNDO or a kind of build.

    Raises LocalchatError. An interrupt changes nothing.
    """
    from localchat.cli.signals import terminate_gracefully

    backend, builder = _builder()
    if choice == UNDO:
        outcome_text = "there is no build to remove"
        if builder.undo():
            outcome_text = "the build is removed"
        tell(f"localchat: {outcome_text}; `localchat doctor` shows the library in use")
        return
    kind = _kind(backend, builder, choice)
    if not kind:
        tell("localchat: this build already suits this machine, so there is nothing to rebuild")
        return
    _agree(app, kind, builder.minutes(kind), yes=yes)
    terminal = Terminal(app.environ)
    display = _Display(terminal, builder.minutes(kind) * 60)
    try:
        with terminate_gracefully():
            outcome = builder.rebuild(kind, display.show)
    except KeyboardInterrupt:
        terminal.print_line("localchat: stopped; nothing was changed")
        raise
    terminal.progress("")
    if outcome.installed:
        terminal.print_line(
            f"localchat: the new build is used from the next start on: {outcome.sentence}"
        )
        terminal.print_line("  localchat doctor --rebuild=undo removes it")
    else:
        terminal.print_line(f"localchat: the new build is not used: {outcome.sentence}")


def _builder() -> "tuple[Backend, Rebuilder]":
    from localchat.backend_api.registry import find_backends

    for backend in find_backends().values():
        builder = backend.rebuilder()
        if builder is not None:
            return backend, builder
    raise LocalchatError("no installed backend has a library that can be built")


def _kind(backend: "Backend", builder: "Rebuilder", choice: str) -> str:
    """Return the kind of build to make, or an empty string if none is needed.

    Raises UsageError for an unknown kind, LocalchatError.
    """
    if choice != BEST:
        if choice not in builder.kinds:
            raise UsageError(
                f"--rebuild={choice}: there is no such build",
                hint=f"use one of {', '.join(builder.kinds)}; {UNDO} removes a build",
            )
        return choice
    offer = builder.offer()
    if offer is not None:
        if offer.missing:
            raise LocalchatError("llama.cpp cannot be built here yet", hint=offer.missing)
        return offer.kind
    return next((remedy.rebuild for remedy in backend.remedies() if remedy.rebuild), "")


def _agree(app: AppContext, kind: str, minutes: float, *, yes: bool) -> None:
    """Ask the user, unless `yes`. Raises click.Abort, and UsageError if asking or building is impossible."""
    from localchat.config.settings import from_environment, resolve
    from localchat.config.settings_file import read_settings

    file = read_settings(find_paths(app.environ).settings_file)
    if resolve(file.layer(), from_environment(app.environ)).settings.offline:
        raise UsageError("a rebuild downloads the source, and offline is set")
    if yes:
        return
    if sys.stdin is None or sys.stdin.closed or not sys.stdin.isatty():
        raise UsageError(
            "doctor --rebuild needs confirmation, but stdin is not a terminal",
            hint="use --yes to confirm",
        )
    tell(
        f"This downloads llama.cpp's source (70 MB) and builds it for this machine ({kind}), which takes about "
        f"{_minutes(minutes)} at low priority. The build is then tested, and used only if it is "
        "correct. Ctrl+C stops it and changes nothing."
    )
    click.confirm("Build it?", abort=True, err=True)


class _Display:
    """Draws the progress line with step, parts, elapsed and expected time."""

    def __init__(self, terminal: Terminal, expected_s: float) -> None:
        self._terminal = terminal
        self._expected_s = expected_s
        self._began_s = time.monotonic()

    def show(self, progress: "RebuildProgress") -> None:
        """Draw the line."""
        elapsed_s = time.monotonic() - self._began_s
        line = progress.step
        if progress.total:
            line += f" {progress.done} of {progress.total}"
        line += f" · {duration(elapsed_s)}"
        if elapsed_s < self._expected_s:
            line += f", of about {duration(self._expected_s)}"
        self._terminal.progress(line)


def _minutes(minutes: float) -> str:
    number = max(1, round(minutes))
    return "a minute" if number == 1 else f"{number} minutes"
