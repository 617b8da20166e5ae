"""What our own doors and a running server say to each other over HTTP: the frames of the child's pipe, so
that nothing is lost between them, under a few private routes.

`POST /localchat/v1/generate` takes an AskDoor and answers with a stream of frames (Events, and Failed at the
end of one that failed); `/query` takes a QueryDoor and answers with one frame. Both bodies are msgpack.
`GET /ps` and `POST /stop` are JSON.
"""

from typing import Literal, TypeAlias

import msgspec

from localchat.engine.local import protocol
from localchat.engine.request import GenerateRequest

PREFIX = "/localchat/v1"
MEDIA_TYPE = "application/vnd.localchat"
"""A type that no page of a browser can send to another site without being asked."""


class Wish(msgspec.Struct, frozen=True, omit_defaults=True):
    """Which model, and what its user asked of the load; a default means «as it is there». `model`: the path
    as the system's bytes. Only the server's owner may choose files."""

    model: bytes
    name: str
    word: str = ""
    backend: str | None = None
    context_tokens: int | None = None
    kv_type: str | None = None
    gpu_layers: int | Literal["auto", "all"] = "auto"
    threads: int = 0
    cache_ram_bytes: int | None = None
    require_gpu: bool = False
    gpu_limit_bytes: int | None = None
    kv_limit_bytes: int | None = None
    dummy_weights: bool = False
    head_int8: bool = False


class GenerateCall(msgspec.Struct, frozen=True):
    wish: Wish
    request: GenerateRequest


Query: TypeAlias = (
    protocol.Tokenize
    | protocol.Detokenize
    | protocol.Render
    | protocol.Embed
    | protocol.GetInfo
    | protocol.GetStats
)


class QueryCall(msgspec.Struct, frozen=True):
    """`user`: who asks, for `ps`."""

    wish: Wish
    query: Query
    user: str = ""


class StopCall(msgspec.Struct, frozen=True, omit_defaults=True):
    """A model to unload; None stops the server."""

    model: str | None = None


class Stopped(msgspec.Struct, frozen=True):
    """`ended`: requests that ended with the model; None: it was not loaded."""

    ended: int | None
