"""ASGI application: routes, middleware and exception handlers."""

from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import BaseRoute, Route

from localchat.server.anthropic.endpoints import count_tokens, messages
from localchat.server.body_budget import BodyBudget
from localchat.server.config import ServerConfig
from localchat.server.embeddings import embeddings
from localchat.server.errors import ApiError, exception_handlers
from localchat.server.health import health, metrics, props, root, slots
from localchat.server.leases import AsyncEnginePool
from localchat.server.llamacpp.endpoints import adapters, completion, infill
from localchat.server.middleware.access_log import AccessLogMiddleware
from localchat.server.middleware.security import SecurityMiddleware
from localchat.server.ollama import answers as ollama
from localchat.server.ollama.endpoints import CHANGING, running, show, tags, unsupported, version
from localchat.server.openai.chat import chat
from localchat.server.openai.completions import completions
from localchat.server.openai.models import model, models
from localchat.server.openai_responses.endpoints import responses
from localchat.server.state import Service
from localchat.server.tokenize import (
    apply_template,
    chat_input_tokens,
    detokenize,
    responses_input_tokens,
    tokenize,
    tokenizer_info,
)

_GET = ["GET"]
_POST = ["POST"]

ROUTES = (
    Route("/chat/completions", chat, methods=_POST),
    Route("/chat/completions/input_tokens", chat_input_tokens, methods=_POST),
    Route("/completions", completions, methods=_POST),
    Route("/messages", messages, methods=_POST),
    Route("/messages/count_tokens", count_tokens, methods=_POST),
    Route("/responses", responses, methods=_POST),
    Route("/responses/input_tokens", responses_input_tokens, methods=_POST),
    Route("/infill", infill, methods=_POST),
    Route("/completion", completion, methods=_POST),
    Route("/embeddings", embeddings, methods=_POST),
    Route("/lora-adapters", adapters, methods=_GET),
    Route("/models", models, methods=_GET),
    Route("/models/{id:path}", model, methods=_GET),
    Route("/tokenize", tokenize, methods=_POST),
    Route("/detokenize", detokenize, methods=_POST),
    Route("/tokenizer_info", tokenizer_info, methods=_GET),
    Route("/apply-template", apply_template, methods=_POST),
    Route("/slots", slots, methods=_GET),
    Route("/props", props, methods=_GET),
    Route("/health", health, methods=_GET),
    Route("/metrics", metrics, methods=_GET),
    Route("/api/version", version, methods=_GET),
    Route("/api/tags", tags, methods=_GET),
    Route("/api/ps", running, methods=_GET),
    Route("/api/show", show, methods=_POST),
    Route("/api/chat", ollama.chat, methods=_POST),
    Route("/api/generate", ollama.generate, methods=_POST),
    Route("/api/embed", ollama.embeddings, methods=_POST),
    Route("/api/embeddings", ollama.embeddings, methods=_POST),
    *(
        Route(f"/api/{verb}{{rest:path}}", unsupported, methods=[*_GET, *_POST, "PUT", "DELETE"])
        for verb in CHANGING
    ),
    Route("/", root, methods=_GET),
)
"""Paths as the AccessLogMiddleware leaves them: without `/v1`."""


def create_app(
    engines: AsyncEnginePool,
    config: ServerConfig,
    private: Sequence[BaseRoute] = (),
) -> Starlette:
    """Create the application. Its `state.service` is a Service.

    private: routes under security.PRIVATE, which check a token of their own instead of an API key.
    """
    service = Service(engines, config)

    def count(error: ApiError) -> None:
        service.metrics.count_error(error.label, error.status)

    app = Starlette(
        routes=[*ROUTES, *private],
        # The access log comes first, so that it also logs the requests that the second rejects.
        middleware=[
            Middleware(AccessLogMiddleware),
            Middleware(SecurityMiddleware, config=config, on_refused=count),
        ],
        exception_handlers=exception_handlers(count),
    )
    # The AccessLogMiddleware normalizes slashes, so that no redirect is needed.
    app.router.redirect_slashes = False
    app.state.service = service
    app.state.bodies = BodyBudget(config.limits.bodies_bytes)
    return app
