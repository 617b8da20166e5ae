"""Modes of a session that a client shows. They choose the tools."""

from collections.abc import Mapping
from typing import Final, NamedTuple

from acp.schema import SessionMode, SessionModeState


class Mode(NamedTuple):
    """A choice of tools."""

    name: str
    description: str
    tools: str
    """Groups of tools, as `--tools` takes them."""


_MODES: Final = {
    "edit": Mode("Edit", "Reads and changes files of the project.", "edit"),
    "run": Mode("Run", "Also runs commands and reads web pages.", "edit,run,fetch"),
    "read": Mode("Read", "Reads files of the project.", "read"),
    "chat": Mode("Chat", "Uses no tools.", "off"),
}
_GUIDE: Final = "guide"


def modes_of(model: str, tools: str | None) -> Mapping[str, Mode]:
    """Return the modes of a model by their ids. The first one is the default.

    tools: value of `--tools`, which becomes a mode of its own.
    """
    if tools not in (None, "", "off"):
        return {"custom": Mode("Custom", f"Tools: {tools}", tools), **_MODES}
    if model == _GUIDE:
        return {"chat": _MODES["chat"]}
    return _MODES


def mode_state(modes: Mapping[str, Mode], mode: str) -> SessionModeState:
    """Return the modes with the current one, as the protocol lists them."""
    available = [
        SessionMode(id=id_, name=mode.name, description=mode.description)
        for id_, mode in modes.items()
    ]
    return SessionModeState(current_mode_id=mode, available_modes=available)
