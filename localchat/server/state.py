"""The state that all routes share: engine pool, configuration, request tracker, metrics."""

import hashlib
from pathlib import Path

from starlette.requests import Request

from localchat.engine.interface import EngineInfo
from localchat.errors import LocalchatError, ModelMissing, UsageError
from localchat.sanitize import sanitize_line
from localchat.server.chat.options import Client
from localchat.server.config import ServerConfig
from localchat.server.errors import model_not_found, to_api_error
from localchat.server.leases import AsyncEnginePool, AsyncLease
from localchat.server.metrics import Metrics
from localchat.server.tracker import RequestTracker

_MAX_NAME = 200
_MAX_USER_AGENT = 120


class Service:
    """State of one application. Routes get it from `service_of`."""

    def __init__(self, engines: AsyncEnginePool, config: ServerConfig) -> None:
        self.engines = engines
        self.config = config
        # Imported late, like all tools.
        from localchat.tools.mcp_servers import McpServers

        self.mcp = McpServers(config.mcp_servers, config.environ, Path())
        """MCP servers that the operator offers. A request chooses among them, and never names another one."""
        self.tracker = RequestTracker(config.limits.waiting)
        self.metrics = Metrics(self.tracker)
        self.ready = True
        """False while the server's own model loads at the start."""

    async def lease(self, model: str | None, request: Request) -> AsyncLease:
        """Lease the engine for a request. Raises ApiError.

        An unknown name means the server's own model, unless the configuration forbids it. A name that looks
        like a path is never looked up.
        """
        name = model or ""
        user = user_agent(request)
        if _is_model_name(name):
            try:
                return await self.engines.lease(name, user=user)
            except (ModelMissing, UsageError) as error:
                if name and not self.config.alias:
                    raise model_not_found(name) from error
            except LocalchatError as error:
                raise to_api_error(error) from error
        elif not self.config.alias:
            raise model_not_found(name)
        try:
            return await self.engines.lease("", user=user)
        except LocalchatError as error:
            raise to_api_error(error) from error


def service_of(request: Request) -> Service:
    """Return the Service of the application that received the request."""
    service = request.app.state.service
    assert isinstance(service, Service)
    return service


def user_agent(request: Request) -> str:
    """Return the User-Agent header, safe to print in a log line."""
    return sanitize_line(request.headers.get("user-agent", ""))[:_MAX_USER_AGENT]


def client_of(request: Request) -> Client:
    """Return the client of a request. Each API key has a prefix cache of its own."""
    key: str = request.scope.get("localchat.key", "")
    if service_of(request).config.one_owner:
        return Client("", user_agent(request))
    salt = hashlib.sha256(key.encode()).hexdigest()[:16] if key else ""
    return Client(salt, user_agent(request))


def fingerprint(info: EngineInfo) -> str:
    """Return the `system_fingerprint` of OpenAI's API."""
    return f"fp_{info.fingerprint}"


def _is_model_name(name: str) -> bool:
    if len(name) > _MAX_NAME or "\\" in name or ".." in name:
        return False
    return not name.startswith(("/", ".", "~")) and not name.lower().endswith(".gguf")
