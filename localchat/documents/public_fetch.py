"""Fetches public URLs for clients and models.

Never from this machine or its network, whatever a name resolves to.
"""

import ipaddress
import socket
import time
from typing import Final
from urllib.parse import urljoin

import httpx2

from localchat.errors import UsageError
from localchat.units import size

_MAX_REDIRECTS: Final = 3
_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
_NAT64: Final = ipaddress.ip_network("64:ff9b::/96")
_IPV6_INTERNET: Final = ipaddress.ip_network("2000::/3")
_SILENCE_S: Final = 5.0

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


def fetch_public(url: str, max_bytes: int, deadline_s: float) -> bytes:
    """Download a URL. Raises UsageError, which starts with the URL.

    Each redirect is checked like the URL itself. The connection goes to the address that was checked, so a
    second DNS answer cannot change it. Proxies are not used, because a proxy would resolve the name itself.

    deadline_s: time.monotonic at which to give up.
    """
    shown = url[:200]
    with httpx2.Client(transport=httpx2.HTTPTransport(retries=0), trust_env=False) as client:
        for _ in range(_MAX_REDIRECTS + 1):
            try:
                target = httpx2.URL(url)
                request = _pinned_request(client, target, shown, deadline_s)
                location, data = _send(client, request, shown, max_bytes, deadline_s)
            except (httpx2.HTTPError, httpx2.InvalidURL, ValueError) as problem:
                raise UsageError(
                    f"{shown} cannot be fetched: {type(problem).__name__}",
                    hint="send the content as a data URL or base64",
                ) from problem
            if location is None:
                return data
            url = urljoin(url, location)
    raise UsageError(f"{shown} redirects more than {_MAX_REDIRECTS} times")


def _pinned_request(
    client: httpx2.Client, url: httpx2.URL, shown: str, deadline_s: float
) -> httpx2.Request:
    """Return a request to the checked address of the host, with the host's name in headers and TLS."""
    if url.scheme not in ("http", "https") or not url.host:
        raise UsageError(f"{shown} leads to an address that is not http or https")
    address = _public_address(url.host, url.port or 0, shown)
    timeout_s = min(_SILENCE_S, _remaining(deadline_s, shown))
    extensions = {
        "sni_hostname": url.host,
        "timeout": dict.fromkeys(("connect", "read", "write", "pool"), timeout_s),
    }
    headers = {
        "host": url.netloc.decode("ascii").rpartition("@")[2],
        "user-agent": "localchat",
        "accept-encoding": "identity",
    }
    # No user name, password or fragment of the URL is sent.
    pinned = url.copy_with(host=str(address), username=None, password=None, fragment=None)
    return client.build_request("GET", pinned, headers=headers, extensions=extensions)


def _send(
    client: httpx2.Client, request: httpx2.Request, shown: str, max_bytes: int, deadline_s: float
) -> tuple[str | None, bytes]:
    """Return the target of a redirect, or None and the body."""
    response = client.send(request, stream=True)
    try:
        if response.status_code in _REDIRECTS and "location" in response.headers:
            return response.headers["location"], b""
        if response.status_code != 200:
            raise UsageError(f"{shown} returned status {response.status_code}")
        if response.headers.get("content-encoding", "identity") != "identity":
            raise UsageError(
                f"{shown} is compressed, although the request asked for the plain file"
            )
        data = bytearray()
        for piece in response.iter_raw():
            data += piece
            if len(data) > max_bytes:
                raise UsageError(f"{shown} has more than {size(max_bytes)}")
            _remaining(deadline_s, shown)
        return None, bytes(data)
    finally:
        response.close()


def _remaining(deadline_s: float, shown: str) -> float:
    remaining_s = deadline_s - time.monotonic()
    if remaining_s <= 0:
        raise UsageError(f"{shown} could not be fetched in time")
    return remaining_s


def _public_address(host: str, port: int, shown: str) -> IpAddress:
    """Resolve a host. Raises UsageError if any of its addresses is not public."""
    try:
        answers = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as problem:
        raise UsageError(f"{shown} cannot be fetched: its host has no address") from problem
    addresses = [ipaddress.ip_address(str(answer[4][0]).partition("%")[0]) for answer in answers]
    # One private address among public ones shows that somebody tries.
    if not addresses or not all(map(is_public, addresses)):
        raise UsageError(
            f"{shown} leads to a private address, which is never fetched here",
            hint="send the content as a data URL or base64",
        )
    return addresses[0]


def is_public(address: IpAddress) -> bool:
    """Return True for an address of the internet, also behind IPv6 forms that contain IPv4."""
    if isinstance(address, ipaddress.IPv6Address):
        embedded = address.ipv4_mapped or address.sixtofour
        if address in _NAT64:
            embedded = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if embedded is not None:
            return is_public(embedded)
        if address not in _IPV6_INTERNET or address.teredo is not None:
            return False
    return address.is_global and not address.is_multicast and not address.is_reserved
