"""Routes that report the state of the server: /, /health, /props, /slots and /metrics."""

import asyncio
from collections.abc import Collection
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from localchat import __version__
from localchat.engine.events import EngineStats, RunningRequest
from localchat.engine.interface import Engine
from localchat.errors import LocalchatError
from localchat.pool.resolver import ModelCard
from localchat.server.errors import unavailable
from localchat.server.formatters import json_response
from localchat.server.metrics import CONTENT_TYPE
from localchat.server.state import service_of


async def root(request: Request) -> Response:
    """Greet clients that probe the server, and people."""
    return Response("localchat is running\n", headers={"content-type": "text/plain"})


async def health(request: Request) -> Response:
    """Answer 503 until the server's own model is loaded, and once the server stops."""
    service = service_of(request)
    service.tracker.check_open()
    if not service.ready:
        raise unavailable("The model is still loading.", "model_loading", retry_s=2)
    return json_response({"status": "ok"})


async def props(request: Request) -> Response:
    """Describe the server's own model, or the one that `?model=` names, for llama.cpp's clients.

    Clients poll this route, so it neither loads a model nor keeps one loaded.
    """
    engines = service_of(request).engines
    cards = {card.name: card for card in engines.models()}
    name = request.query_params.get("model", "")
    card = cards.get(name) or next(iter(cards.values()))
    properties = _card_properties(card)
    for loaded, engine in engines.loaded():
        if loaded == card.name:
            try:
                properties |= await asyncio.to_thread(_engine_properties, engine)
            except LocalchatError:
                break  # the engine exited between the two calls
    return json_response(properties)


def _card_properties(card: ModelCard) -> dict[str, Any]:
    return {
        "default_generation_settings": {"n_ctx": card.context_tokens or card.context_train},
        "model_alias": card.name,
        "build_info": f"localchat {__version__}",
        "modalities": _modalities(card.media),
        "n_ctx_train": card.context_train,
    }


def _engine_properties(engine: Engine) -> dict[str, Any]:
    """Return the properties that only a loaded engine knows."""
    info = engine.info()
    properties = {
        "default_generation_settings": {"n_ctx": info.context_tokens},
        "architecture": info.architecture,
        "quantization": info.quantization,
        "n_ctx_train": info.context_train,
        "kv_type": info.kv_type,
        "limits": info.limits,
        "modalities": _modalities(info.media),
    }
    if info.tokenizer is not None:
        properties |= {
            "chat_template": info.tokenizer.chat_template,
            "bos_token": info.tokenizer.bos_token,
            "eos_token": info.tokenizer.eos_token,
        }
    if info.max_rows:
        properties["total_slots"] = info.max_rows
    return properties


def _modalities(media: Collection[str]) -> dict[str, bool]:
    return {"vision": "image" in media, "audio": "audio" in media}


async def slots(request: Request) -> Response:
    """List the requests in progress as llama.cpp's slots, without any text.

    An idle model has one idle slot.
    """
    slots: list[dict[str, Any]] = []
    engines = service_of(request).engines
    for name, _, (context, stats) in await engines.query_loaded(_context_and_stats):
        for running in stats.requests or (None,):
            slot = {"id": len(slots), "model": name, "n_ctx": context, "speculative": False}
            slots.append({**slot, **_progress(running)})
    return json_response(slots)


def _context_and_stats(engine: Engine) -> tuple[int, EngineStats]:
    return engine.info().context_tokens, engine.stats()


def _progress(running: RunningRequest | None) -> dict[str, Any]:
    if running is None:
        return {"is_processing": False}
    return {
        "is_processing": running.phase != "queued",
        "n_prompt_tokens": running.prompt_tokens,
        "n_prompt_tokens_cache": running.cached_tokens,
        "next_token": [{"has_next_token": True, "n_decoded": running.completion_tokens}],
    }


async def metrics(request: Request) -> Response:
    """Report Prometheus metrics."""
    service = service_of(request)
    stats = await service.engines.query_loaded(lambda engine: engine.stats())
    return Response(service.metrics.render(stats), headers={"content-type": CONTENT_TYPE})
