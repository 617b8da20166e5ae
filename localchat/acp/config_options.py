"""Options of a session that a client shows: its mode, which chooses the tools, and its model."""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

from acp.schema import (
    SessionConfigOptionBoolean,
    SessionConfigOptionSelect,
    SessionConfigSelectOption,
    SessionMode,
    SessionModeState,
)

ConfigOptions: TypeAlias = list[SessionConfigOptionSelect | SessionConfigOptionBoolean]


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
    """Return the modes for clients that do not know options of a session."""
    available = [
        SessionMode(id=id_, name=mode.name, description=mode.description)
        for id_, mode in modes.items()
    ]
    return SessionModeState(current_mode_id=mode, available_modes=available)


def config_options(
    modes: Mapping[str, Mode], mode: str, models: Sequence[str], model: str
) -> ConfigOptions:
    """Return the options with their current values. Clients that know them ignore the modes."""
    mode_choices = [
        SessionConfigSelectOption(value=id_, name=mode.name, description=mode.description)
        for id_, mode in modes.items()
    ]
    names = list(dict.fromkeys((model, *models)))
    model_choices = [SessionConfigSelectOption(value=name, name=name) for name in names]
    return [
        SessionConfigOptionSelect(
            type="select",
            id="mode",
            name="Mode",
            category="mode",
            current_value=mode,
            options=mode_choices,
        ),
        SessionConfigOptionSelect(
            type="select",
            id="model",
            name="Model",
            category="model",
            current_value=model,
            options=model_choices,
        ),
    ]
