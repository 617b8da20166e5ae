"""Fetching for clients: private addresses, redirects, sizes and changed DNS answers."""

import contextlib
import http.server
import ipaddress
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import pytest

from localchat.documents import public_fetch
from localchat.documents.public_fetch import fetch_public, is_public
from localchat.errors import UsageError

LARGE = b"x" * 50_000


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        match self.path:
            case "/redirect-inside":
                self.send_response(302)
                self.send_header("location", "http://10.1.2.3/secret")
                self.end_headers()
            case "/redirect-file":
                self.send_response(302)
                self.send_header("location", "file:///etc/passwd")
                self.end_headers()
            case "/loop":
                self.send_response(302)
                self.send_header("location", "/loop")
                self.end_headers()
            case "/large":
                self._reply(LARGE)
            case "/slow":
                self.send_response(200)
                self.end_headers()
                for _ in range(100):
                    self.wfile.write(b"x")
                    self.wfile.flush()
                    time.sleep(0.05)
            case "/host":
                self._reply(self.headers["host"].encode())
            case "/missing":
                self.send_error(404)
            case _:
                self._reply(b"picture")

    def _reply(self, body: bytes) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The base of a server at example.test, whose loopback address counts as public."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        port = running.server_address[1]
        threading.Thread(target=running.serve_forever, args=(0.02,), daemon=True).start()
        real: Callable[..., Any] = socket.getaddrinfo

        def resolve(host: str, *rest: Any, **options: Any) -> Any:
            return real("127.0.0.1" if host == "example.test" else host, *rest, **options)

        monkeypatch.setattr(socket, "getaddrinfo", resolve)
        monkeypatch.setattr(
            public_fetch,
            "is_public",
            lambda address: str(address) == "127.0.0.1" or is_public(address),
        )
        yield f"http://example.test:{port}"
        running.shutdown()


def fetched(url: str, max_bytes: int = 1000, seconds: float = 30.0) -> bytes:
    return fetch_public(url, max_bytes, time.monotonic() + seconds)


def test_the_connection_goes_to_the_checked_address_with_the_name_of_the_host(server: str) -> None:
    assert fetched(f"{server}/a.png") == b"picture"
    assert fetched(f"{server}/host") == server.removeprefix("http://").encode()


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("/redirect-inside", "private address"),
        ("/redirect-file", "not http or https"),
        ("/loop", "redirects more than 3 times"),
        ("/large", "has more than 1.0 kB"),
        ("/missing", "returned status 404"),
    ],
)
def test_what_is_not_fetched(server: str, path: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        fetched(f"{server}{path}")


def test_a_slow_server_is_given_up(server: str) -> None:
    with pytest.raises(UsageError, match=r"in time|cannot be fetched"):
        fetched(f"{server}/slow", seconds=0.3)


def test_one_private_address_among_public_ones_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [(0, 0, 0, "", (address, 80)) for address in ("8.8.8.8", "10.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answers)
    with pytest.raises(UsageError, match="private address"):
        fetched("http://example.org/")


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("8.8.8.8", True),
        ("2606:4700::1111", True),
        ("127.0.0.1", False),
        ("10.0.0.1", False),
        ("100.64.0.1", False),
        ("169.254.169.254", False),
        ("192.168.1.1", False),
        ("0.0.0.0", False),
        ("224.0.0.1", False),
        ("255.255.255.255", False),
        ("::1", False),
        ("::", False),
        ("fe80::1", False),
        ("fd00::1", False),
        ("::ffff:10.0.0.1", False),
        ("::127.0.0.1", False),
        ("64:ff9b::7f00:1", False),
        ("64:ff9b::808:808", True),
        ("2002:7f00:1::", False),
        ("2001:0:1::1", False),
    ],
)
def test_public_addresses(address: str, public: bool) -> None:
    assert is_public(ipaddress.ip_address(address)) is public


def test_a_name_that_becomes_private_after_the_check_is_not_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = iter(["203.0.113.1", "127.0.0.1"])
    names: list[str] = []

    def resolve(host: str, *_: Any, **__: Any) -> Any:
        names.append(host)
        return [(0, 0, 0, "", (next(answers), 80))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(public_fetch, "is_public", lambda address: True)
    client = httpx2.Client(transport=httpx2.HTTPTransport(retries=0), trust_env=False)
    request = public_fetch._pinned_request(
        client, httpx2.URL("http://rebinding.test/a.png"), "it", time.monotonic() + 30
    )
    assert names == ["rebinding.test"]
    assert (request.url.host, request.headers["host"]) == ("203.0.113.1", "rebinding.test")


def test_a_name_without_an_address_is_a_sentence() -> None:
    with contextlib.suppress(AttributeError), pytest.raises(UsageError, match="has no address"):
        fetched("http://no-such-host.invalid/")
