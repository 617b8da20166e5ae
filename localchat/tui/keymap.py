"""Registry of all keys: the source of bindings and help. Validates the `[keys]` table of the settings."""

from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from textual.binding import Binding
from textual.keys import KEY_NAME_REPLACEMENTS, Keys, key_to_character

from localchat.errors import UsageError
from localchat.suggestions import did_you_mean


class KeyBinding(NamedTuple):
    """An action and its keys."""

    id: str
    keys: str
    """Default keys, separated by commas."""
    action: str
    about: str
    scope: str = "chat"
    """Widget or screen with the focus. `app` is everywhere; `chat` includes `composer` and `transcript`."""
    first: bool = True
    """Whether it has priority over the focused widget's own handling of the key."""


KEYS: Final = (
    KeyBinding("composer.send", "enter", "request('send')", "Send the message", "composer"),
    KeyBinding(
        "composer.newline",
        "ctrl+j,shift+enter,alt+enter,ctrl+enter,shift+\r",
        "request('newline')",
        "Begin a new line",
        "composer",
    ),
    KeyBinding(
        "composer.accept",
        "tab",
        "request('accept')",
        "Accept the completion, or go to the conversation",
        "composer",
    ),
    KeyBinding("composer.up", "up", "up", "Up; at the top: previous message", "composer"),
    KeyBinding("composer.down", "down", "down", "Down; at the bottom: next message", "composer"),
    KeyBinding(
        "composer.editor", "ctrl+g", "request('editor')", "Write in your own editor", "composer"
    ),
    KeyBinding("composer.undo", "ctrl+underscore", "undo", "Undo in the input", "composer"),
    KeyBinding("chat.stop", "escape", "stop", "Stop the answer; close what is open", first=False),
    KeyBinding(
        "chat.interrupt",
        "ctrl+c",
        "interrupt",
        "Copy the selection, stop the answer, clear the input; twice: quit",
        "app",
    ),
    KeyBinding("chat.suspend", "ctrl+z", "app.suspend", "Back to the shell; fg returns"),
    KeyBinding("chat.leave", "ctrl+d", "leave_if_empty", "Quit if the input is empty"),
    KeyBinding("chat.new", "ctrl+n", "command('/new')", "New conversation"),
    KeyBinding("chat.regenerate", "f5", "command('/regen')", "Answer the last question again"),
    KeyBinding("chat.edit", "f6", "edit_marked", "Edit the last question, or the selected one"),
    KeyBinding("chat.continue", "f7", "go_on", "Continue a stopped answer"),
    KeyBinding("chat.undo", "f8", "command('/undo')", "Undo the last question"),
    KeyBinding("chat.copy", "f9", "copy_answer", "Copy the last answer, or the selected message"),
    KeyBinding("chat.think", "ctrl+t", "think", "Reasoning: auto, on, off"),
    KeyBinding("branch.previous", "alt+left", "branch(-1)", "Previous version"),
    KeyBinding("branch.next", "alt+right", "branch(1)", "Next version"),
    KeyBinding("view.up", "pageup", "page(-1)", "Page up"),
    KeyBinding("view.down", "pagedown", "page(1)", "Page down"),
    KeyBinding("view.end", "ctrl+end", "to_end", "Go to the end"),
    KeyBinding("question.previous", "alt+up", "question(-1)", "Previous question"),
    KeyBinding("question.next", "alt+down", "question(1)", "Next question; then the end"),
    KeyBinding("view.panel", "ctrl+o", "panel", "Show or hide the panel of metrics"),
    KeyBinding("screen.help", "f1", "command('/help')", "Keys and commands"),
    KeyBinding("screen.settings", "f2", "settings", "Settings"),
    KeyBinding("screen.models", "f3", "command('/model')", "Models"),
    KeyBinding("screen.parameters", "f4", "command('/set')", "Parameters of this conversation"),
    KeyBinding("screen.history", "ctrl+r", "history", "Conversations"),
    KeyBinding("screen.theme", "f10", "theme", "Next theme", "app"),
    KeyBinding("app.quit", "ctrl+q", "quit", "Quit; everything is saved", "app"),
    KeyBinding("offer.first", "alt+1", "offer(1)", "Accept the first offer on the screen"),
    KeyBinding("offer.second", "alt+2", "offer(2)", "Accept the second offer"),
    KeyBinding("offer.third", "alt+3", "offer(3)", "Accept the third offer"),
    KeyBinding("offer.fourth", "alt+4", "offer(4)", "Accept the fourth offer"),
    KeyBinding("offer.fifth", "alt+5", "offer(5)", "Accept the fifth offer"),
    KeyBinding("offer.sixth", "alt+6", "offer(6)", "Accept the sixth offer"),
    KeyBinding("offer.seventh", "alt+7", "offer(7)", "Accept the seventh offer"),
    KeyBinding("offer.eighth", "alt+8", "offer(8)", "Accept the eighth offer"),
    KeyBinding("offer.ninth", "alt+9", "offer(9)", "Accept the ninth offer"),
    KeyBinding("transcript.previous", "up,k", "screen.mark(-1)", "Previous message", "transcript"),
    KeyBinding("transcript.next", "down,j", "screen.mark(1)", "Next message", "transcript"),
    KeyBinding("transcript.open", "enter,space", "screen.open", "Open or fold", "transcript"),
    KeyBinding("transcript.copy", "y", "screen.copy_marked", "Copy", "transcript"),
    KeyBinding(
        "transcript.copy_code",
        "c",
        "screen.copy_code",
        "Copy its code; again: the next",
        "transcript",
    ),
    KeyBinding("transcript.edit", "e", "screen.edit_marked", "Edit, as a new branch", "transcript"),
    KeyBinding(
        "transcript.regenerate", "r", "screen.regenerate_marked", "Answer again", "transcript"
    ),
    KeyBinding(
        "transcript.older",
        "left_square_bracket",
        "screen.branch(-1)",
        "Previous version",
        "transcript",
    ),
    KeyBinding(
        "transcript.newer",
        "right_square_bracket",
        "screen.branch(1)",
        "Next version",
        "transcript",
    ),
    KeyBinding("transcript.leave", "tab,i", "screen.write", "Back to the input", "transcript"),
    KeyBinding("models.pull", "ctrl+s", "pull", "Download in the background", "models"),
    KeyBinding("history.rename", "ctrl+s", "rename", "Rename", "history"),
    KeyBinding("history.delete", "delete,ctrl+x", "delete", "Delete", "history"),
    KeyBinding("history.undo", "ctrl+z", "undo", "Undo the last deletion", "history"),
)

_REACHES: Final = {"composer", "transcript"}
_MODIFIERS: Final = ("ctrl+", "alt+", "shift+", "super+", "meta+", "hyper+")
_NAMED: Final = frozenset(
    {key.value for key in Keys if not key.value.startswith("<") and "+" not in key.value}
    | {"space", *KEY_NAME_REPLACEMENTS.values()}
)
"""Textual's own names of keys. Other keys have the names of Unicode, such as `full_stop`."""


def bindings(scope: str) -> list[Binding]:
    """The bindings of one scope."""
    return [
        Binding(key.keys, key.action, key.about, show=False, priority=key.first, id=key.id)
        for key in KEYS
        if key.scope == scope
    ]


def validate_keymap(table: Mapping[str, str]) -> dict[str, str]:
    """Return the table [keys] of the settings, by id.

    Raises UsageError for an unknown id or key, or if two ids share a key.
    """
    keys_by_id = {key.id: key for key in KEYS}
    for id_, keys in table.items():
        if id_ not in keys_by_id:
            raise UsageError(
                f"[keys]: there is no action {id_!r}", hint=did_you_mean(id_, keys_by_id)
            )
        for key in _split(keys):
            if not _is_key(key):
                raise UsageError(
                    f"[keys] {id_}: there is no key {key!r}",
                    hint=f"{did_you_mean(key.rpartition('+')[2], _NAMED)[:200]}; modifiers stand first, "
                    "as in ctrl+k or alt+enter",
                )
    _refuse_clashes(table)
    return dict(table)


def key_names(id_: str, table: Mapping[str, str]) -> str:
    """Return the current keys of an action in readable form: `Ctrl+J, Shift+Enter`."""
    keys = table.get(id_) or next(key.keys for key in KEYS if key.id == id_)
    return ", ".join(dict.fromkeys(_written(key) for key in _split(keys)))


def offer_key(number: int, table: Mapping[str, str]) -> str:
    """Return the first key of an offer, counted from 1. Empty if it has none."""
    ids = [key.id for key in KEYS if key.action == f"offer({number})"]
    if ids:
        return key_names(ids[0], table).partition(", ")[0]
    return ""


def _split(keys: str) -> Iterator[str]:
    return (key.strip(" ") for key in keys.split(","))


def _is_key(key: str) -> bool:
    name = key
    while name.startswith(_MODIFIERS):
        name = name.partition("+")[2]
    if len(name) == 1:
        return name == "\r" or (name.isprintable() and not name.isspace())
    return name in _NAMED or key_to_character(name) is not None


def _refuse_clashes(table: Mapping[str, str]) -> None:
    ids: dict[tuple[str, str], str] = {}
    for key in KEYS:
        for name in _split(table.get(key.id, key.keys)):
            scopes = {key.scope}
            if key.scope in ("chat", "app") and key.first:
                scopes.update(_REACHES)
            if key.scope == "app":
                scopes |= {"chat", "models", "history"}
            for scope in sorted(scopes):
                other = ids.setdefault((scope, name), key.id)
                if other != key.id:
                    raise UsageError(
                        f"[keys]: {name} would do two things, {other} and {key.id}",
                        hint="give one of them another key",
                    )


_SIGNS: Final = {
    "left_square_bracket": "[",
    "right_square_bracket": "]",
    "escape": "Esc",
    "pageup": "PgUp",
    "pagedown": "PgDn",
    "shift+\r": "Shift+Enter",
    "comma": ",",
    "underscore": "_",
}


def _written(key: str) -> str:
    """Return a key in readable form: `ctrl+j` as `Ctrl+J`."""
    if key in _SIGNS:
        return _SIGNS[key]
    *modifiers, last = key.split("+")
    shown = _SIGNS.get(last)
    if not shown:
        shown = last
        if len(last) > 1 or modifiers:
            shown = last.capitalize()
    return "+".join((*(modifier.capitalize() for modifier in modifiers), shown))
