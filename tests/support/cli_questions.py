"""Shared by tests: asked."""

from localchat.engine.request import Message, Messages
from tests.support.cli_program import ScriptedApp


def asked(app: ScriptedApp) -> str:
    """The text of the user's message that reached the engine."""
    return asked_message(app).content


def asked_message(app: ScriptedApp) -> Message:
    """The user's message that reached the engine."""
    prompt = app.engines[0].requests[0].prompt
    assert isinstance(prompt, Messages)
    return prompt.messages[-1]
