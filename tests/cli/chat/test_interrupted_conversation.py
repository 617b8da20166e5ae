"""A Ctrl+C at any line of the program between the first word and the last loses nothing of a conversation."""

import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

from localchat.cli.chat.conversation_options import HISTORY_FILE
from localchat.config.paths import find_paths
from localchat.engine.request import Messages
from localchat.history.store import History
from tests.support.cli_program import SCENARIOS, ScriptedApp
from tests.support.terminal_screen import Call, Outcome

_PARTS = (
    "/localchat/cli/",
    "/localchat/session/",
    "/localchat/chat/",
    "/localchat/engine/",
    "/localchat/history/",
)
_PLACES = 40
"""Of some thousand lines; a prime distance between them visits others in the second answer."""


class Interrupting:
    """Sends Ctrl+C before line number `at` of what the main thread runs of our code; 0: never, but counts."""

    def __init__(self, at: int = 0) -> None:
        self.lines = 0
        self.sent_in = ""
        self._at = at

    def begin(self) -> None:
        sys.settrace(self._called)
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            frame.f_trace = self._called(frame, "call", None)
            frame = frame.f_back

    def _called(self, frame: FrameType, event: str, value: Any) -> Any:
        name = frame.f_code.co_filename
        ours = any(part in name for part in _PARTS) and not name.endswith("signals.py")
        return self._reached if ours and not self.sent_in else None

    def _reached(self, frame: FrameType, event: str, value: Any) -> Any:
        if event == "line":
            self.lines += 1
            if self.lines == self._at:
                self.sent_in = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                signal.raise_signal(signal.SIGINT)
        return self._reached


@pytest.fixture(autouse=True)
def _traced_as_before() -> Iterator[None]:
    before = sys.gettrace()
    yield
    sys.settrace(before)


class Talk:
    """A conversation of two questions by lines, with Ctrl+C at one place."""

    def __init__(self, call: Call, monkeypatch: pytest.MonkeyPatch, at: int = 0) -> None:
        find_paths({}).data_dir.joinpath(HISTORY_FILE).unlink(missing_ok=True)
        self.interrupting = Interrupting(at)
        lines = iter(("first", "second"))

        class Keys:
            begin = self.interrupting.begin

            def read(self) -> str | None:
                Keys.begin()
                return next(lines, None)

        monkeypatch.setattr("localchat.cli.chat.line_input.open_keyboard", lambda terminal: Keys())
        self._app = ScriptedApp(SCENARIOS["hello"])
        self.outcome: Outcome = call(self._app, "-i")
        sys.settrace(None)

    @property
    def prompts(self) -> list[list[tuple[str, str]]]:
        asked = [request.prompt for engine in self._app.engines for request in engine.requests]
        return [
            [(message.role, message.content) for message in prompt.messages]
            for prompt in asked
            if isinstance(prompt, Messages)
        ]


def _kept() -> list[tuple[str, str, str]]:
    with History.open(find_paths({}).data_dir / HISTORY_FILE) as history:
        kept = [history.load(summary.id) for summary in history.list()]
    assert len(kept) < 2
    nodes = [node for conversation in kept for node in conversation.nodes.values()]
    return [(node.message.role, node.message.content, node.state) for node in nodes]


def test_a_conversation_keeps_all_that_was_said_wherever_ctrl_c_comes(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    Talk(call, monkeypatch)  # imports what the others find imported
    lines = Talk(call, monkeypatch).interrupting.lines
    assert lines > 1000
    for at in range(1, lines, lines // _PLACES):
        talk = Talk(call, monkeypatch, at)
        where = talk.interrupting.sent_in
        assert where
        assert talk.outcome.code in (0, 130), where
        assert "unexpected" not in talk.outcome.err, where
        kept = _kept()
        assert "open" not in [state for _, _, state in kept], where
        roles = [[role for role, _ in prompt] for prompt in talk.prompts]
        assert all(one == ["user", "assistant"] * (len(one) // 2) + ["user"] for one in roles), (
            where
        )
        # what got no answer at all is sent with what comes next
        sent = [prompt[-1][1].rpartition("\n\n")[2] for prompt in talk.prompts]
        assert [text for role, text, _ in kept if role == "user"] == sent, where
        shown = talk.outcome.out.count("Hel")
        assert len([text for role, text, _ in kept if role == "assistant" and text]) == shown, where


def test_a_single_answer_that_was_shown_is_kept_wherever_ctrl_c_comes(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    from localchat.cli.chat import one_shot

    run = one_shot.OneShot.run

    def once(at: int) -> tuple[Interrupting, Outcome]:
        find_paths({}).data_dir.joinpath(HISTORY_FILE).unlink(missing_ok=True)
        interrupting = Interrupting(at)

        def traced(*args: Any) -> int:
            interrupting.begin()
            return run(*args)

        monkeypatch.setattr(one_shot.OneShot, "run", traced)
        outcome = call(SCENARIOS["hello"], "hi")
        sys.settrace(None)
        return interrupting, outcome

    lines = once(0)[0].lines
    assert lines > 300
    for at in range(1, lines, lines // (_PLACES // 2)):
        interrupting, outcome = once(at)
        assert outcome.code in (0, 130), interrupting.sent_in
        assert "unexpected" not in outcome.err, interrupting.sent_in
        if "Hel" in outcome.out:
            texts = [text for role, text, _ in _kept() if role == "assistant"]
            assert [text[:3] for text in texts] == ["Hel"], interrupting.sent_in


def test_a_second_ctrl_c_does_not_wait(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where something hangs between two looks, such as a disk."""
    hangs, rescue = threading.Event(), threading.Timer(60.0, lambda: hangs.set())
    rescue.start()

    def hang(*args: Any) -> None:
        for _ in range(2):
            signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        hangs.wait()

    monkeypatch.setattr("localchat.cli.chat.one_shot.remember", hang)
    assert call(SCENARIOS["hello"], "hi").code == 130
    assert not hangs.is_set()
    rescue.cancel()
