"""Refusals: their status, their code, the shape that clients' libraries read, and what is refused at all."""

import json
from typing import Any

import pytest

from localchat.engine.interface import Engine, EngineInfo
from localchat.errors import (
    ContextExceeded,
    DoesNotFit,
    EngineBusy,
    EngineClosed,
    EngineDied,
    LocalchatError,
    ModelInvalid,
    ModelMissing,
    NetworkError,
    TemplateError,
    UsageError,
)
from localchat.server.config import ServerConfig, ServerLimits
from localchat.server.errors import to_api_error
from tests.support.http_server import Stage, Wire, ask, chat, serving, settled
from tests.support.scripted_engine import ScriptedAnswer

USER = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        (b"", "invalid_json", None),
        (b"{", "invalid_json", None),
        (b"\xff{}", "invalid_json", None),
        (b'{"x":' + b"[" * 3000, "invalid_json", None),
        (b"[]", "invalid_type", None),
        (b'"x"', "invalid_type", None),
        (b"null", "invalid_type", None),
        (b"{}", "missing_required_parameter", "messages"),
        ({"messages": []}, "missing_required_parameter", "messages"),
        ({"messages": None}, "invalid_type", "messages"),
        ({"messages": "hi"}, "invalid_type", "messages"),
        ({"messages": [{"content": "x"}]}, "missing_required_parameter", "messages[0].role"),
        ({"messages": [{"role": "judge"}]}, "unsupported_value", "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "invalid_type", "messages[0].content"),
        ({"messages": USER, "temperature": "hot"}, "invalid_type", "temperature"),
        ({"messages": USER, "temperature": 99}, "unsupported_value", "temperature"),
        ({"messages": USER, "top_p": -1}, "unsupported_value", "top_p"),
        ({"messages": USER, "max_tokens": 0}, "unsupported_value", "max_tokens"),
        ({"messages": USER, "max_tokens": "5"}, "invalid_type", "max_tokens"),
        ({"messages": USER, "n": 0}, "unsupported_value", "n"),
        ({"messages": USER, "n": 1000}, "unsupported_value", "n"),
        ({"messages": USER, "stop": ["x"] * 65}, "unsupported_value", "stop"),
        ({"messages": USER, "stop": ["x" * 257]}, "unsupported_value", "stop"),
        ({"messages": USER, "logit_bias": {"x": "y"}}, "invalid_type", "logit_bias[...]"),
        ({"messages": USER, "logit_bias": {"x": True}}, "unsupported_value", "logit_bias"),
        ({"messages": USER, "logit_bias": {"5000000000": 1}}, "unsupported_value", "logit_bias"),
        ({"messages": USER, "logit_bias": {"5": 1000}}, "unsupported_value", "logit_bias"),
        ({"messages": USER, "top_logprobs": 3}, "unsupported_value", "top_logprobs"),
        (
            {"messages": USER, "logprobs": True, "top_logprobs": 21},
            "unsupported_value",
            "top_logprobs",
        ),
        ({"messages": USER, "tool_choice": "required"}, "unsupported_value", "tool_choice"),
        ({"messages": USER, "tool_choice": "perhaps"}, "unsupported_value", "tool_choice"),
        (
            {"messages": USER, "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "unsupported_value",
            "tool_choice.function.name",
        ),
        ({"messages": USER, "tools": [{"type": "web_search"}]}, "unsupported_value", "tools[0]"),
        (
            {"messages": USER, "tools": [{"type": "function", "function": {}}]},
            "missing_required_parameter",
            "tools[0].function.name",
        ),
        *(
            (
                {"messages": USER, "tools": [{"type": "function", "function": {"name": name}}]},
                "unsupported_value",
                "tools[0].function.name",
            )
            for name in ("", 'a"b', "a\\b", "<f>", "a\nb", " a", "x" * 257)
        ),
        *(
            (
                {
                    "messages": USER,
                    "tools": [{"function": {"name": "f", "parameters": {"type": kind}}}],
                },
                "unsupported_value",
                "tools[0].function.parameters",
            )
            for kind in ("string", "array")
        ),
        (
            {"messages": USER, "response_format": {"type": "xml"}},
            "unsupported_value",
            "response_format.type",
        ),
        (
            {"messages": USER, "response_format": {"type": "json_schema"}},
            "missing_required_parameter",
            "response_format.json_schema.schema",
        ),
        (
            {"messages": USER, "grammar": "start: /a/", "regex": "a"},
            "unsupported_value",
            "regex",
        ),
        *(
            ({"messages": USER, **fields}, code, param)
            for fields, code, param in (
                ({"structural_tag": "x"}, "unsupported_parameter", "structural_tag"),
                ({"guided_json": {"a": 1}}, "unsupported_parameter", "guided_json"),
                (
                    {"structured_outputs": {"structural_tag": "x"}},
                    "unsupported_value",
                    "structured_outputs.structural_tag",
                ),
                ({"structured_outputs": {"json": 1}}, "invalid_type", "structured_outputs.json"),
            )
        ),
        *(
            (
                {"messages": USER, "structured_outputs": {kind: value}},
                code,
                f"structured_outputs.{kind}",
            )
            for kind, value, code in (
                ("json", "{", "invalid_json"),
                ("json", [1], "invalid_type"),
                ("choice", [], "invalid_type"),
                ("choice", [1], "invalid_type"),
                ("regex", 1, "invalid_type"),
            )
        ),
        ({"messages": USER, "reasoning_effort": "huge"}, "unsupported_value", "reasoning_effort"),
        (
            {"messages": USER, "chat_template_kwargs": {"messages": 1}},
            "unsupported_value",
            "chat_template_kwargs.messages",
        ),
        (
            {"messages": USER, "chat_template_kwargs": {"enable_thinking": [1]}},
            "unsupported_value",
            "chat_template_kwargs.enable_thinking",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "missing_required_parameter",
            "messages[0].content[0].image_url.url",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "missing_required_parameter",
            "messages[0].content[0].text",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_bad_chat_is_refused_by_its_field(
    stage: Stage, body: Any, code: str, param: str | None
) -> None:
    before = len(stage.engine.requests)
    reply = ask(stage, "/v1/chat/completions", body, method="POST")
    if body == b"":
        reply = ask(
            stage,
            "/v1/chat/completions",
            method="POST",
            headers={"content-type": "application/json", "content-length": "0"},
        )
    assert reply.status == 400
    assert reply.error["type"] == "invalid_request_error"
    assert (reply.error["code"], reply.error["param"]) == (code, param)
    assert len(stage.engine.requests) == before


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", 5]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [[1 << 40]]}, "prompt"),
        ({"prompt": ["x"] * 65}, "prompt"),
        ({"prompt": ["a", "c"], "suffix": "b"}, "prompt"),
        ({"prompt": "a", "suffix": "b", "echo": True}, "echo"),
        ({"prompt": "a", "logprobs": 50}, "logprobs"),
        ({"prompt": "a", "best_of": 3}, "best_of"),
    ],
)
def test_a_bad_completion_is_refused_by_its_field(stage: Stage, body: Any, param: str) -> None:
    reply = ask(stage, "/v1/completions", body)
    assert (reply.status, reply.error["param"]) == (400, param)


@pytest.mark.parametrize("place", ["response_format", "tools"])
def test_a_schema_that_holds_too_much_is_refused(stage: Stage, place: str) -> None:
    schema = {"enum": list(range(30_000))}
    fields = {
        "response_format": {"type": "json_schema", "json_schema": {"schema": schema}},
        "tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}],
    }
    reply = ask(stage, "/v1/chat/completions", {"messages": USER, place: fields[place]})
    assert (reply.status, reply.error["code"]) == (400, "invalid_json")
    assert "20000 values" in reply.error["message"]


def test_a_schema_that_nests_too_deep_is_refused(stage: Stage) -> None:
    schema: dict[str, Any] = {}
    for _ in range(80):
        schema = {"properties": {"x": schema}}
    format_ = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    reply = chat(stage, response_format=format_)
    assert (reply.status, reply.error["code"]) == (400, "invalid_json")


@pytest.mark.parametrize(
    ("error", "status", "code", "retried"),
    [
        (UsageError("no such thing", hint="do that"), 400, None, True),
        (TemplateError("after a user comes an assistant", reason="refused"), 400, "chat_template_error", True),
        (DoesNotFit("it needs 9 GB and 4 are free"), 503, "does_not_fit", False),
        (ModelInvalid("bad file /secret/path"), 500, "model_invalid", False),
        (ModelMissing("There is no file /secret/path."), 500, "model_invalid", False),
        (EngineDied("it ended; /secret/path", signal="SIGSEGV"), 503, "engine_died", True),
        (EngineClosed("the model was unloaded"), 503, "model_unloaded", True),
        (EngineBusy("it is busy: 9 wait", retry_after_s=5), 503, "server_busy", True),
        (NetworkError("http://inner:1/ is gone"), 502, "upstream_error", True),
        (LocalchatError("/secret/path"), 500, "internal_error", False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, LocalchatError) else "",
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_refuses_is_a_real_status(
    stage: Stage,
    error: LocalchatError,
    status: int,
    code: str | None,
    retried: bool,
    stream: bool,
) -> None:
    stage.engine.refusals["refused"] = [error]
    reply = chat(stage, "refused", stream=stream)
    assert (reply.status, reply.error["code"]) == (status, code)
    assert (reply.headers.get("x-should-retry") != "false") == retried
    assert ("retry-after" in reply.headers) == (retried and status == 503)
    assert "/secret/path" not in reply.body.decode() and "Traceback" not in reply.body.decode()


@pytest.mark.parametrize("stream", [False, True])
def test_the_log_says_what_to_do_about_a_model_that_cannot_be_used(
    stage: Stage, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    problem = ModelInvalid("bad file /secret/path", hint="the file changed\ndownload it again")
    stage.engine.refusals["refused"] = [problem]
    chat(stage, "refused", stream=stream)
    expected = "model_invalid: bad file /secret/path; the file changed; download it again"
    assert expected in caplog.text


def test_a_refusal_of_the_engine_names_the_field_where_it_knows_it(stage: Stage) -> None:
    stage.engine.refusals["biased"] = [UsageError("no such token", field="logit_bias")]
    error = chat(stage, "biased", logit_bias={"99": 1}).error
    assert (error["param"], error["code"]) == ("logit_bias", "unsupported_value")


def test_prompt_too_long_is_refused_with_the_known_message(stage: Stage) -> None:
    too_long = ContextExceeded("too long", prompt_tokens=9000, context_tokens=4096)
    stage.engine.refusals["long"] = [too_long]
    reply = chat(stage, "long", max_tokens=100)
    assert reply.status == 400
    error = reply.error
    steps = {step["step"]: step for step in error.pop("x_localchat")["steps"]}
    assert list(steps) == ["shorter_input", "model"]
    assert steps["shorter_input"]["gained_tokens"] == 9000 - 4096 + 1
    assert error == {
        "message": "This model's maximum context length is 4096 tokens. However, you requested 9100 tokens "
        "(9000 in the messages, 100 in the completion). Please reduce the length of the messages or "
        "completion.",
        "type": "invalid_request_error",
        "param": "messages",
        "code": "context_length_exceeded",
    }


def test_a_load_that_does_not_fit_names_what_would_make_room(stage: Stage) -> None:
    error = DoesNotFit("it needs 9 GB and 4 are free")
    error.steps = ({"step": "kv_type", "gained_bytes": 5, "suffices": True},)
    stage.engine.refusals["big"] = [error]
    reply = chat(stage, "big")
    assert reply.error["x_localchat"] == {"steps": [dict(error.steps[0])]}


def test_an_engine_that_dies_before_the_first_word_is_an_error_event(stage: Stage) -> None:
    stage.scripts["early"] = ScriptedAnswer((), error=EngineDied("gone", signal="SIGKILL"))
    assert chat(stage, "early").status == 503
    reply = chat(stage, "early", stream=True)
    assert reply.status == 200
    assert json.loads(reply.events[-1])["error"]["code"] == "engine_died"


@pytest.mark.parametrize("path", ["/nothing", "/v1/nothing", "/v1/audio/speech", "/docs", "/v1"])
def test_an_unknown_route_is_a_404_in_json(stage: Stage, path: str) -> None:
    reply = ask(stage, path, {})
    assert reply.status in (404, 405)
    if path != "/v1":
        assert (reply.status, reply.error["type"], reply.error["code"]) == (
            404,
            "not_found_error",
            None,
        )


@pytest.mark.parametrize("path", ["/v1/files", "/v1/batches", "/v1/batches/batch_1", "/files/"])
def test_a_batch_route_is_a_404_that_names_the_batch_command(stage: Stage, path: str) -> None:
    for body in (None, {"a": 1}):
        error = ask(stage, path, body)
        assert error.status == 404
        assert error.error["type"] == "not_found_error"
        assert "`localchat batch`" in error.error["message"]
    assert "batch" not in ask(stage, "/v1/nothing", {}).error["message"]


def test_a_wrong_method_is_a_405_in_json(stage: Stage) -> None:
    reply = ask(stage, "/v1/chat/completions")
    assert (reply.status, reply.error["code"]) == (405, "method_not_allowed")
    assert reply.headers["allow"] == "POST"


FORM = "application/x-www-form-urlencoded"


@pytest.mark.parametrize(
    ("kind", "headers"),
    [
        ("text/plain", {"user-agent": "Mozilla/5.0"}),
        ("application/xml", {}),
        ("", {"user-agent": "Mozilla/5.0"}),
        ("", {"sec-fetch-site": "same-origin"}),
        (FORM, {"sec-fetch-site": "none"}),
        (FORM, {"user-agent": "Mozilla/4.0 (compatible)"}),
    ],
)
def test_what_a_form_could_send_is_a_415(stage: Stage, kind: str, headers: dict[str, str]) -> None:
    headers = {**headers, "content-type": kind}
    reply = ask(stage, "/v1/chat/completions", {"messages": USER}, headers=headers)
    assert (reply.status, reply.error["code"]) == (415, "unsupported_media_type")


@pytest.mark.parametrize(
    "headers",
    [{"content-type": FORM, "user-agent": "curl/8.5.0"}, {"user-agent": "litellm/1.83.0"}],
)
def test_a_program_may_leave_the_content_type_out(stage: Stage, headers: dict[str, str]) -> None:
    """For curl, every body is a form then."""
    headers = {"content-type": "", **headers}
    assert ask(stage, "/v1/chat/completions", {"messages": USER}, headers=headers).status == 200


def test_a_content_type_may_have_parameters(stage: Stage) -> None:
    kind = {"content-type": "Application/JSON; charset=utf-8"}
    assert ask(stage, "/v1/chat/completions", {"messages": USER}, headers=kind).status == 200


def test_a_prompt_that_was_not_counted_to_its_end_has_at_least_so_many_tokens(stage: Stage) -> None:
    stage.engine.refusals["hi"] = [
        ContextExceeded("too long", prompt_tokens=9000, context_tokens=4096, at_least=True)
    ]
    error = ask(stage, "/v1/chat/completions", {"messages": USER, "max_tokens": 100}).error
    assert "you requested at least 9100 tokens (9000 in the messages, 100" in error["message"]


@pytest.mark.parametrize(
    ("details", "sentence"),
    [
        ({}, "This model's maximum context length is exceeded. Please reduce"),
        (
            {"context_tokens": 4096},
            "This model's maximum context length is 4096 tokens. Please reduce",
        ),
        ({"prompt_tokens": 9000}, "This model's maximum context length is exceeded. Please reduce"),
    ],
)
def test_numbers_that_the_engine_does_not_know_are_not_made_up(
    stage: Stage, details: dict[str, Any], sentence: str
) -> None:
    stage.engine.refusals["hi"] = [ContextExceeded("too long", **details)]
    error = ask(stage, "/v1/chat/completions", {"messages": USER}).error
    assert error["code"] == "context_length_exceeded"
    assert error["message"].startswith(sentence)
    stage.engine.refusals["hi"] = [ContextExceeded("too long", **details)]
    body = {"messages": USER, "max_tokens": 5, "model": "m"}
    sent = ask(stage, "/v1/messages", body).json["error"]
    assert sent["message"] == "prompt is too long"


def test_refusal_of_the_upstream_server_is_not_retried(stage: Stage) -> None:
    for status, again in ((401, "false"), (503, None)):
        stage.engine.refusals["hi"] = [NetworkError("no", status=status)]
        reply = ask(stage, "/v1/chat/completions", {"messages": USER})
        assert (reply.status, reply.error["code"]) == (502, "upstream_error")
        assert reply.headers.get("x-should-retry") == again


def test_half_a_character_is_replaced_and_not_refused(stage: Stage) -> None:
    body = rb'{"messages":[{"role":"user","content":"a\ud83d b\ud83d\ude00 \\ud83d"}]}'
    assert ask(stage, "/v1/chat/completions", body).status == 200
    assert stage.last.prompt.messages[0].content == "a\ufffd b\U0001f600 \\ud83d"  # type: ignore[union-attr]


def test_what_is_no_http_is_refused_in_json(stage: Stage) -> None:
    with Wire(stage.port) as wire:
        wire.send(b"nonsense\r\n\r\n")
        reply = wire.reply()
        assert reply.status == 400 and reply.error["type"] == "invalid_request_error"
        assert wire.closed()


def test_an_unknown_model_is_the_servers_own_unless_that_is_off(stage: Stage) -> None:
    assert chat(stage, model="gpt-5.4").json["model"] == "gpt-5.4"
    with serving(ServerConfig(alias=False)) as strict:
        reply = chat(strict, model="gpt-5.4")
        assert (reply.status, reply.error["code"]) == (404, "model_not_found")
        for path in ("/etc/passwd", "../x", "~/m.gguf", "m.gguf"):
            assert chat(strict, model=path).status == 404
        assert chat(strict, model="scripted").status == 200
        assert chat(strict, model="").status == 200


@pytest.mark.parametrize("model", ["", "scripted", "gpt-5.4"])
def test_the_servers_own_model_without_its_file_is_named_in_the_log_only(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, model: str
) -> None:
    def info(_: Engine) -> EngineInfo:
        raise ModelMissing("There is no file /secret/path.")

    monkeypatch.setattr(type(stage.engine), "info", info)
    reply = chat(stage, model=model)
    assert (reply.status, reply.error["code"]) == (500, "model_invalid")
    assert "/secret/path" not in reply.body.decode()
    assert "There is no file /secret/path." in caplog.text


def test_a_request_that_takes_too_long_is_ended() -> None:
    with serving(ServerConfig(limits=ServerLimits(request_s=1.0))) as stage:
        stage.scripts["slow"] = ScriptedAnswer(("a",) * 1000, gap_s=0.1)
        reply = chat(stage, "slow")
        assert (reply.status, reply.error["code"]) == (504, "timeout")
        assert json.loads(chat(stage, "slow", stream=True).events[-1])["error"]["code"] == "timeout"
        assert settled(lambda: stage.engine.cancelled == 2)


def test_full_queue_is_refused_at_once() -> None:
    with serving(ServerConfig(limits=ServerLimits(waiting=0))) as stage:
        reply = chat(stage)
    assert (reply.status, reply.error["code"]) == (503, "server_busy")
    assert reply.headers["retry-after"] == "1"


def test_a_text_too_long_to_embed_is_reported_without_a_completion() -> None:
    refusal = ContextExceeded(
        "text 2 has 700 tokens, and minilm reads 512 at once",
        hint="embed it in parts",
        prompt_tokens=700,
        context_tokens=512,
        embeds=True,
    )
    error = to_api_error(refusal)
    assert (error.status, error.code, error.param) == (400, "context_length_exceeded", "input")
    assert error.message == (
        "This model's maximum context length is 512 tokens. Text 2 has 700 tokens, and minilm reads "
        "512 at once. Embed it in parts."
    )


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        ("the prompt is empty", "The prompt is empty."),
        ("messages[0].images[0] has 9 x 9 pixels", "messages[0].images[0] has 9 x 9 pixels."),
        ("cat.png is empty", "cat.png is empty."),
        ("http://a has no model", "http://a has no model."),
    ],
)
def test_a_message_begins_with_a_capital_unless_a_name_begins_it(
    message: str, sentence: str
) -> None:
    assert to_api_error(UsageError(message)).message == sentence
