"""Chooses the proxy for a URL from the environment, never for addresses of this machine.

HTTP clients apply `HTTP_PROXY` and similar variables to every address. A proxy would receive requests for
`127.0.0.1`, which means the proxy itself there.
"""

import os
import re
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import Final, NamedTuple
from urllib.parse import urlsplit, urlunsplit

from localchat.errors import UsageError

_SCHEMES: Final = ("http", "https", "socks5", "socks5h")
_SHORT_ADDRESS: Final = re.compile(r"[\d.]+|0[xX][\da-fA-F]+")
_SAME_AS: Final = {"socks": "socks5"}
"""Other names of schemes. GNOME and KDE write `socks://` for a SOCKS 5 proxy."""


class Proxy(NamedTuple):
    """A proxy and the source of its address."""

    url: str
    """Address, including credentials."""
    source: str
    """Variable that contains the address, or "the system settings"."""

    def __str__(self) -> str:
        """Return the address without credentials, and its source."""
        parts = urlsplit(self.url)
        address = urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], "", "", ""))
        return f"{address} ({self.source})"


def proxy_for(url: str) -> Proxy | None:
    """Return the proxy for a URL, None for a direct connection. Raises UsageError for an invalid proxy."""
    # Imported here, because `is_loopback` is used at every start and does not need it.
    from urllib.request import getproxies, proxy_bypass

    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
        port = parts.port
    except ValueError:
        # The client reports the invalid URL.
        return None
    if not host or is_loopback(host):
        return None
    proxies = getproxies()
    if _bypassed(host, port, proxies.get("no", "")) or proxy_bypass(host):
        return None
    for scheme in (parts.scheme.lower(), "all"):
        if address := proxies.get(scheme, "").strip():
            return _checked(address, _source(scheme))
    return None


def is_loopback(host: str) -> bool:
    """Return True if a host name or address always means this machine."""
    name = host.strip("[]").rstrip(".").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    address = _address(name)
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    # Users often address a server that is bound to 0.0.0.0 by this address.
    return address is not None and (address.is_loopback or address.is_unspecified)


def _address(host: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(host)
    except ValueError:
        pass
    if not _SHORT_ADDRESS.fullmatch(host):
        return None
    # Systems read short forms such as 127.1 too.
    import socket

    try:
        return IPv4Address(socket.inet_aton(host))
    except OSError:
        return None


def _bypassed(host: str, port: int | None, no_proxy: str) -> bool:
    """Return True if NO_PROXY lists the host: its name, a parent domain, its address or its network."""
    address = _address(host)
    for entry in no_proxy.lower().replace(" ", ",").split(","):
        name = entry.removeprefix("*.").lstrip(".").strip("[]")
        if entry == "*" or (name and (host == name or host.endswith(f".{name}"))):
            return True
        if port is not None and entry == f"{host}:{port}":
            return True
        if address is not None and "/" in entry and _contains(entry, address):
            return True
    return False


def _contains(network: str, address: IPv4Address | IPv6Address) -> bool:
    try:
        return address in ip_network(network, strict=False)
    except ValueError:
        return False


def _source(scheme: str) -> str:
    variables = (f"{scheme}_proxy", f"{scheme}_proxy".upper())
    return next((name for name in variables if os.environ.get(name)), "the system settings")


def _checked(address: str, source: str) -> Proxy:
    """Return the proxy at this address. Raises UsageError unless HTTP clients can use it."""
    scheme, separator, location = address.partition("://")
    if not separator:
        scheme = "http"
        location = address
    scheme = _SAME_AS.get(scheme.lower(), scheme.lower())
    proxy = Proxy(f"{scheme}://{location}", source)
    try:
        parts = urlsplit(proxy.url)
        is_valid = scheme in _SCHEMES and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_valid = False
    if not is_valid:
        raise UsageError(
            f"{source} is not the address of a proxy: {location.rpartition('@')[2]!r:.80}",
            hint=f"use {', '.join(f'{scheme}://' for scheme in _SCHEMES)} with a host and a port, "
            f"or unset {source}",
        )
    return proxy
