"""What the routes share: the engines, the limits, the requests under way, the figures."""

import hashlib

from starlette.requests import Request

from localchat.engine.interface import EngineInfo
from localchat.errors import LocalchatError, ModelMissing, UsageError
from localchat.sanitize import sanitize_line
from localchat.server.config import ServerConfig
from localchat.server.errors import model_not_found, to_api_error
from localchat.server.leases import AsyncEnginePool, AsyncLease
from localchat.server.metrics import Metrics
from localchat.server.openai.requests import Client
from localchat.server.tracker import RequestTracker

_LONGEST_NAME = 200
_AGENT = 120


class Service:
    """One for each application; found by the routes as `request.app.state.service`."""

    def __init__(self, engines: AsyncEnginePool, config: ServerConfig) -> None:
        self.engines = engines
        self.config = config
        self.tracker = RequestTracker(config.limits.waiting)
        self.metrics = Metrics(self.tracker)
        self.ready = True
        """Whether the server's own model can answer; who loads it at the start says when."""

    async def lease(self, model: str | None, request: Request) -> AsyncLease:
        """The engine that a request means. An unknown name means the server's own model, unless that is
        turned off; what looks like a path is never looked up. Raises ApiError."""
        word = model or ""
        user = agent(request)
        if _is_name(word):
            try:
                return await self.engines.lease(word, user=user)
            except (ModelMissing, UsageError) as error:
                if not self.config.alias or not word:
                    raise model_not_found(word) from error
            except LocalchatError as error:
                raise to_api_error(error) from error
        elif not self.config.alias:
            raise model_not_found(word)
        try:
            return await self.engines.lease("", user=user)
        except LocalchatError as error:
            raise to_api_error(error) from error


def service_of(request: Request) -> Service:
    found = request.app.state.service
    assert isinstance(found, Service)
    return found


def agent(request: Request) -> str:
    """What the client calls itself, fit for a line of the log."""
    return sanitize_line(request.headers.get("user-agent", ""))[:_AGENT]


def client_of(request: Request) -> Client:
    """Who sends a request. Clients with different keys share no cache; without keys all do."""
    key: str = request.scope.get("localchat.key", "")
    salt = hashlib.sha256(key.encode()).hexdigest()[:16] if key else ""
    return Client(salt, agent(request))


def fingerprint(info: EngineInfo) -> str:
    return f"fp_{info.fingerprint}"


def _is_name(word: str) -> bool:
    if len(word) > _LONGEST_NAME or "\\" in word or ".." in word:
        return False
    return not word.startswith(("/", ".", "~")) and not word.lower().endswith(".gguf")
