"""Paths of requests: their normal form, and the protocol that they belong to."""

import re
from typing import Final

from starlette.types import Scope

_AUTHORITY: Final = re.compile("https?://[^/]*", re.IGNORECASE)
_SLASHES: Final = re.compile("/{2,}")
_OPENAI: Final = ("/chat/completions", "/completions", "/responses", "/embeddings")


def normalize_path(path: str) -> str:
    """Remove `/v1`, doubled slashes and a slash at the end, as the routes expect.

    Clients that know this server as a proxy send a whole URL (RFC 9112, 3.2.2). Its path counts.
    """
    if match := _AUTHORITY.match(path):
        path = path[match.end() :]
    path = _SLASHES.sub("/", path)
    while path == "/v1" or path.startswith("/v1/"):
        path = path[3:]
    return path.rstrip("/") or "/"


def is_anthropic(scope: Scope) -> bool:
    """Return True for a request to Anthropic's API.

    The path decides. If it belongs to no protocol, the version header that all clients of Anthropic send does.
    """
    path = normalize_path(scope["path"])
    if path == "/messages" or path.startswith("/messages/"):
        return True
    if path in _OPENAI:
        return False
    return any(name == b"anthropic-version" for name, _ in scope["headers"])


def is_ollama(path: str) -> bool:
    """Return True for a path of Ollama's API."""
    return normalize_path(path).startswith("/api/")


def request_id(scope: Scope) -> str:
    """Return the id that the AccessLogMiddleware gave to a request; empty outside of it."""
    id_: str = scope.get("localchat.id", "")
    return id_
