"""Configuration of a server, with all limits of requests and connections."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from localchat.config.mcp_servers import McpServer

_LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Limits of requests and connections.

    Size: one field per limit.
    """

    body_bytes: int = 16 << 20
    """Size of a request body as sent, and of the text of a conversation."""
    media_body_bytes: int = 64 << 20
    """Size of a conversation's body, as sent and unpacked: pictures in base64 need room."""
    bodies_bytes: int = 256 << 20
    """Sum of all bodies in flight, without the first 256 KiB of each."""
    unpacked_bytes: int = 20 << 20
    """Size of a body after decompression."""
    depth: int = 64
    """Nesting levels of free-form JSON, such as a schema."""
    values: int = 20_000
    """Values in free-form JSON."""
    messages: int = 4096
    tools: int = 256
    tool_rounds: int = 25
    """Answers of one request whose calls the server runs."""
    stops: int = 64
    """Stop strings."""
    stop_bytes: int = 256
    """Size of a stop string."""
    biases: int = 1024
    """Tokens in `logit_bias`."""
    prompts: int = 64
    choices: int = 64
    """Answers of one request, over all its prompts."""
    inputs: int = 2048
    """Texts to embed."""
    header_s: float = 30.0
    """Time for the headers of a request to arrive."""
    body_s: float = 30.0
    """Time for the body of a request to arrive."""
    idle_s: float = 75.0
    """Time that a connection stays open without a request."""
    stall_s: float = 120.0
    """Time that a client may read almost nothing of its answer."""
    request_s: float = 3600.0
    """Time for a whole request."""
    answer_tokens: int = 32_768
    """Maximum length of an answer, whatever a client requests."""
    waiting: int = 128
    """Requests that no engine has started."""
    connections: int = 512
    probe_connections: int = 16
    """Additional connections, for `/health` and `/metrics` only."""


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Access rules, behavior and limits of a server."""

    hosts: frozenset[str] = frozenset()
    """Names allowed in the Host header, in addition to loopback's."""
    any_address: bool = False
    """Allow every IP address in the Host header. Unlike a name, an address cannot be rebound."""
    origins: tuple[str, ...] = ()
    """Allowed Origins. A `*` may replace the port or the host."""
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    """Accepted keys. An empty tuple means that no key is needed."""
    one_owner: bool = False
    """Let clients with different keys share the prefix cache, because all belong to one person."""
    alias: bool = True
    """Serve unknown model names with the server's own model."""
    loop_guard: bool = True
    """End answers that repeat themselves."""
    allow_fetch: bool = False
    """Fetch public URLs of pictures, recordings and files that requests contain."""
    mcp_servers: tuple[McpServer, ...] = ()
    """MCP servers that clients of the Responses API may use."""
    environ: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Environment of which MCP servers get a part."""
    heartbeat_s: float = 5.0
    """Seconds of silence in a stream before a comment."""
    event_s: float = 15.0
    """Seconds without an event before a heartbeat event, in protocols that have one."""
    limits: ServerLimits = ServerLimits()

    @property
    def host_names(self) -> frozenset[str]:
        """All names allowed in the Host header, in lower case; IPv6 addresses without brackets."""
        return frozenset((*_LOOPBACK, *(name.lower().strip("[]") for name in self.hosts)))
