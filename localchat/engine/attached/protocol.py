"""What our own doors and a running server say to each other over HTTP: the frames of the child's pipe, so
that nothing is lost between them, under a few private routes.

`POST /localchat/v1/generate` takes an AskDoor and answers with a stream of frames (Events, and Failed at the
end of one that failed); `/query` takes a QueryDoor and answers with one frame. Both bodies are msgpack.
`GET /ps` and `POST /stop` are JSON.
"""

from typing import TypeAlias

import msgspec

from localchat.engine.local import protocol
from localchat.engine.request import GenerateRequest
from localchat.fit.load_options import LoadOptions

PREFIX = "/localchat/v1"
MEDIA_TYPE = "application/vnd.localchat"
"""A type that no page of a browser can send to another site without being asked."""


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
    | protocol.Embed
    | protocol.GetInfo
    | protocol.GetStats
)


class QueryCall(msgspec.Struct, frozen=True):
    """`user`: who asks, for `ps`."""

    model: AttachSpec
    query: Query
    user: str = ""


class StopCall(msgspec.Struct, frozen=True, omit_defaults=True):
    """A model to unload; None stops the server."""

    model: str | None = None


class Stopped(msgspec.Struct, frozen=True):
    """`ended`: requests that ended with the model; None: it was not loaded."""

    ended: int | None
