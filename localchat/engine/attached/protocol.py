"""Frames between a program and a running server of the same user, over private routes.

They are the frames of the engine process's pipe, so no information is lost. `POST /localchat/v1/generate`
takes a GenerateCall and replies with a stream of frames: Events, and Failed at the end of a failed request.
`/query` takes a QueryCall and replies with one frame. Both bodies are msgpack. `GET /ps` and `POST /stop` use
JSON.
"""

import msgspec

from localchat.engine.local import protocol
from localchat.engine.request import GenerateRequest
from localchat.fit.load_options import LoadOptions

PREFIX = "/localchat/v1"
MEDIA_TYPE = "application/vnd.localchat"
"""Media type that a web page cannot send to another site without permission."""


class AttachSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """A model file and its load options. Only the server's owner may choose files."""

    model: bytes
    """Path as bytes."""
    name: str
    typed_name: str = ""
    """Name that the user typed."""
    backend: str | None = None
    load: LoadOptions = LoadOptions()
    """Load options. A default selects the option in the server's settings."""


class GenerateCall(msgspec.Struct, frozen=True):
    model: AttachSpec
    request: GenerateRequest


class QueryCall(msgspec.Struct, frozen=True):
    """A query that needs no step."""

    model: AttachSpec
    query: protocol.Query
    user: str = ""
    """Name of the client, for `ps`."""


class StopCall(msgspec.Struct, frozen=True, omit_defaults=True):
    """Request to stop the server, or to unload one model."""

    model: str | None = None
    """Model to unload. None stops the server."""


class Stopped(msgspec.Struct, frozen=True):
    """Reply to StopCall."""

    ended: int | None
    """Number of requests that ended with the model, None if it was not loaded."""
