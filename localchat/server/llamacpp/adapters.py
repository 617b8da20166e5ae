"""GET and POST /lora-adapters: llama.cpp's routes for LoRA adapters and their scales."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from localchat.engine.interface import EngineInfo
from localchat.server.chat.options import AdapterScale, adapter_scales
from localchat.server.errors import bad_request
from localchat.server.formatters import json_response
from localchat.server.request_body import read_json
from localchat.server.state import Service, service_of


async def adapters(request: Request) -> Response:
    """List the adapters of the server's own model, or of the one that `?model=` names. Loads the model."""
    service = service_of(request)
    async with await service.lease(request.query_params.get("model"), request) as lease:
        return json_response(_listed(service, lease.name, lease.info))


async def set_adapters(request: Request) -> Response:
    """Set the scales of requests without a `lora` field. Adapters that the list omits get 0."""
    service = service_of(request)
    body = await read_json(request, list[AdapterScale], service.config.limits)
    scales = adapter_scales(body)
    async with await service.lease(request.query_params.get("model"), request) as lease:
        count = len(lease.info.lora)
        unknown = next((number for number, _ in scales if not 0 <= number < count), None)
        if unknown is not None:
            raise bad_request(
                f"There is no LoRA adapter {unknown}; the model was loaded with {count}.",
                param="id",
            )
        service.lora_scales[lease.name] = scales
    return json_response({"success": True})


def _listed(service: Service, name: str, info: EngineInfo) -> list[dict[str, Any]]:
    scales = {number: adapter.scale for number, adapter in enumerate(info.lora)}
    if name in service.lora_scales:
        scales = dict.fromkeys(scales, 0.0) | dict(service.lora_scales[name])
    return [
        {"id": number, "path": adapter.path, "scale": scales[number]}
        for number, adapter in enumerate(info.lora)
    ]
