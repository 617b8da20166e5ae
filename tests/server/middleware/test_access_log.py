"""The log has a line for each request, but not for the questions of `localchat ps` and attached prompts."""

import asyncio
import logging
import re
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from localchat.engine.attached.protocol import PREFIX
from localchat.server.leases import AsyncLease
from localchat.server.middleware.access_log import AccessLogMiddleware
from tests.support.http_server import NAME, UNHURRIED, Stage, Wire, ask, running, settled
from tests.support.scripted_engine import ScriptedAnswer, ScriptedEngine
from tests.support.single_engine import SingleEngine


@pytest.mark.parametrize(
    ("path", "status", "is_logged"),
    [
        ("/v1/models", 200, True),
        (f"{PREFIX}/generate", 200, True),
        (f"{PREFIX}/ps", 200, False),
        (f"{PREFIX}/query", 200, False),
        (f"{PREFIX}/ps", 403, True),
    ],
)
def test_routine_questions_of_own_programs_are_not_logged(
    path: str, status: int, is_logged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": status})

    async def nothing(*_: object) -> Message:
        return {"type": "http.request"}

    scope: Scope = {"type": "http", "method": "GET", "path": path, "headers": []}
    with caplog.at_level(logging.INFO, "localchat.server.requests"):
        asyncio.run(AccessLogMiddleware(app)(scope, nothing, nothing))  # type: ignore[arg-type]
    assert (path in caplog.text) is is_logged


@pytest.mark.parametrize(
    ("route", "body", "fields"),
    [
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "secret"}], "temperature": 99},
            "error=unsupported_value param=temperature",
        ),
        ("/v1/messages", {"messages": [], "max_tokens": 0}, "error="),
        ("/api/pull", {"model": "m"}, "error=not_supported"),
        ("/nowhere", {}, "error="),
    ],
)
def test_a_refusal_is_logged_with_its_code_and_without_text(
    stage: Stage,
    route: str,
    body: dict[str, Any],
    fields: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "localchat.server.requests"):
        assert ask(stage, route, body).status >= 400
        assert settled(lambda: route in caplog.text)
    assert fields in caplog.text
    assert "secret" not in caplog.text


class SlowLoad(SingleEngine):
    """Loads its model anew for each request."""

    async def lease(self, model: str, *, user: str = "") -> AsyncLease:
        await asyncio.sleep(0.3)
        return await SingleEngine.lease(self, model, user=user)


def test_load_of_the_model_is_logged_apart_from_the_time_to_the_first_token(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = ScriptedEngine(script=lambda _: ScriptedAnswer(("a",)), model=NAME)
    body = {"model": NAME, "messages": [{"role": "user", "content": "x"}], "stream": False}
    with (
        caplog.at_level(logging.INFO, "localchat.server.requests"),
        running(engine, UNHURRIED, engines=SlowLoad) as (port, _),
        Wire(port) as wire,
    ):
        wire.ask("/api/chat", body)
        answer = wire.reply().json
        assert settled(lambda: "ttft_ms=" in caplog.text)
    times = dict(re.findall(r"(\w+)_ms=(\d+)", caplog.text))
    assert int(times["load"]) >= 300
    assert int(times["load"]) + int(times["ttft"]) <= int(times["took"]) + 2
    assert answer["total_duration"] >= answer["load_duration"] >= 300_000_000
