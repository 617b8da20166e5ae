"""POST /v1/rerank: score documents for a query with a reranker model, in Jina's and llama.cpp's format."""

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from localchat.engine.interface import Engine, Vectors
from localchat.errors import UsageError
from localchat.server.config import ServerLimits
from localchat.server.errors import bad_request, missing_field
from localchat.server.formatters import json_response
from localchat.server.request_body import read_json
from localchat.server.state import service_of


class Document(msgspec.Struct, frozen=True):
    text: str


class RerankBody(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/rerank. `texts` is an alias of `documents`."""

    query: str
    documents: list[str | Document] | None = None
    texts: list[str] | None = None
    model: str | None = None
    top_n: int | None = None
    return_documents: bool | None = None


async def rerank(request: Request) -> Response:
    """Score documents, best first. The scores are the model's own: only their order has a meaning."""
    service = service_of(request)
    limits = service.config.limits
    body = await read_json(request, RerankBody, limits)
    documents = _documents(body, limits)
    if body.top_n is not None and body.top_n < 1:
        raise bad_request(f"The field 'top_n' is {body.top_n}; it must be positive.", param="top_n")
    async with await service.lease(body.model, request) as lease:
        scores = await asyncio.to_thread(_scores, lease.engine, body.query, documents)
        model = body.model or lease.name
    results: list[dict[str, Any]] = []
    for index, ((score, *_), text) in enumerate(zip(scores, documents, strict=True)):
        result: dict[str, Any] = {"index": index, "relevance_score": score}
        if body.return_documents:
            result["document"] = {"text": text}
        results.append(result)
    results.sort(key=lambda result: -result["relevance_score"])
    tokens = sum(scores.tokens)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return json_response(
        {"model": model, "object": "list", "usage": usage, "results": results[: body.top_n]}
    )


def _documents(body: RerankBody, limits: ServerLimits) -> list[str]:
    documents = body.texts if body.documents is None else body.documents
    if documents is None:
        raise missing_field("documents")
    if not documents or len(documents) > limits.inputs:
        raise bad_request(
            f"There are {len(documents)} documents; 1 to {limits.inputs} are allowed.",
            param="documents",
        )
    return [document if isinstance(document, str) else document.text for document in documents]


def _scores(engine: Engine, query: str, documents: Sequence[str]) -> Vectors:
    try:
        return engine.rerank(query, documents)
    except UsageError as error:
        if error.details.get("no_scores"):
            message = "This model does not score texts; load a reranker and name it in 'model'."
            raise bad_request(message, param="model", code="not_supported") from error
        raise
