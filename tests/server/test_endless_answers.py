"""Requests without a length and without end tokens: every protocol bounds and reports them."""

from collections.abc import Callable
from typing import Any

import pytest

from localchat.engine.events import Finished, Text
from localchat.server.config import ServerLimits
from tests.support.http_server import Stage, ask

CHAT = {"model": "m", "messages": [{"role": "user", "content": "Go"}]}
PROMPT = {"model": "m", "prompt": "Go"}


@pytest.mark.parametrize(
    ("path", "body", "end"),
    [
        ("/completion", {**PROMPT, "n_predict": -1, "ignore_eos": True}, lambda j: j["stop_type"]),
        (
            "/v1/completions",
            {**PROMPT, "max_tokens": -1, "ignore_eos": True},
            lambda j: j["choices"][0]["finish_reason"],
        ),
        (
            "/v1/chat/completions",
            {**CHAT, "max_tokens": -1, "ignore_eos": True},
            lambda j: j["choices"][0]["finish_reason"],
        ),
        *(
            (
                "/api/generate",
                {
                    **PROMPT,
                    "raw": True,
                    "stream": False,
                    "options": {"num_predict": tokens, "ignore_eos": True},
                },
                lambda j: j["done_reason"],
            )
            for tokens in (-1, -2)
        ),
        (
            "/v1/responses",
            {"model": "m", "input": "Go", "ignore_eos": True},
            lambda j: j["incomplete_details"]["reason"],
        ),
        (
            "/v1/messages",
            {**CHAT, "max_tokens": 1 << 30, "ignore_eos": True},
            lambda j: j["stop_reason"],
        ),
    ],
)
def test_an_endless_answer_is_bounded_and_reported(
    stage: Stage, path: str, body: dict[str, Any], end: Callable[[Any], str]
) -> None:
    stage.plays("Go", Text(0, "on and on"), Finished(0, "length", limit="context"))
    reply = ask(stage, path, body)
    assert (stage.last.max_tokens, stage.last.ignore_eos) == (ServerLimits().answer_tokens, True)
    assert end(reply.json) in (
        *("limit", "length", "max_output_tokens"),
        "model_context_window_exceeded",
    )
