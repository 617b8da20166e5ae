"""Addresses of this machine, and the proxy of other addresses as messages show it."""

import os
from ipaddress import IPv6Address, ip_address
from urllib.parse import urlsplit


def proxy_for(url: str) -> str | None:
    """Return the proxy of a URL and its variable, without credentials. None for a direct connection."""
    # Imported here, because `is_loopback` is used at every start and does not need it.
    from urllib.request import getproxies, proxy_bypass

    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
    except ValueError:
        # The client reports the invalid URL.
        return None
    if not host or is_loopback(host) or proxy_bypass(host):
        return None
    proxies = getproxies()
    for scheme in (parts.scheme.lower(), "all"):
        if address := proxies.get(scheme, "").strip():
            kind, _, location = address.rpartition("://")
            return f"{kind or 'http'}://{location.rpartition('@')[2]} ({_source(scheme)})"
    return None


def is_loopback(host: str) -> bool:
    """Return True if a host name or address always means this machine."""
    name = host.strip("[]").rstrip(".").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        address = ip_address(name)
    except ValueError:
        return False
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    # Users often address a server that is bound to 0.0.0.0 by this address.
    return address.is_loopback or address.is_unspecified


def _source(scheme: str) -> str:
    variables = (f"{scheme}_proxy", f"{scheme}_proxy".upper())
    return next((name for name in variables if os.environ.get(name)), "the system settings")
