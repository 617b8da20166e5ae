"""Applies the preset at the beginning of a question: `@name text`."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from localchat.chat.conversation import Question
from localchat.config.presets import INPUT, Preset, addressed
from localchat.session.context import SessionContext, SetupChange


class PresetUser(Protocol):
    """The part of a session that presets change."""

    context: SessionContext

    def prepare_change(self, model_name: str | None, changes: Mapping[str, str]) -> SetupChange:
        """Prepare another model (None: the current one) with these parameters. Raises LocalchatError."""
        ...

    def set_instructions(self, text: str) -> None: ...


def with_preset(session: PresetUser, question: Question) -> Question:
    """Apply the preset of a question, and return the question that its template makes.

    The preset's model, parameters and instructions stay in effect. Without a preset, the question is returned
    unchanged. Raises LocalchatError, and nothing has changed then.
    """
    text = question.text
    documents: Sequence[str] = ()
    if "@" in text:
        documents = session.context.library.names()
    preset, text_after_name = addressed(text, session.context.presets, documents)
    if preset is None:
        return question
    setup_of(session, preset).apply()
    if isinstance(system := preset.values.get("system"), str):
        session.set_instructions(system)
    prompt = preset.question(text_after_name)
    # Included files move with the text that the template puts before the question.
    if INPUT in preset.template:
        start = len(preset.template.partition(INPUT)[0])
    else:
        start = len(prompt) - len(text_after_name)
    return question.moved(prompt, start - (len(text) - len(text_after_name)))


def setup_of(session: PresetUser, preset: Preset) -> SetupChange:
    """Prepare the model and the parameters of a preset. Raises LocalchatError."""
    changes = {key: _text(value) for key, value in preset.values.items() if key != "model"}
    model = preset.values.get("model")
    if not isinstance(model, str):
        model = None
    return session.prepare_change(model, changes)


def _text(value: object) -> str:
    if isinstance(value, str):
        return value
    return msgspec.json.encode(value).decode()
