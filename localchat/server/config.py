"""What a server is told once, at its start. Every limit of a request stands here."""

from dataclasses import dataclass, field
from typing import Final

_LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """What one client can cost. Sizes in bytes, times in seconds.

    body_bytes: of a body as it is sent. unpacked_bytes: of one that was compressed. depth, values: of JSON
    that a client is free to shape, such as a schema. header_s: until the headers of a request are whole.
    body_s: until its body is. idle_s: a connection without a request. stall_s: a client that takes nothing of
    what is sent to it. request_s: a request in all. answer_tokens: the longest answer, whatever is asked for.
    waiting: requests that no engine has begun.
    """

    body_bytes: int = 16 << 20
    unpacked_bytes: int = 20 << 20
    depth: int = 64
    values: int = 20_000
    messages: int = 4096
    tools: int = 256
    stops: int = 64
    stop_bytes: int = 256
    biases: int = 1024
    prompts: int = 64
    choices: int = 64
    inputs: int = 2048
    header_s: float = 30.0
    body_s: float = 30.0
    idle_s: float = 75.0
    stall_s: float = 120.0
    request_s: float = 3600.0
    answer_tokens: int = 32_768
    waiting: int = 128
    connections: int = 512


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """hosts: names that the Host header may have besides loopback's. any_address: also every IP address
    (a server bound to all of them; an address cannot be rebound as a name can). origins: Origins that may
    ask, exact or with a `*` in place of the port or the host. api_keys: none, and everybody may ask.
    alias: an unknown model name means the server's own model. heartbeat_s: silence before a sign of life;
    event_s: before one that is an event, where the protocol has such.
    """

    hosts: frozenset[str] = frozenset()
    any_address: bool = False
    origins: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    alias: bool = True
    loop_guard: bool = True
    heartbeat_s: float = 5.0
    event_s: float = 15.0
    limits: ServerLimits = ServerLimits()

    @property
    def host_names(self) -> frozenset[str]:
        """Every name that a Host header may have, in small letters, addresses of IPv6 without brackets."""
        return frozenset((*_LOOPBACK, *(name.lower().strip("[]") for name in self.hosts)))
