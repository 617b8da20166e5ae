"""GET /, /health, /props and /metrics: is it there, what is it, how is it doing."""

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from localchat import __version__
from localchat.engine.engine import Engine
from localchat.engine.events import EngineStats
from localchat.engine.request import Message, Messages
from localchat.errors import LocalchatError, TemplateError
from localchat.server.engines import Lease
from localchat.server.failures import busy
from localchat.server.metrics import CONTENT_TYPE
from localchat.server.routes.models import json
from localchat.server.service import service_of

_PROBE = {
    "type": "function",
    "function": {
        "name": "probe_of_tools",
        "description": "",
        "parameters": {"type": "object", "properties": {}},
    },
}


async def root(request: Request) -> Response:
    """Probes of clients and people end here."""
    return Response("localchat is running\n", headers={"content-type": "text/plain"})


async def health(request: Request) -> Response:
    """503 until the server's own model can answer for the first time."""
    if not service_of(request).ready:
        raise busy("The model is being loaded.", "model_loading", retry_s=2)
    return json({"status": "ok"})


async def props(request: Request) -> Response:
    """What llama.cpp's clients look at: context and abilities. `?model=` names another model that is loaded;
    none is loaded for this question."""
    service = service_of(request)
    word = request.query_params.get("model", "")
    known = {name for name, _ in service.engines.loaded()}
    async with await service.lease(word if word in known else "", request) as lease:
        tools = await asyncio.to_thread(_reads_tools, lease.engine)
        return json(_described(lease, tools=tools))


def _described(lease: Lease, *, tools: bool) -> dict[str, Any]:
    info = lease.info
    return {
        "default_generation_settings": {"n_ctx": info.context_tokens},
        "model_alias": lease.name,
        "build_info": f"localchat {__version__}",
        "modalities": {"vision": False, "audio": False},
        "chat_template_caps": {"supports_tools": tools, "supports_tool_calls": tools},
        "architecture": info.architecture,
        "quantization": info.quantization,
        "n_ctx_train": info.context_train,
        "kv_type": info.kv_type,
        "limits": info.limits,
    }


def _reads_tools(engine: Engine) -> bool:
    """Whether the model's template tells it of tools."""
    try:
        shown = engine.render(Messages((Message("user", "probe"),), tools=(_PROBE,)))
    except TemplateError:
        return False
    return "probe_of_tools" in shown


async def metrics(request: Request) -> Response:
    service = service_of(request)
    stats: list[tuple[str, EngineStats]] = []
    for name, engine in service.engines.loaded():
        try:
            stats.append((name, await asyncio.to_thread(engine.stats)))
        except LocalchatError:
            continue  # it ends just now; the next page is without it
    return Response(service.metrics.page(stats), headers={"content-type": CONTENT_TYPE})
