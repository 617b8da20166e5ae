"""`localchat doctor --rebuild`, and the sentence that offers it once after an answer."""

import sys
import time
from typing import TYPE_CHECKING, Final, TextIO

import click
import msgspec

from localchat.cli.context import AppContext
from localchat.cli.streams import Terminal, tell
from localchat.config.paths import find_paths
from localchat.errors import LocalchatError, UsageError
from localchat.state_file import StateFile
from localchat.units import duration

if TYPE_CHECKING:
    from localchat.backend_api.interface import Backend, Rebuilder, RebuildProgress
    from localchat.cli.resolve import Setup
    from localchat.engine.interface import EngineInfo

BEST: Final = "best"
"""Asks for the build that helps most."""
UNDO: Final = "undo"
_FILE: Final = "rebuild-offers.json"


_QUIET_S: Final = 3600.0
"""Time after the first answer without hints about the machine."""


class _Offers(msgspec.Struct, frozen=True):
    kinds: tuple[str, ...] = ()
    """Builds that were offered after an answer."""
    first_s: float = 0.0
    """Time of the first answer; 0 before it."""


def rebuild(app: AppContext, asked: str, *, yes: bool) -> None:
    """Build for this machine after asking, or take a build back. `asked`: BEST, UNDO or a kind of build.

    Raises LocalchatError; an interrupt leaves everything as it was."""
    from localchat.cli.signals import terminate_gracefully

    backend, builder = _builder()
    if asked == UNDO:
        there = builder.undo()
        sentence = "the build is removed" if there else "there is no build to take back"
        tell(f"localchat: {sentence}; `localchat doctor` says what is used now")
        return
    kind = _kind(backend, builder, asked)
    if not kind:
        tell("localchat: there is nothing to rebuild: this build fits this machine")
        return
    _agree(app, kind, builder.minutes(kind), yes=yes)
    terminal = Terminal(app.environ)
    display = _Display(terminal, builder.minutes(kind) * 60)
    try:
        with terminate_gracefully():
            outcome = builder.rebuild(kind, display.show)
    except KeyboardInterrupt:
        terminal.print_line("localchat: stopped; everything is as it was before")
        raise
    terminal.progress("")
    if outcome.taken:
        terminal.print_line(
            f"localchat: the new build is used from the next start on: {outcome.sentence}"
        )
        terminal.print_line("  localchat doctor --rebuild=undo takes it back")
    else:
        terminal.print_line(f"localchat: the new build is not taken: {outcome.sentence}")


def _builder() -> "tuple[Backend, Rebuilder]":
    from localchat.backend_api.registry import find_backends

    for backend in find_backends().values():
        builder = backend.rebuilder()
        if builder is not None:
            return backend, builder
    raise LocalchatError("no installed backend has a library that could be built")


def _kind(backend: "Backend", builder: "Rebuilder", asked: str) -> str:
    """The build to make; empty: none is needed. Raises UsageError for an unknown one, LocalchatError."""
    if asked != BEST:
        if asked not in builder.kinds:
            raise UsageError(
                f"--rebuild={asked}: there is no such build",
                hint=f"it is one of {', '.join(builder.kinds)}; {UNDO} takes a build back",
            )
        return asked
    offer = builder.offer()
    if offer is not None:
        if offer.missing:
            raise LocalchatError("llama.cpp cannot be built here yet", hint=offer.missing)
        return offer.kind
    return next((remedy.rebuild for remedy in backend.remedies() if remedy.rebuild), "")


def _agree(app: AppContext, kind: str, minutes: float, *, yes: bool) -> None:
    """Ask, unless `yes`. Raises UsageError where nobody can be asked or offline is set, click.Abort."""
    from localchat.config.settings import from_environment, resolve
    from localchat.config.settings_file import read_settings

    file = read_settings(find_paths(app.environ).settings_file)
    if resolve(file.layer(), from_environment(app.environ)).settings.offline:
        raise UsageError("a rebuild downloads the source, and offline is set")
    if yes:
        return
    if not _is_terminal(sys.stdin):
        raise UsageError(
            "doctor --rebuild asks first, and there is no terminal", hint="use --yes to agree"
        )
    tell(
        f"This downloads llama.cpp's source (70 MB) and builds it for this machine ({kind}): about "
        f"{_minutes(minutes)} at low priority. The build is then tried, and used only if it is right and "
        "faster; Ctrl+C leaves everything as it is."
    )
    click.confirm("Build it?", abort=True, err=True)


class _Display:
    """The progress line: step, parts, elapsed and expected time."""

    def __init__(self, terminal: Terminal, expected_s: float) -> None:
        self._terminal = terminal
        self._expected_s = expected_s
        self._began_s = time.monotonic()

    def show(self, progress: "RebuildProgress") -> None:
        """Draw the line."""
        elapsed_s = time.monotonic() - self._began_s
        parts = f" {progress.done} of {progress.total}" if progress.total else ""
        expected = (
            f", of about {duration(self._expected_s)}" if elapsed_s < self._expected_s else ""
        )
        self._terminal.progress(f"{progress.step}{parts} · {duration(elapsed_s)}{expected}")


# ---------------------------------------------------------------------------- after an answer


def offer_once(setup: "Setup", info: "EngineInfo | None") -> str:
    """A sentence that offers a build, once for each kind of build that helps here; otherwise empty.

    Only for somebody at a terminal who can run it. Takes milliseconds."""
    terminal = setup.terminal
    settings = setup.settings
    watched = (
        terminal.stdout_is_terminal and terminal.stderr_is_terminal and _is_terminal(sys.stdin)
    )
    if not watched or settings.quiet or settings.offline:
        return ""
    if info is None or setup.model.is_composed:
        return ""
    from localchat.backend_api.registry import find_backends

    backend = find_backends().get(info.backend)
    builder = backend.rebuilder() if backend is not None else None
    offer = builder.offer() if builder is not None else None
    if offer is None or offer.missing:
        return ""
    file = StateFile(setup.paths.state_dir / _FILE, _Offers, _Offers())
    state = file.read()
    first_s = state.first_s or time.time()
    is_new = time.time() - first_s < _QUIET_S  # a newcomer's first answers stay free of hints
    if offer.kind in state.kinds or (is_new and state.first_s):
        return ""
    kinds = state.kinds if is_new else (*state.kinds, offer.kind)
    try:
        file.write(_Offers(kinds, first_s))
    except OSError:
        return ""  # it would come after every answer
    if is_new:
        return ""
    return (
        f"A llama.cpp built for this machine {offer.gain}. `localchat doctor --rebuild` builds it in about "
        f"{_minutes(offer.minutes)} and keeps it only if it is faster. This is said once."
    )


def _is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and not stream.closed and stream.isatty()


def _minutes(minutes: float) -> str:
    whole = max(1, round(minutes))
    return "a minute" if whole == 1 else f"{whole} minutes"
