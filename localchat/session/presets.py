"""Applies the preset that a question of a session begins with: `@name text`."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import msgspec

from localchat.chat.conversation import Inclusion
from localchat.config.presets import INPUT, Preset, addressed
from localchat.session.context import SessionContext, SetupChange


class PresetUser(Protocol):
    """A session, as far as presets change it."""

    context: SessionContext

    def prepare_change(self, word: str | None, changes: Mapping[str, str]) -> SetupChange:
        """Another model (None: this one) with these parameters. Raises LocalchatError."""
        ...

    def set_instructions(self, text: str) -> None: ...


class Question(NamedTuple):
    """A question as it is sent."""

    text: str
    inclusions: tuple[Inclusion, ...]


def with_preset(session: PresetUser, text: str, inclusions: Sequence[Inclusion] = ()) -> Question:
    """The question by its preset, whose model, parameters and instructions hold from now on.

    Without a preset it stays as it is. Raises LocalchatError; nothing has changed then."""
    preset, rest = addressed(
        text, session.context.presets, session.context.library.names() if "@" in text else ()
    )
    if preset is None:
        return Question(text, tuple(inclusions))
    setup_of(session, preset).apply()
    if isinstance(system := preset.values.get("system"), str):
        session.set_instructions(system)
    before = preset.template.partition(INPUT)[0] if INPUT in preset.template else ""
    whole = preset.question(rest)
    shift = (len(before) if before else len(whole) - len(rest)) - (len(text) - len(rest))
    moved = (
        msgspec.structs.replace(one, start=one.start + shift, end=one.end + shift)
        for one in inclusions
    )
    return Question(whole, tuple(moved))


def setup_of(session: PresetUser, preset: Preset) -> SetupChange:
    """The session with the model and the parameters of a preset. Raises LocalchatError."""
    texts = {key: _text(value) for key, value in preset.values.items() if key != "model"}
    model = preset.values.get("model")
    return session.prepare_change(model if isinstance(model, str) else None, texts)


def _text(value: object) -> str:
    if isinstance(value, str):
        return value
    return msgspec.json.encode(value).decode()
