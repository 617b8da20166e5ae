"""/v1/rerank: the best first, with their places; refusals."""

from typing import Any

import pytest

from localchat.errors import UsageError
from tests.support.http_server import NAME, Stage, ask

TEXTS = ["xyz", "abc", "abx"]


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v1/reranking"])
def test_documents_come_back_the_best_first(stage: Stage, path: str) -> None:
    whole = ask(stage, path, {"model": NAME, "query": "abc", "documents": TEXTS}).json
    assert whole["results"] == [
        {"index": 1, "relevance_score": 3.0},
        {"index": 2, "relevance_score": 2.0},
        {"index": 0, "relevance_score": 0.0},
    ]
    assert (whole["object"], whole["model"]) == ("list", NAME)
    assert whole["usage"] == {"prompt_tokens": 18, "total_tokens": 18}


def test_the_best_of_them_with_their_texts(stage: Stage) -> None:
    body = {"query": "abc", "documents": [{"text": each} for each in TEXTS], "top_n": 1}
    (best,) = ask(stage, "/v1/rerank", {**body, "return_documents": True}).json["results"]
    assert best == {"index": 1, "relevance_score": 3.0, "document": {"text": "abc"}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"documents": ["a"]}, "query"),
        ({"query": "a"}, "documents"),
        ({"query": "a", "documents": []}, "documents"),
        ({"query": "a", "documents": ["a"], "top_n": 0}, "top_n"),
        ({"query": "a", "documents": [1]}, "documents[0]"),
    ],
)
def test_what_is_missing_is_named(stage: Stage, fields: Any, param: str) -> None:
    reply = ask(stage, "/v1/rerank", fields)
    assert (reply.status, reply.error["param"]) == (400, param)


def test_a_model_that_scores_nothing_is_a_400(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rerank(*_: object) -> None:
        raise UsageError("any sentence", no_scores=True)

    monkeypatch.setattr(type(stage.engine), "rerank", rerank)
    reply = ask(stage, "/v1/rerank", {"query": "a", "documents": ["a"]})
    assert (reply.status, reply.error["code"]) == (400, "not_supported")
