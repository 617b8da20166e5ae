"""Choice of a proxy: loopback never has one, and NO_PROXY is read as other programs read it."""

import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx2
import pytest

from localchat.engine.remote.client import RemoteClient
from localchat.errors import NetworkError, UsageError
from localchat.http_transport import query_client
from localchat.proxies import is_loopback, proxy_for

CLOSED = "127.0.0.1:9"


@pytest.fixture(autouse=True)
def _no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for scheme in ("http", "https", "all", "no"):
        monkeypatch.delenv(f"{scheme}_proxy", raising=False)
        monkeypatch.delenv(f"{scheme}_PROXY".upper(), raising=False)


@pytest.fixture
def local_url() -> Iterator[str]:
    """A server of this machine that answers every GET with one JSON object."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = b'{"data": []}'
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LOCALHOST.",
        "a.localhost",
        "127.0.0.1",
        "127.8.9.1",
        "::1",
        "[::1]",
        "0.0.0.0",
        "::ffff:127.0.0.1",
        "127.1",
        "0x7f000001",
    ],
)
def test_loopback_hosts(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize(
    "host", ["example.org", "128.0.0.1", "localhost.example.org", "", "::2", "10.1", "1.2.3.4.5"]
)
def test_other_hosts_are_not_loopback(host: str) -> None:
    assert not is_loopback(host)


def test_loopback_is_never_proxied(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(variable, f"socks5h://{CLOSED}")
    for host in ("127.0.0.1:1", "localhost", "[::1]:8"):
        assert proxy_for(f"http://{host}/v1") is None


def test_proxy_of_the_scheme_comes_before_the_general_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", "socks5h://general:1")
    monkeypatch.setenv("HTTPS_PROXY", "name:secret@web:2")
    proxy = proxy_for("https://example.org")
    assert proxy is not None
    assert proxy.url == "http://name:secret@web:2"
    assert str(proxy) == "http://web:2 (HTTPS_PROXY)"
    assert str(proxy_for("http://example.org")) == "socks5h://general:1 (ALL_PROXY)"


def test_socks_without_a_version_is_version_5(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", "socks://here:1")
    assert str(proxy_for("http://example.org")) == "socks5://here:1 (ALL_PROXY)"


@pytest.mark.parametrize(
    "entry", ["example.org", ".example.org", "*.example.org", "a, b.example.org", "*"]
)
def test_no_proxy_lists_hosts_and_domains(monkeypatch: pytest.MonkeyPatch, entry: str) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://web:2")
    monkeypatch.setenv("NO_PROXY", entry)
    assert proxy_for("http://b.example.org") is None
    assert (proxy_for("http://badexample.org") is None) == (entry == "*")


@pytest.mark.parametrize("entry", ["10.0.0.0/8", "10.1.2.3", "10.1.2.3:80", "[fd00::1],10.1.2.3"])
def test_no_proxy_lists_addresses_and_networks(monkeypatch: pytest.MonkeyPatch, entry: str) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://web:2")
    monkeypatch.setenv("NO_PROXY", entry)
    assert proxy_for("http://10.1.2.3:80") is None
    assert proxy_for("http://11.1.2.3:80") is not None


def list_models(url: str) -> dict[str, Any]:
    client = RemoteClient(url, "", 5)
    try:
        return client.request_json("models")
    finally:
        client.close()


@pytest.mark.parametrize("address", ["gopher://x:1", "http://", "http://x:port", "socks4://x:1"])
def test_invalid_proxy_names_its_variable(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setenv("HTTP_PROXY", address)
    with pytest.raises(UsageError, match="HTTP_PROXY is not the address of a proxy"):
        list_models("http://example.org")


@pytest.mark.parametrize("scheme", ["http", "socks5", "socks5h"])
def test_local_server_answers_in_spite_of_a_proxy(
    monkeypatch: pytest.MonkeyPatch, local_url: str, scheme: str
) -> None:
    for variable in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(variable, f"{scheme}://{CLOSED}")
    assert list_models(local_url) == {"data": []}
    with query_client() as queries:
        assert queries.get(f"{local_url}/health").status_code == httpx2.codes.OK


@pytest.mark.parametrize("scheme", ["http", "socks5h"])
def test_message_names_a_proxy_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    monkeypatch.setenv("ALL_PROXY", f"{scheme}://name:secret@{CLOSED}")
    with pytest.raises(NetworkError) as caught:
        list_models("http://example.org")
    shown = f"cannot reach http://example.org through the proxy {scheme}://{CLOSED} (ALL_PROXY)"
    assert caught.value.message.startswith(shown)
    assert "secret" not in caught.value.message


def test_proxy_receives_requests_for_other_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{listener.getsockname()[1]}")
        requests: list[bytes] = []

        def answer() -> None:
            connection = listener.accept()[0]
            requests.append(connection.recv(4096))
            connection.sendall(
                b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}"
            )
            connection.close()

        thread = threading.Thread(target=answer)
        thread.start()
        assert list_models("http://example.invalid") == {}
        thread.join()
    assert requests[0].startswith(b"GET http://example.invalid/")
