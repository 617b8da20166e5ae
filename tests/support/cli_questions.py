"""Shared by tests: asked."""

from tests.support.cli_program import ScriptedApp


def asked(app: ScriptedApp) -> str:
    """The user's message that reached the engine."""
    prompt = app.engines[0].requests[0].prompt
    return str(prompt.messages[-1].content)  # type: ignore[union-attr]
