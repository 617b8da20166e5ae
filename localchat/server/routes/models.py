"""GET /v1/models and /v1/models/{id}: what can be asked for, with the context that is really there."""

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from localchat.server.engines import ModelCard
from localchat.server.failures import no_model
from localchat.server.service import service_of


async def models(request: Request) -> Response:
    cards = service_of(request).engines.models()
    return json({"object": "list", "data": [_described(card) for card in cards]})


async def model(request: Request) -> Response:
    """An id may hold slashes and colons."""
    wanted: str = request.path_params["id"]
    for card in service_of(request).engines.models():
        if card.name == wanted:
            return json(_described(card))
    raise no_model(wanted)


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
