"""GET /v1/models and /v1/models/{id}: what can be asked for, with the context that is really there."""

from datetime import UTC, datetime
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from localchat.pool.resolver import ModelCard
from localchat.server.errors import model_not_found
from localchat.server.state import service_of


async def models(request: Request) -> Response:
    cards = service_of(request).engines.models()
    data = [_told(card, request) for card in cards]
    made: dict[str, Any] = {"object": "list", "data": data}
    if _is_anthropics(request):
        ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {}
        made |= {"has_more": False, **ends}
    return json(made)


async def model(request: Request) -> Response:
    """An id may hold slashes and colons."""
    wanted: str = request.path_params["id"]
    for card in service_of(request).engines.models():
        if card.name == wanted:
            return json(_told(card, request))
    raise model_not_found(wanted)


def _is_anthropics(request: Request) -> bool:
    """Whether a client of Anthropic's API asks: the route is the same, and they all send their version."""
    return "anthropic-version" in request.headers


def _told(card: ModelCard, request: Request) -> dict[str, Any]:
    made = _described(card)
    if _is_anthropics(request):
        created = datetime.fromtimestamp(card.created, UTC).isoformat().replace("+00:00", "Z")
        made |= {"type": "model", "display_name": card.name, "created_at": created}
    return made


def json(value: Any) -> Response:  # noqa: ANN401 - any JSON
    """Compact JSON as a response."""
    body = msgspec.json.encode(value)
    return Response(body, headers={"content-type": "application/json"})


def _described(card: ModelCard) -> dict[str, Any]:
    """Clients look for the context under different names; `status` is left out, because it makes some
    believe that this is a router of models."""
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
