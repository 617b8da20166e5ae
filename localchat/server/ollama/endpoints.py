"""The part of Ollama's API by which programs find models. answers.py has the part that answers.

Nothing here loads a model or waits for one. Routes that would change something are refused with a pointer to
the right way.
"""

import asyncio
import hashlib
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from localchat.engine.interface import EngineInfo
from localchat.errors import LocalchatError
from localchat.pool.resolver import ModelCard
from localchat.server.errors import ApiError, bad_request, model_not_found
from localchat.server.formatters import json_response
from localchat.server.request_body import read_json
from localchat.server.state import Service, service_of

_VERSION: Final = "0.6.4"
"""The version of Ollama that these answers match; programs refuse older ones."""
_INSTEAD: Final = {
    **dict.fromkeys(
        ("pull", "push", "create", "copy", "delete", "blobs"),
        "the localchat command, as models are not changed over HTTP",
    ),
}
_FOR_EVER: Final = timedelta(days=365)


class ShowBody(msgspec.Struct, frozen=True):
    """POST /api/show. `name` is the deprecated name of `model`."""

    model: str | None = None
    name: str | None = None


async def version(request: Request) -> Response:
    """GET /api/version."""
    return json_response({"version": _VERSION})


async def tags(request: Request) -> Response:
    """GET /api/tags: all models."""
    return json_response(
        {"models": [_listed(card) for card in service_of(request).engines.models()]}
    )


async def show(request: Request) -> Response:
    """Details of a model, without reading its file."""
    service = service_of(request)
    limits = service.config.limits
    body = await read_json(request, ShowBody, limits)
    name = body.model or body.name
    if not name:
        raise bad_request(
            "The field 'model' is required.", param="model", code="missing_required_parameter"
        )
    card = _find(service, name)
    context = card.context_tokens or card.context_train
    family = _family(card)
    return json_response(
        {
            "license": "",
            "modelfile": "",
            "parameters": f"num_ctx {context}" if context else "",
            "template": _template(card),
            "details": _details(card),
            "model_info": {
                "general.architecture": family,
                "general.parameter_count": card.parameters,
                **({f"{family}.context_length": context} if context else {}),
            },
            "capabilities": _capabilities(card),
            "modified_at": _time(card.created),
        }
    )


async def running(request: Request) -> Response:
    """GET /api/ps: the loaded models. `expires_at` is far away, as only the pool knows when a model is
    unloaded."""
    service = service_of(request)
    cards = {card.name: card for card in service.engines.models()}
    made = []
    for name, engine in service.engines.loaded():
        try:
            info = await asyncio.to_thread(engine.info)
        except LocalchatError:
            continue  # it ended in between
        made.append(_running(cards.get(name) or ModelCard(name, loaded=True), info))
    return json_response({"models": made})


async def unsupported(request: Request) -> Response:
    """Refuse every other route of Ollama's API. Raises ApiError."""
    verb = str(request.path_params["rest"]).partition("/")[0]
    instead = _INSTEAD.get(verb)
    if instead is None:
        raise ApiError(
            404,
            None,
            f"There is no route /api/{verb[:50]}; OpenAI's API is at /v1.",
            kind="not_found_error",
        )
    raise ApiError(
        501,
        "not_supported",
        f"localchat does not support /api/{verb}: use {instead}. Of Ollama's API it supports chat, generate, "
        "embed, tags, show, ps and version.",
    )


# ---------------------------------------------------------------------------- parts


def _find(service: Service, name: str) -> ModelCard:
    """The model of this name. Programs add `:latest` to a name without a tag."""
    cards = service.engines.models()
    for candidate in (name, name.removesuffix(":latest")):
        for card in cards:
            if card.name == candidate:
                return card
    raise model_not_found(name)


def _listed(card: ModelCard) -> dict[str, Any]:
    return {
        "name": card.name,
        "model": card.name,
        "modified_at": _time(card.created),
        "size": card.size_bytes,
        "digest": _digest(card),
        "details": _details(card),
    }


def _running(card: ModelCard, info: EngineInfo) -> dict[str, Any]:
    gpu_share = info.gpu_layers / info.layers if info.layers else 0.0
    size = info.actual_bytes or info.predicted_bytes or card.size_bytes
    return {
        "name": card.name,
        "model": card.name,
        "size": size,
        "digest": _digest(card),
        "details": _details(card),
        "expires_at": (datetime.now(UTC) + _FOR_EVER).isoformat(timespec="seconds"),
        "size_vram": int(size * min(1.0, gpu_share)),
        "context_length": info.context_tokens,
    }


def _details(card: ModelCard) -> dict[str, Any]:
    family = _family(card)
    return {
        "parent_model": "",
        "format": "gguf",
        "family": family,
        "families": [family],
        "parameter_size": _parameters(card.parameters),
        "quantization_level": card.quantization,
    }


def _capabilities(card: ModelCard) -> list[str]:
    if "embedding" in card.abilities:
        return ["embedding"]
    if "rerank" in card.abilities:
        return []
    return [
        "completion",
        *(["tools"] if "tools" in card.abilities else []),
        *(["insert"] if "infill" in card.abilities else []),
        *(["thinking"] if "thinking" in card.abilities else []),
    ]


def _template(card: ModelCard) -> str:
    """Marks that programs look for, not the template of the model.

    `.Suffix` means that it can fill gaps, `.Tools` that it takes tools.
    """
    marks = ["{{ .System }}"]
    marks += ["{{ .Tools }}"] if "tools" in card.abilities else []
    marks += ["{{ .Prompt }}"]
    marks += ["{{ .Suffix }}"] if "infill" in card.abilities else []
    return "".join(marks)


def _family(card: ModelCard) -> str:
    return card.architecture or "unknown"


def _parameters(count: int) -> str:
    """A count of parameters as Ollama writes it: 7.6B, 494.03M."""
    if count >= 1_000_000_000:
        return f"{count / 1e9:.1f}B"
    return f"{count / 1e6:.2f}M" if count else ""


def _digest(card: ModelCard) -> str:
    """A digest of name, size and date; hashing the file would take too long."""
    identity = f"{card.name}\0{card.size_bytes}\0{card.created}"
    return hashlib.sha256(identity.encode()).hexdigest()


def _time(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
