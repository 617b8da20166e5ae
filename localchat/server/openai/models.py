"""GET /v1/models and /v1/models/{id}: models that a request may name, with their usable context."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from localchat.pool.resolver import ModelCard
from localchat.server.errors import model_not_found
from localchat.server.formatters import json_response, utc_time
from localchat.server.paths import is_anthropic
from localchat.server.state import service_of


async def models(request: Request) -> Response:
    """List all models, the server's own first."""
    data = [_entry(card, request) for card in service_of(request).engines.models()]
    listing: dict[str, Any] = {"object": "list", "data": data}
    if is_anthropic(request.scope):
        listing["has_more"] = False
        if data:
            listing |= {"first_id": data[0]["id"], "last_id": data[-1]["id"]}
    return json_response(listing)


async def model(request: Request) -> Response:
    """Describe a model. Its id may contain slashes and colons."""
    name: str = request.path_params["id"]
    for card in service_of(request).engines.models():
        if card.name == name:
            return json_response(_entry(card, request))
    raise model_not_found(name)


def _entry(card: ModelCard, request: Request) -> dict[str, Any]:
    entry = _openai_entry(card)
    if is_anthropic(request.scope):
        entry |= {"type": "model", "display_name": card.name, "created_at": utc_time(card.created)}
        entry |= {"lifecycle": "active", "max_input_tokens": entry.get("context_length")}
    return entry


def _openai_entry(card: ModelCard) -> dict[str, Any]:
    """Describe a model in OpenAI's format.

    Clients look for the context under different names. There is no `status`: some clients mistake a server that
    sends it for a router of models.
    """
    entry: dict[str, Any] = {
        "id": card.name,
        "object": "model",
        "created": card.created,
        "owned_by": "localchat",
        "architecture": {
            "input_modalities": ["text", *card.media],
            "output_modalities": ["text"],
        },
    }
    context = card.context_tokens or card.context_train
    if context:
        entry |= dict.fromkeys(("max_model_len", "context_length", "max_context_length"), context)
        entry["meta"] = {"n_ctx": context, "n_ctx_train": card.context_train or context}
    return entry
