"""Applies the preset at the beginning of a question: `@name text`."""

from collections.abc import Sequence

import msgspec

from localchat.chat.conversation import Question
from localchat.config.presets import INPUT, Preset, addressed
from localchat.session.context import SetupChange
from localchat.session.interface import Session


def with_preset(session: Session, question: Question) -> Question:
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


def setup_of(session: Session, preset: Preset) -> SetupChange:
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
