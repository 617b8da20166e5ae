"""Run `localchat doctor --rebuild`."""

from typing import TYPE_CHECKING, Final

import click

from localchat.cli.context import AppContext
from localchat.cli.output import confirm
from localchat.cli.streams import tell
from localchat.config.paths import find_paths
from localchat.errors import LocalchatError, UsageError

if TYPE_CHECKING:
    from localchat.backend_api.interface import Backend, Rebuilder

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
    _agree(app, kind, yes=yes)
    try:
        with terminate_gracefully():
            outcome = builder.rebuild(kind)
    except KeyboardInterrupt:
        tell("localchat: stopped; nothing was changed")
        raise
    if outcome.installed:
        tell(f"localchat: the new build is used from the next start on: {outcome.sentence}")
        tell("  localchat doctor --rebuild=undo removes it")
    else:
        tell(f"localchat: the new build is not used: {outcome.sentence}")


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


def _agree(app: AppContext, kind: str, *, yes: bool) -> None:
    """Ask the user, unless `yes`. Raises click.Abort, and UsageError if asking or building is impossible."""
    from localchat.config.settings import from_environment, resolve
    from localchat.config.settings_file import read_settings

    file = read_settings(find_paths(app.environ).settings_file)
    if resolve(file.layer(), from_environment(app.environ)).settings.offline:
        raise UsageError("a rebuild downloads the source, and offline is set")
    about = (
        f"This downloads llama.cpp's source (70 MB) and builds it for this machine ({kind}) at low priority, "
        "which takes minutes, with one CPU up to an hour. The build is then tested, and used only if it is "
        "correct. Ctrl+C stops it and changes nothing."
    )
    if not confirm("Build it?", yes=yes, verb="doctor --rebuild", about=about):
        raise click.Abort
