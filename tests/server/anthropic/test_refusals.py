"""Anthropic's Messages API over a real socket: what it refuses, in which words."""

import logging
import re
from typing import Any

import pytest

from localchat.engine.request import Messages
from localchat.errors import (
    ContextExceeded,
    EngineBusy,
    LocalchatError,
    ModelInvalid,
    TemplateError,
)
from localchat.server.config import ServerConfig, ServerLimits
from tests.support.http_server import Stage, StageEngine, ask, message, serving, settled

USER = [{"role": "user", "content": "hi"}]
TOOL = {"name": "look", "description": "Look.", "input_schema": {"type": "object"}}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": -2}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "judge", "content": "x"}]}, "judge"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "a source of type ''",
        ),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {
                                "type": "tool_result",
                                "tool_use_id": "t",
                                "content": [{"type": "image"}],
                            }
                        ],
                    }
                ]
            },
            "messages.0.content.0.content.0",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "content.0.text"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]}, "0.name"),
        ({"system": [{"type": "image"}]}, "system.0: "),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0"),
        ({"tool_choice": {"type": "any"}}, "tool"),
        ({"tool_choice": {"type": "perhaps"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"thinking": {"type": "deep"}}, "thinking"),
        ({"output_config": {"effort": "huge"}}, "effort"),
        ({"temperature": 99}, "temperature"),
        ({"stop_sequences": ["x"] * 65}, "stop"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_bad_request_is_refused_by_its_field(stage: Stage, fields: Any, said: str) -> None:
    before = len(stage.engine.requests)
    reply = message(stage, **{"messages": USER, **fields})
    assert (reply.status, reply.anthropic_error["type"]) == (400, "invalid_request_error")
    assert said in reply.anthropic_error["message"]
    assert len(stage.engine.requests) == before


def test_the_access_log_names_the_content_that_a_message_lacks(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "localchat.server"):
        message(stage, messages=[{"role": "user"}])
        assert settled(lambda: " param=messages.0.content" in caplog.text)


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (ContextExceeded("x", prompt_tokens=9, context_tokens=4), 400, "invalid_request_error"),
        (TemplateError("roles must alternate"), 400, "invalid_request_error"),
        (EngineBusy("full", retry_after_s=3), 503, "overloaded_error"),
        (ModelInvalid("bad"), 500, "api_error"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_an_engine_refuses_is_a_status(
    stage: Stage, error: LocalchatError, status: int, kind: str
) -> None:
    for stream in (False, True):
        stage.engine.refusals["no"] = [error]
        reply = message(stage, "no", stream=stream)
        assert (reply.status, reply.anthropic_error["type"]) == (status, kind)
    if isinstance(error, ContextExceeded):
        assert reply.anthropic_error["message"] == "prompt is too long: 9 tokens > 4 maximum"


def test_whatever_refuses_speaks_this_protocol() -> None:
    config = ServerConfig(api_keys=("sk-01234567",), limits=ServerLimits(media_body_bytes=1000))
    with serving(config) as stage:
        body = {"max_tokens": 5, "messages": USER}
        key = {"x-api-key": "sk-01234567"}
        assert ask(stage, "/v1/messages", body, headers=key).status == 200
        bearer = {"authorization": "Bearer sk-01234567"}
        assert ask(stage, "/v1/messages", body, headers=bearer).status == 200
        text = {**key, "content-type": "text/csv"}
        large = {**body, "system": "x" * 1000}
        for reply, status, kind in (
            (ask(stage, "/v1/messages", body), 401, "authentication_error"),
            (ask(stage, "/v1/messages", body, host="evil.example"), 403, "permission_error"),
            (ask(stage, "/v1/messages/batches", body, headers=key), 404, "not_found_error"),
            (ask(stage, "/v1/messages", headers=key), 405, "invalid_request_error"),
            (ask(stage, "/v1/messages", b"{", headers=key), 400, "invalid_request_error"),
            (ask(stage, "/v1/messages", body, headers=text), 415, "invalid_request_error"),
            (ask(stage, "/v1/messages", large, headers=key), 413, "request_too_large"),
        ):
            assert (reply.status, reply.anthropic_error["type"]) == (status, kind)


def test_tokens_are_counted_or_refused(stage: Stage) -> None:
    path = "/v1/messages/count_tokens"
    assert ask(stage, path, {"messages": USER}).json == {"input_tokens": len("user: hi\n")}
    changing = "x-anthropic-billing-header: cc_version=2.1.1; cch=00000;"
    assert ask(stage, path, {"messages": USER, "system": changing}).json == {"input_tokens": 9}
    assert ask(stage, path, {"messages": []}).anthropic_error["type"] == "invalid_request_error"


def test_what_the_template_refuses_is_counted_the_way_it_would_be_asked(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def render(self: StageEngine, messages: Messages) -> str:
        if messages.continue_last:
            raise TemplateError("the last message must be the user's")
        return "as asked"

    monkeypatch.setattr(StageEngine, "render", render)
    messages = [*USER, {"role": "assistant", "content": "The"}]
    path = "/v1/messages/count_tokens"
    assert ask(stage, path, {"messages": messages}).json == {"input_tokens": len("as asked")}


def test_these_requests_are_counted_in_the_figures(stage: Stage) -> None:
    def finished(page: str) -> float:
        found = re.search(r'^localchat_requests_total\{finish="stop"\} (\S+)', page, re.MULTILINE)
        return float(found[1]) if found else 0.0

    before = finished(ask(stage, "/metrics").body.decode())
    message(stage)
    message(stage, max_tokens=-2)
    page = ask(stage, "/metrics").body.decode()
    assert finished(page) == before + 1
    assert 'localchat_errors_total{code="unsupported_value",status="400"}' in page


@pytest.mark.parametrize(
    ("path", "anthropic"),
    [("/v1/nowhere", True), ("/v1/models/none", True), ("/v1/chat/completions", False)],
)
def test_a_client_with_a_version_header_gets_its_own_shape(
    stage: Stage, path: str, anthropic: bool
) -> None:
    headers = {"anthropic-version": "2023-06-01"}
    reply = ask(stage, path, headers=headers, method="GET")
    if anthropic:
        assert (reply.status, reply.anthropic_error["type"]) == (404, "not_found_error")
    else:
        assert (reply.status, reply.error["code"]) == (405, "method_not_allowed")
