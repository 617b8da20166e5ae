"""The part of Ollama's API that programs read before they ask for an answer, and the refusal of the rest."""

import re
from datetime import UTC, datetime, timedelta
from typing import Any
from unittest.mock import Mock

import pytest

from localchat.pool.entry import ModelStatus
from localchat.pool.pool import EnginePool
from localchat.pool.resolver import ModelCard
from localchat.server.config import ServerConfig
from localchat.server.leases import AsyncLease
from tests.support.http_server import NAME, Reply, Stage, Wire, ask, chat, running, serving
from tests.support.scripted_engine import ScriptedEngine
from tests.support.single_engine import SingleEngine

CODER = ModelCard(
    "qwen2.5-coder:7b-q4_k_m",
    context_tokens=16_384,
    context_train=131_072,
    created=1_700_000_000,
    architecture="qwen2",
    quantization="Q4_K_M",
    parameters=7_615_616_512,
    size_bytes=4_683_073_184,
    abilities=frozenset({"chat", "tools", "infill"}),
)
PLAIN = ModelCard("hf.co/someone/base:Q8_0", parameters=494_032_768)
EMBEDDER = ModelCard("vectors", abilities=frozenset({"embedding"}))
THINKER = ModelCard("thinker", context_train=4096, abilities=frozenset({"thinking"}))


class Library(SingleEngine):
    """Knows of models that it never loads."""

    def models(self) -> list[ModelCard]:
        return [*SingleEngine.models(self), CODER, PLAIN, THINKER, EMBEDDER]

    async def lease(self, model: str, *, user: str = "") -> AsyncLease:
        raise AssertionError("nothing is loaded for a look")


@pytest.fixture(scope="module")
def library() -> Any:
    with running(ScriptedEngine(), engines=Library) as (port, _):
        yield port


def look(port: int, path: str, body: Any = None, **how: Any) -> Reply:
    with Wire(port) as wire:
        wire.ask(path, body, **how)
        return wire.reply(bodiless=how.get("method") == "HEAD")


def refusal(reply: Reply) -> str:
    """The sentence of an error in Ollama's shape."""
    assert reply.headers["content-type"] == "application/json"
    assert list(reply.json) == ["error"]
    sentence = reply.json["error"]
    assert isinstance(sentence, str) and sentence
    return sentence


# ---------------------------------------------------------------------------- looks


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize("path", ["/", "/api/version", "/api/tags"])
def test_probes_are_answered(stage: Stage, path: str, method: str) -> None:
    assert ask(stage, path, method=method).status == 200


def test_the_version_is_one_that_vs_code_takes(stage: Stage) -> None:
    found = ask(stage, "/api/version")
    assert found.body == b'{"version":"0.6.4"}'
    assert tuple(map(int, found.json["version"].split("."))) >= (0, 6, 4)


def test_every_model_is_listed_as_ollama_lists_its_own(library: int) -> None:
    models = look(library, "/api/tags").json["models"]
    assert [model["name"] for model in models] == [
        NAME,
        CODER.name,
        PLAIN.name,
        "thinker",
        "vectors",
    ]
    coder = models[1]
    assert coder["model"] == coder["name"]
    assert coder["modified_at"] == "2023-11-14T22:13:20Z"
    assert coder["size"] == 4_683_073_184
    assert re.fullmatch("[0-9a-f]{64}", coder["digest"])
    assert coder["details"] == {
        "parent_model": "",
        "format": "gguf",
        "family": "qwen2",
        "families": ["qwen2"],
        "parameter_size": "7.6B",
        "quantization_level": "Q4_K_M",
    }
    assert models[2]["details"]["parameter_size"] == "494.03M"
    assert len({model["digest"] for model in models}) == 5


@pytest.mark.parametrize("key", ["model", "name"])
@pytest.mark.parametrize("tag", ["", ":latest"])
def test_a_model_is_shown_with_the_context_that_it_runs_with(
    library: int, key: str, tag: str
) -> None:
    shown = look(library, "/api/show", {key: CODER.name + tag, "verbose": True}).json
    assert shown["model_info"] == {
        "general.architecture": "qwen2",
        "general.parameter_count": 7_615_616_512,
        "general.basename": CODER.name,
        "qwen2.context_length": 16_384,
    }
    assert shown["parameters"] == "num_ctx 16384"
    assert shown["capabilities"] == ["completion", "tools", "insert"]
    assert shown["details"]["family"] == "qwen2"
    assert ".Suffix" in shown["template"] and ".Tools" in shown["template"]


def test_what_a_model_cannot_is_not_marked(library: int) -> None:
    plain = look(library, "/api/show", {"model": PLAIN.name}).json
    assert plain["capabilities"] == ["completion"]
    assert ".Suffix" not in plain["template"] and ".Tools" not in plain["template"]
    assert plain["model_info"]["general.architecture"] == plain["details"]["family"] == "unknown"
    assert plain["parameters"] == ""
    thinker = look(library, "/api/show", {"model": "thinker"}).json
    assert thinker["capabilities"] == ["completion", "thinking"]
    assert thinker["model_info"]["unknown.context_length"] == 4096
    assert look(library, "/api/show", {"model": "vectors"}).json["capabilities"] == ["embedding"]


def test_loaded_model_reports_its_own_context(stage: Stage) -> None:
    chat(stage)
    shown = ask(stage, "/api/show", {"model": NAME}).json
    assert shown["model_info"]["script.context_length"] == 4096


def test_loaded_models_are_listed(stage: Stage) -> None:
    (model,) = ask(stage, "/api/ps").json["models"]
    assert (model["name"], model["context_length"], model["size_vram"]) == (NAME, 4096, 0)


class Idle(SingleEngine):
    """Has a pool that unloads its model in a minute."""

    def __init__(self, engine: ScriptedEngine, name: str) -> None:
        SingleEngine.__init__(self, engine, name)
        status = ModelStatus(NAME, NAME, "ready", unloads_in_s=60.0)
        self.pool = Mock(spec=EnginePool, loaded=Mock(return_value=[status]))


def test_a_loaded_model_expires_when_its_idle_time_ends(stage: Stage) -> None:
    (model,) = ask(stage, "/api/ps").json["models"]
    now = datetime.now(UTC)
    assert datetime.fromisoformat(model["expires_at"]) > now + timedelta(days=300)
    with running(ScriptedEngine(model=NAME), engines=Idle) as (port, _):
        (model,) = look(port, "/api/ps").json["models"]
    assert datetime.fromisoformat(model["expires_at"]) < now + timedelta(days=1)


# ---------------------------------------------------------------------------- refusals


def test_an_unknown_model_is_404_in_ollamas_shape(library: int) -> None:
    reply = look(library, "/api/show", {"model": "nobody:latest"})
    assert reply.status == 404
    assert "nobody:latest" in refusal(reply)


@pytest.mark.parametrize("body", [{}, {"model": ""}, {"model": 7}, b"{", [1]])
def test_a_question_that_names_no_model_is_400_in_ollamas_shape(stage: Stage, body: Any) -> None:
    reply = ask(stage, "/api/show", body)
    assert reply.status == 400
    refusal(reply)


@pytest.mark.parametrize(
    ("verb", "method", "way"),
    [
        ("pull", "POST", "localchat command"),
        ("create", "POST", "localchat command"),
        ("delete", "DELETE", "localchat command"),
        ("blobs/sha256:0", "HEAD", ""),
        ("blobs/sha256:0", "POST", "localchat command"),
    ],
)
def test_what_would_answer_or_change_something_names_the_way_to_go(
    stage: Stage, verb: str, method: str, way: str
) -> None:
    asked = len(stage.engine.requests)
    body = None if method == "HEAD" else {"model": NAME, "messages": []}
    reply = ask(stage, f"/api/{verb}", body, method=method)
    assert reply.status == 501
    if method != "HEAD":
        assert way in refusal(reply) and "chat" in refusal(reply)
    assert len(stage.engine.requests) == asked


def test_other_routes_are_404_and_other_methods_405_in_ollamas_shape(stage: Stage) -> None:
    reply = ask(stage, "/api/nothing/here", {"a": 1})
    assert reply.status == 404 and "/v1" in refusal(reply)
    for path, method, allowed in (
        ("chat", "PATCH", "POST"),
        ("show", "GET", "POST"),
        ("ps", "PUT", "GET"),
    ):
        reply = ask(stage, f"/api/{path}", method=method)
        assert reply.status == 405 and allowed in reply.headers["allow"]
        refusal(reply)


def test_the_guard_stands_before_it_and_speaks_its_shape() -> None:
    with serving(ServerConfig(api_keys=("secret",))) as stage:
        reply = ask(stage, "/api/tags")
        assert reply.status == 401
        refusal(reply)
        held = {"authorization": "Bearer secret"}
        assert ask(stage, "/api/tags", headers=held).status == 200
        reply = ask(stage, "/api/tags", host="evil.example")
        assert reply.status == 403
        refusal(reply)
