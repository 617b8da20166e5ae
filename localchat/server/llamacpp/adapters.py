"""GET /lora-adapters: llama.cpp's route that lists LoRA adapters."""

from starlette.requests import Request
from starlette.responses import Response

from localchat.server.formatters import json_response
from localchat.server.state import service_of


async def adapters(request: Request) -> Response:
    """List the adapters of the server's own model, or of the one that `?model=` names. Loads the model."""
    service = service_of(request)
    async with await service.lease(request.query_params.get("model"), request) as lease:
        listed = [
            {"id": number, "path": adapter.path, "scale": adapter.scale}
            for number, adapter in enumerate(lease.info.lora)
        ]
    return json_response(listed)
