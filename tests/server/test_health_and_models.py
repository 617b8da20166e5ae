"""The small routes: models, health, properties, tokens, embeddings, figures, and the line in the log."""

import base64
import json
import logging
import re
import struct
from typing import Any

import msgspec
import pytest

from localchat.engine.events import RunningRequest
from localchat.engine.interface import TokenizerInfo
from localchat.engine.request import Messages
from localchat.errors import TemplateError, UsageError
from tests.support.http_server import NAME, Stage, Wire, ask, chat, settled
from tests.support.paths import ROOT
from tests.support.scripted_engine import ScriptedAnswer
from tests.support.single_engine import SingleEngine


@pytest.mark.parametrize("path", ["/v1/models", "/models", "/v1//models", "//v1/models/"])
def test_models_are_listed_with_the_context_that_is_there(stage: Stage, path: str) -> None:
    chat(stage)
    whole = ask(stage, path).json
    assert whole["object"] == "list"
    (model,) = whole["data"]
    assert (model["id"], model["object"], model["created"]) == (NAME, "model", 1_700_000_000)
    assert model["meta"] == {"n_ctx": 4096, "n_ctx_train": 4096}
    assert model["max_model_len"] == model["context_length"] == model["max_context_length"] == 4096
    assert model["architecture"]["input_modalities"] == ["text"]
    assert "status" not in model


def test_one_model_is_described(stage: Stage) -> None:
    assert ask(stage, f"/v1/models/{NAME}").json["id"] == NAME
    reply = ask(stage, "/v1/models/hf.co/a/b:Q4_K_M")
    assert (reply.status, reply.error["code"]) == (404, "model_not_found")
    assert "hf.co/a/b:Q4_K_M" in reply.error["message"]


@pytest.mark.parametrize("path", ["/", "/health"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_probes_are_answered(stage: Stage, path: str, method: str) -> None:
    assert ask(stage, path, method=method).status == 200


def test_health_is_503_while_the_model_is_loaded(stage: Stage) -> None:
    service = stage.server._service
    service.ready = False
    try:
        reply = ask(stage, "/health")
    finally:
        service.ready = True
    assert (reply.status, reply.error["code"]) == (503, "model_loading")
    assert reply.headers["retry-after"] == "2"


@pytest.mark.parametrize("query", ["", "?model=scripted&autoload=false", "?model=other"])
def test_properties_have_what_llamacpps_clients_read(stage: Stage, query: str) -> None:
    props = ask(stage, f"/props{query}").json
    assert props["default_generation_settings"]["n_ctx"] == 4096
    assert props["modalities"] == {"vision": False, "audio": False}
    assert "/" not in props["model_alias"]
    assert props["total_slots"] == 4


def test_properties_have_the_chat_template_of_a_loaded_model(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = TokenizerInfo("<s>", "</s>", chat_template="{{ messages }}")
    info = msgspec.structs.replace(stage.engine.info(), tokenizer=tokenizer)
    monkeypatch.setattr(type(stage.engine), "info", lambda self: info)
    props = ask(stage, "/props").json
    assert (props["bos_token"], props["eos_token"]) == ("<s>", "</s>")
    assert props["chat_template"] == "{{ messages }}"


def test_properties_load_nothing_and_keep_nothing(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert chat(stage).status == 200  # it was loaded once, so its context is known
    monkeypatch.setattr(SingleEngine, "loaded", lambda self: [])
    monkeypatch.delattr(SingleEngine, "lease")
    props = ask(stage, "/props").json
    assert props["default_generation_settings"]["n_ctx"] == 4096


def test_tokens_of_a_text_and_of_a_conversation(stage: Stage) -> None:
    assert ask(stage, "/tokenize", {"content": "hi", "add_special": True}).json == {
        "tokens": [104, 105],
        "count": 2,
        "max_model_len": 4096,
    }
    messages = [{"role": "user", "content": "hi"}]
    sent = ask(stage, "/v1/tokenize", {"messages": messages}).json
    assert bytes(sent["tokens"]) == b"user: hi\n"
    assert ask(stage, "/tokenize", {}).error["code"] == "missing_required_parameter"
    assert ask(stage, "/detokenize", {"tokens": [104, 105]}).json["content"] == "hi"
    assert ask(stage, "/detokenize", {"tokens": [-1]}).status == 400
    assert ask(stage, "/apply-template", {"messages": messages}).json == {"prompt": "user: hi\n"}


@pytest.mark.parametrize("route", ["/tokenize", "/apply-template"])
def test_a_template_that_refuses_a_system_message_gets_it_as_the_users(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, route: str
) -> None:
    """The routes show the prompt of a chat with the same messages."""
    render = type(stage.engine).render

    def strict(engine: Any, messages: Messages) -> str:
        if any(message.role == "system" for message in messages.messages):
            raise TemplateError("there is no system role", reason="refused")
        return render(engine, messages)

    monkeypatch.setattr(type(stage.engine), "render", strict)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    reply = ask(stage, route, {"messages": messages})
    assert reply.status == 200
    prompt = reply.json.get("prompt") or bytes(reply.json["tokens"]).decode()
    assert prompt == "user: Be brief.\n\nhi\n"


def test_model_without_embeddings_is_not_supported(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def embed(self: object, texts: object, *, truncate: bool) -> None:
        raise UsageError("any sentence", no_embeddings=True)

    monkeypatch.setattr(type(stage.engine), "embed", embed)
    reply = ask(stage, "/v1/embeddings", {"input": "a"})
    assert (reply.status, reply.error["code"]) == (400, "not_supported")


def test_embeddings_are_lists_or_base64(stage: Stage) -> None:
    whole = ask(stage, "/v1/embeddings", {"input": ["ab", "c"], "model": "m"}).json
    assert [each["embedding"] for each in whole["data"]] == [[2.0, 1.0], [1.0, 1.0]]
    assert whole["usage"] == {"prompt_tokens": 3, "total_tokens": 3}
    assert (whole["object"], whole["model"]) == ("list", "m")
    packed = ask(stage, "/v1/embeddings", {"input": "ab", "encoding_format": "base64"}).json
    raw = base64.b64decode(packed["data"][0]["embedding"])
    assert struct.unpack("<2f", raw) == (2.0, 1.0)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": [1, 2]}, "input"),
        ({"input": [[1, 2]]}, "input"),
        ({"input": ["a", 5]}, "input"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "dimensions": 1}, "dimensions"),
    ],
)
def test_bad_embeddings_are_refused(stage: Stage, body: dict[str, object], param: str) -> None:
    reply = ask(stage, "/v1/embeddings", body)
    assert (reply.status, reply.error["param"]) == (400, param)


def test_ids_of_a_foreign_tokenizer_are_never_embedded(stage: Stage) -> None:
    message = ask(stage, "/v1/embeddings", {"input": [[1, 2]]}).error["message"]
    assert "check_embedding_ctx_length=False" in message


def test_figures_are_counted(stage: Stage) -> None:
    chat(stage)
    chat(stage, response_format={"type": "json_object"})
    chat(stage, n=0)
    reply = ask(stage, "/metrics")
    assert reply.headers["content-type"].startswith("text/plain")
    page = reply.body.decode()
    # The scripted engine takes the characters of the request's repr for its tokens.
    labels = 'cache="miss",guided="yes",prompt="<=1024",speculation="on"'
    assert f"localchat_ttft_seconds_count{{{labels}}} 1.0" in page
    assert 'localchat_errors_total{code="unsupported_value",status="400"}' in page
    assert 'localchat_requests_total{finish="stop"}' in page
    assert f'localchat_kv_total_tokens{{model="{NAME}"}} 4096.0' in page
    for name in ("kv_swapped_tokens",):
        assert f'localchat_{name}{{model="{NAME}"}} 0.0' in page
    for name in ("queue_seconds", "request_seconds", "tpot_seconds", "prompt_tokens_total"):
        assert f"localchat_{name}" in page


def test_a_request_is_a_line_in_the_log_without_its_text(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    stage.scripts["secret prompt"] = ScriptedAnswer(("secret answer",))
    with caplog.at_level(logging.INFO, "localchat.server"):
        headers = {"user-agent": "curl\x1b[31m/8", "authorization": "Bearer sk-secret"}
        body = {"messages": [{"role": "user", "content": "secret prompt"}]}
        reply = ask(stage, "/v1/chat/completions", body, headers=headers)
        number = reply.headers["x-request-id"]
        assert settled(lambda: number in caplog.text)
    (line,) = [each.getMessage() for each in caplog.records if number in each.getMessage()]
    assert line.startswith(f"{number} POST /v1/chat/completions 200 ")
    for part in (f"model={NAME}", "prompt=", "cached=0", "completion=1", "ttft_ms=", "finish=stop"):
        assert part in line
    assert "secret" not in line and "\x1b" not in line and "curl" in line
    assert stage.last.user == "curl\u241b[31m/8"


def test_a_client_that_left_is_a_499_in_the_log(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    stage.scripts["slow"] = ScriptedAnswer(("a",) * 2000, gap_s=0.1)
    with caplog.at_level(logging.INFO, "localchat.server"):
        with Wire(stage.port) as wire:
            messages = [{"role": "user", "content": "slow"}]
            wire.ask("/v1/chat/completions", {"messages": messages, "stream": True})
            wire.until(b"assistant")
        assert settled(lambda: " 499 " in caplog.text)
    (line,) = [each.getMessage() for each in caplog.records if " 499 " in each.getMessage()]
    assert re.search(r"prompt=[1-9]\d* cached=0 completion=\d+ ", line)


def test_the_dashboard_shows_figures_that_there_are(stage: Stage) -> None:
    chat(stage)
    page = ask(stage, "/metrics").body.decode()
    dashboard = json.loads((ROOT / "docs" / "grafana.json").read_text(encoding="utf-8"))
    shown = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    names = {name for expression in shown for name in re.findall(r"localchat_\w+", expression)}
    assert len(names) > 15
    sent = set(re.findall(r"^# TYPE (\S+)", page, re.MULTILINE))
    assert {re.sub(r"_bucket$", "", name) for name in names} <= sent


def test_slots_are_idle_or_show_a_request_and_never_its_text(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    idle = {"id": 0, "model": NAME, "n_ctx": 4096, "speculative": False, "is_processing": False}
    assert ask(stage, "/slots").json == [idle]
    running = RunningRequest("decode", 7, 3, 5, user="secret")
    stats = msgspec.structs.replace(stage.engine.stats(), requests=(running,))
    monkeypatch.setattr(type(stage.engine), "stats", lambda self: stats)
    (slot,) = ask(stage, "/slots").json
    assert slot["is_processing"] and slot["n_prompt_tokens"] == 7
    assert slot["n_prompt_tokens_cache"] == 3
    assert slot["next_token"] == [{"has_next_token": True, "n_decoded": 5}]
    assert "secret" not in json.dumps(slot)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions/input_tokens", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/responses/input_tokens", {"input": "hi"}),
    ],
)
def test_input_tokens_are_counted_without_an_answer(stage: Stage, path: str, body: Any) -> None:
    asked = len(stage.engine.requests)
    counted = ask(stage, path, {"model": "m", **body}).json
    assert counted == {"object": "response.input_tokens", "input_tokens": len("user: hi\n")}
    assert len(stage.engine.requests) == asked
