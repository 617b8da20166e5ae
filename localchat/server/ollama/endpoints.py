"""The routes of Ollama's API that describe models. answers.py has those that answer.

No route here loads a model or waits for one. Routes that would change models are rejected, with a hint.
"""

import asyncio
import hashlib
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from localchat.engine.interface import EngineInfo
from localchat.pool.resolver import ModelCard
from localchat.server.errors import ApiError, missing_field, model_not_found
from localchat.server.formatters import json_response, utc_time
from localchat.server.request_body import read_json
from localchat.server.state import Service, service_of

_VERSION: Final = "0.6.4"
"""Version of Ollama that the answers match. Programs refuse older ones."""
CHANGING: Final = ("pull", "push", "create", "copy", "delete", "blobs")
"""Routes that would change models."""
_FOREVER: Final = timedelta(days=365)


class ShowBody(msgspec.Struct, frozen=True):
    """POST /api/show. `name` is a deprecated alias of `model`."""

    model: str | None = None
    name: str | None = None


async def version(request: Request) -> Response:
    """GET /api/version."""
    return json_response({"version": _VERSION})


async def tags(request: Request) -> Response:
    """GET /api/tags: list all models."""
    cards = service_of(request).engines.models()
    return json_response({"models": [_listed(card) for card in cards]})


async def show(request: Request) -> Response:
    """Describe a model, without reading its file."""
    service = service_of(request)
    body = await read_json(request, ShowBody)
    name = body.model or body.name
    if not name:
        raise missing_field("model")
    name = server_name(service, name)
    card = next((card for card in service.engines.models() if card.name == name), None)
    if card is None:
        raise model_not_found(name)
    context = card.context_tokens or card.context_train
    family = _family(card)
    info = {"general.architecture": family, "general.parameter_count": card.parameters}
    # Copilot shows it as the model's name.
    info["general.basename"] = card.name
    if context:
        info[f"{family}.context_length"] = context
    return json_response(
        {
            "license": "",
            "modelfile": "",
            "parameters": f"num_ctx {context}" if context else "",
            "template": _template(card),
            "details": _details(card),
            "model_info": info,
            "capabilities": _capabilities(card),
            "modified_at": utc_time(card.created),
        }
    )


async def running(request: Request) -> Response:
    """GET /api/ps: list the loaded models."""
    service = service_of(request)
    cards = {card.name: card for card in service.engines.models()}
    loaded = await service.engines.query_loaded(lambda engine: engine.info())
    statuses = await asyncio.to_thread(service.engines.pool.loaded)
    idle_left_s = {status.name: status.unloads_in_s for status in statuses}
    models = [
        _running(cards.get(name) or ModelCard(name), info, idle_left_s.get(name))
        for name, _, info in loaded
    ]
    return json_response({"models": models})


async def unsupported(request: Request) -> Response:
    """Reject a route of Ollama's API that would change models. Raises ApiError."""
    verb = request.scope["path"].split("/")[2]
    raise ApiError(
        501,
        "not_supported",
        f"localchat does not support /api/{verb}: use the localchat command, as models are not changed over "
        "HTTP. Of Ollama's API it supports chat, generate, embed, tags, show, ps and version.",
    )


def server_name(service: Service, name: str) -> str:
    """Return the server's name of a model: programs add `:latest` to a name without a tag."""
    names = {card.name for card in service.engines.models()}
    bare = name.removesuffix(":latest")
    if name not in names and bare in names:
        return bare
    return name


def _listed(card: ModelCard) -> dict[str, Any]:
    return {
        "name": card.name,
        "model": card.name,
        "modified_at": utc_time(card.created),
        "size": card.size_bytes,
        "digest": _digest(card),
        "details": _details(card),
    }


def _running(card: ModelCard, info: EngineInfo, idle_left_s: float | None) -> dict[str, Any]:
    """Describe a loaded model. idle_left_s: time until it is unloaded, None if it is used or stays."""
    left = _FOREVER
    if idle_left_s is not None:
        left = timedelta(seconds=idle_left_s)
    gpu_share = info.gpu_layers / info.layers if info.layers else 0.0
    size = info.actual_bytes or info.predicted_bytes or card.size_bytes
    return {
        "name": card.name,
        "model": card.name,
        "size": size,
        "digest": _digest(card),
        "details": _details(card),
        "expires_at": (datetime.now(UTC) + left).isoformat(timespec="seconds"),
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
    names = {"tools": "tools", "infill": "insert", "thinking": "thinking"}
    media = {"image": "vision", "audio": "audio"}
    return [
        "completion",
        *(name for ability, name in names.items() if ability in card.abilities),
        *(name for kind, name in media.items() if kind in card.media),
    ]


def _template(card: ModelCard) -> str:
    """Return the marks that programs look for, instead of the model's template.

    `.Suffix` means that the model can fill gaps, `.Tools` that it can call tools.
    """
    marks = ["{{ .System }}"]
    if "tools" in card.abilities:
        marks.append("{{ .Tools }}")
    marks.append("{{ .Prompt }}")
    if "infill" in card.abilities:
        marks.append("{{ .Suffix }}")
    return "".join(marks)


def _family(card: ModelCard) -> str:
    return card.architecture or "unknown"


def _parameters(count: int) -> str:
    """Format a count of parameters as Ollama does: 7.6B, 494.03M."""
    if not count:
        return ""
    if count >= 1_000_000_000:
        return f"{count / 1e9:.1f}B"
    return f"{count / 1e6:.2f}M"


def _digest(card: ModelCard) -> str:
    """Return a digest of name, size and date. Hashing the file would take too long."""
    identity = f"{card.name}\0{card.size_bytes}\0{card.created}"
    return hashlib.sha256(identity.encode()).hexdigest()
