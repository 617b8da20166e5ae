"""Conversations in the line mode, on a scripted engine."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from localchat.chat.conversation import Conversation
from localchat.cli.chat.repl import chat
from localchat.cli.context import AppContext
from localchat.cli.resolve import Setup
from localchat.cli.streams import Terminal
from localchat.config.paths import find_paths
from localchat.config.settings import Settings
from localchat.engine.request import GenerateRequest, Messages
from localchat.engine.stream import Stream
from localchat.errors import ContextExceeded
from localchat.history.store import History
from localchat.models.resolve import ResolvedModel
from tests.support.scripted_engine import ScriptedEngine


class TightEngine(ScriptedEngine):
    """Refuses what is longer than its context, a token a character; answers with its turn's number."""

    def generate(self, request: GenerateRequest) -> Stream:
        assert isinstance(request.prompt, Messages)
        tokens = len(self.render(request.prompt))
        if tokens < self.context_tokens:
            return super().generate(request)
        stream = Stream(lambda: None)
        stream.put(
            ContextExceeded("too long", prompt_tokens=tokens, context_tokens=self.context_tokens)
        )
        return stream


@dataclass
class Talk:
    """One run: what was asked of the engine, what was shown, what was kept."""

    engine: ScriptedEngine
    shown: str
    history: History

    @property
    def conversations(self) -> list[Conversation]:
        return [self.history.load(one.id) for one in self.history.list()]

    def sent(self, number: int) -> list[str]:
        prompt = self.engine.requests[number].prompt
        assert isinstance(prompt, Messages)
        return [message.content for message in prompt.messages]


@dataclass
class Keys:
    lines: list[str] = field(default_factory=list)

    def read(self) -> str | None:
        return self.lines.pop(0) if self.lines else None


def talk_by_lines(
    lines: Sequence[str],
    capfd: pytest.CaptureFixture[str],
    *,
    engine: ScriptedEngine | None = None,
    conversation: Conversation | None = None,
    settings: Settings | None = None,
) -> Talk:
    """Hold a conversation of these lines. The caller closes the history of the result."""
    used = engine or TightEngine(context_tokens=1500)
    paths = find_paths({})
    model = ResolvedModel("tiny", "tiny", Path("tiny.gguf"), "a test")
    app = AppContext(open_engine=lambda options, say: used, environ={})
    setup = Setup(app, paths, settings or Settings(), {}, model, Terminal({}))
    assert chat(setup, Keys(list(lines)).read, conversation or Conversation()) == 0
    history = History.open(paths.data_dir / "history.sqlite3")
    output = capfd.readouterr()
    return Talk(used, output.out + output.err, history)
