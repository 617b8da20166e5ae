"""The session on a server elsewhere, which may be wrong, slow, or gone."""

from pathlib import Path
from typing import Any

import msgspec

from localchat.chat.conversation import Question
from localchat.engine.events import EngineStats, MetricsSnapshot
from localchat.errors import ContextExceeded, NetworkError
from localchat.session.engine_status import EngineStatus
from localchat.tui.widgets.metrics_panel import panel_sections
from tests.support.chat_sessions import Chat, run
from tests.support.scripted_engine import ScriptedAnswer
from tests.support.tui_stage import INFO, Stage, told


def test_a_remote_that_is_wrong_about_its_context_is_believed_when_it_refuses(
    tmp_path: Path,
) -> None:
    """And where it names no numbers, none are shown."""
    refusals = iter(
        [
            ContextExceeded("too long", prompt_tokens=30_000, context_tokens=24_000),
            ContextExceeded("http://box answered 400: too long", hint="a shorter input"),
        ]
    )

    def script(request: Any) -> ScriptedAnswer:
        if len(request.prompt.messages) > 4:
            return ScriptedAnswer((), error=next(refusals))
        return told("yes")

    async def play(chat: Chat) -> None:
        session = chat.session
        await session.wait_until_ready()
        for n in range(3):
            await session.ask(Question(f"question {n} " + "x" * 40_000))
        notice = chat.page.notices()[-1]
        assert "the context holds 24,000" in notice.text
        actions = [offer.action for offer in notice.offers]
        assert actions == ["overflow/leave_out_oldest", "overflow/compact"]
        await session.retry()
        notice = chat.page.notices()[-1]
        assert notice.text == "http://box answered 400: too long\na shorter input"
        assert [offer.action for offer in notice.offers] == ["new"]
        assert session.conversation.path()[-1].message.role == "user"

    about = msgspec.structs.replace(INFO, backend="remote", context_tokens=1_000_000)
    run(Stage(tmp_path, script=script, about=about), play)


def test_a_remote_that_drops_leaves_what_it_said_and_can_be_asked_again(tmp_path: Path) -> None:
    answers = iter(
        (
            ScriptedAnswer(
                ("half an ans",), error=NetworkError("the connection failed; what came is kept")
            ),
            ScriptedAnswer(
                (), error=NetworkError("the connection failed", hint="is the server running?")
            ),
            told("whole"),
        )
    )

    async def play(chat: Chat) -> None:
        session = chat.session
        await session.ask(Question("q"))
        node = session.last_answer()
        assert node is not None
        assert (node.message.content, node.state) == ("half an ans", "failed")
        assert node.error == "the connection failed; what came is kept"
        await session.retry()
        assert "is the server running?" in chat.page.notices()[-1].text
        assert session.conversation.path()[-1].message.content == "q"
        assert session.status.label == "ready"
        await session.retry()
        assert chat.page.texts() == ["q", "whole"]

    run(Stage(tmp_path, script=lambda request: next(answers)), play)


def panel_text(status: EngineStatus) -> str:
    rows = (row for section in panel_sections(status, 40) for row in section)
    return " ".join(text for row in rows for text, _ in row)


def test_of_a_remote_nothing_is_shown_that_it_does_not_tell() -> None:
    about = msgspec.structs.replace(INFO, backend="remote", context_tokens=0, threads=0, layers=0)
    live = EngineStatus(info=about, stats=EngineStats(MetricsSnapshot("decode")))
    assert live.kv == (0, 0)
    shown = panel_text(live)
    assert about.model in shown
    for word in ("Memory", "KV", "context", "threads", "layers", "running"):
        assert word not in shown
    told = msgspec.structs.replace(about, context_tokens=8192)
    assert "8,192 tok" in panel_text(EngineStatus(info=told))
