"""GET /v1/models and /v1/models/{id}: the models that a request may name, with their usable context."""

from datetime import UTC, datetime
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from localchat.pool.resolver import ModelCard
from localchat.server.errors import model_not_found
from localchat.server.formatters import json_response
from localchat.server.paths import is_anthropic
from localchat.server.state import service_of


async def models(request: Request) -> Response:
    """All models, the server's own first."""
    cards = _cards(request)
    data = [_entry(card, request) for card in cards]
    made: dict[str, Any] = {"object": "list", "data": data}
    if is_anthropic(request.scope):
        ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {}
        made |= {"has_more": False, **ends}
    return json_response(made)


async def model(request: Request) -> Response:
    """One model. Its id may contain slashes and colons."""
    name: str = request.path_params["id"]
    for card in _cards(request):
        if card.name == name:
            return json_response(_entry(card, request))
    raise model_not_found(name)


def _cards(request: Request) -> list[ModelCard]:
    """The models, then the server's own with each of the documents."""
    service = service_of(request)
    cards = service.engines.models()
    own = cards[0].name if cards else ""
    return cards + [
        msgspec.structs.replace(cards[0], name=f"{own}@{name}")
        for name in service.documents.names
        if own
    ]


def _entry(card: ModelCard, request: Request) -> dict[str, Any]:
    made = _openai_entry(card)
    if is_anthropic(request.scope):
        created = datetime.fromtimestamp(card.created, UTC).isoformat().replace("+00:00", "Z")
        made |= {"type": "model", "display_name": card.name, "created_at": created}
        made |= {"lifecycle": "active", "max_input_tokens": made.get("context_length")}
    return made


def _openai_entry(card: ModelCard) -> dict[str, Any]:
    """Clients look for the context under different names. `status` is left out, because some clients take a
    server that sends it for a router of models."""
    made: dict[str, Any] = {
        "id": card.name,
        "object": "model",
        "created": card.created,
        "owned_by": "localchat",
        "architecture": {"input_modalities": ["text"], "output_modalities": ["text"]},
    }
    context = card.context_tokens or card.context_train
    if context:
        made |= dict.fromkeys(("max_model_len", "context_length", "max_context_length"), context)
        made["meta"] = {"n_ctx": context, "n_ctx_train": card.context_train or context}
    return made
