"""Configuration of a server, including every limit of a request."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

_LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Limits of requests and connections."""

    body_bytes: int = 16 << 20
    """Of a body as it is sent."""
    bodies_bytes: int = 256 << 20
    """Sum of all bodies that are being read, without the first 256 KiB of each."""
    unpacked_bytes: int = 20 << 20
    """Of a body after decompression."""
    depth: int = 64
    """Nesting of free-form JSON, such as a schema."""
    values: int = 20_000
    """Values in free-form JSON."""
    messages: int = 4096
    tools: int = 256
    stops: int = 64
    """Stop strings."""
    stop_bytes: int = 256
    """Of one stop string."""
    biases: int = 1024
    """Tokens in `logit_bias`."""
    prompts: int = 64
    choices: int = 64
    """Answers of one request, over all its prompts."""
    inputs: int = 2048
    """Texts to embed."""
    header_s: float = 30.0
    """Until the headers of a request have arrived."""
    body_s: float = 30.0
    """Until the body of a request has arrived."""
    idle_s: float = 75.0
    """A connection without a request."""
    stall_s: float = 120.0
    """A client that reads nothing, or next to nothing, of what is sent to it."""
    request_s: float = 3600.0
    """A whole request."""
    answer_tokens: int = 32_768
    """The longest answer, whatever a client asks for."""
    waiting: int = 128
    """Requests that no engine has started."""
    connections: int = 512
    probe_connections: int = 16
    """Beyond these, for `/health` and `/metrics` alone."""


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Access rules, behaviour and limits of a server."""

    hosts: frozenset[str] = frozenset()
    """Names allowed in the Host header, besides loopback's."""
    any_address: bool = False
    """Allow every IP address in the Host header, for a server bound to all of them: unlike a name, an address
    cannot be rebound."""
    origins: tuple[str, ...] = ()
    """Allowed Origins, exact or with a `*` in place of the port or the host."""
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    """Empty: no key is needed."""
    alias: bool = True
    """An unknown model name means the server's own model."""
    loop_guard: bool = True
    """End answers that repeat themselves."""
    documents: tuple[str, ...] = ()
    """Learned documents that clients may ask, as MODEL@NAME."""
    documents_folder: Path | None = None
    """Where those are."""
    heartbeat_s: float = 5.0
    """Silence in a stream before a comment."""
    event_s: float = 15.0
    """Time without an event before a heartbeat event, in protocols that have one."""
    limits: ServerLimits = ServerLimits()

    @property
    def host_names(self) -> frozenset[str]:
        """Every name allowed in the Host header, in lower case; IPv6 addresses without brackets."""
        return frozenset((*_LOOPBACK, *(name.lower().strip("[]") for name in self.hosts)))
