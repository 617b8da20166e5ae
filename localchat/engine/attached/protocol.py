"""Frames between a program and a running server of the same user, over private routes.

They are the frames of the engine process's pipe, so nothing is lost in between. `POST
/localchat/v1/generate` takes a GenerateCall and answers with a stream of frames (Events, and Failed at the
end of one that failed); `/query` takes a QueryCall and answers with one frame. Both bodies are msgpack. `GET
/ps` and `POST /stop` are JSON.
"""

from typing import TypeAlias

import msgspec

from localchat.engine.local import protocol
from localchat.engine.request import GenerateRequest
from localchat.fit.load_options import LoadOptions

PREFIX = "/localchat/v1"
MEDIA_TYPE = "application/vnd.localchat"
"""A type that no page of a browser can send to another site without permission."""


class AttachSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """A model file, and what its user asked of the load. Only the server's owner may choose files."""

    model: bytes
    """The path as the system's bytes."""
    name: str
    word: str = ""
    """What the user typed for the model."""
    backend: str | None = None
    load: LoadOptions = LoadOptions()
    """A default means the option as the server's settings have it."""


class GenerateCall(msgspec.Struct, frozen=True):
    model: AttachSpec
    request: GenerateRequest


Query: TypeAlias = (
    protocol.Tokenize
    | protocol.Detokenize
    | protocol.Render
    | protocol.PromptTokens
    | protocol.Embed
    | protocol.GetInfo
    | protocol.GetStats
)


class QueryCall(msgspec.Struct, frozen=True):
    """A question that needs no step."""

    model: AttachSpec
    query: Query
    user: str = ""
    """Who asks, for `ps`."""


class StopCall(msgspec.Struct, frozen=True, omit_defaults=True):
    """Stops the server, or unloads one model."""

    model: str | None = None
    """The model to unload; None stops the server."""


class Stopped(msgspec.Struct, frozen=True):
    """Answer to StopCall."""

    ended: int | None
    """Requests that ended with the model; None: it was not loaded."""
