"""Access to the server: host names, pages of other sites, keys."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from localchat.errors import FileMissing, UsageError
from localchat.server.config import ServerConfig
from localchat.server.fields import HEADER
from localchat.server.generation_response import SCHEMA_RELAXED
from localchat.server.middleware.security import checked_names, checked_origins, read_keys
from localchat.server.ollama.requests import CONTEXT_TOKENS
from tests.support.http_server import Reply, Stage, Wire, ask, serving

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "x"}]}
KEY = "sk-0123456789"


@pytest.fixture(scope="module")
def open_stage() -> Iterator[Stage]:
    """A server with more names and pages that may ask."""
    config = ServerConfig(
        hosts=frozenset({"box.lan", "192.168.1.5"}),
        origins=("http://localhost:*", "vscode-webview://*", "https://app.example.org"),
    )
    with serving(config) as running:
        yield running


@pytest.fixture(scope="module")
def locked() -> Iterator[Stage]:
    """A server that wants a key."""
    with serving(ServerConfig(api_keys=(KEY, "another-key"))) as running:
        yield running


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "LOCALHOST:8114", "[::1]", "[::1]:9999", "127.0.0.1:1"]
)
def test_loopback_has_these_names(stage: Stage, host: str) -> None:
    assert ask(stage, "/health", host=host).status == 200


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "evil.example:8114", "localhost.evil.example", "127.0.0.1.nip.io"),
        *(":8114", "", "box.local", "host.internal", "localhost.", "127.0.0.2", "0.0.0.0"),
        *("localhost:port", "localhost:99999", "[::1", "::1", "localhost@evil", "192.168.1.5"),
    ],
)
@pytest.mark.parametrize("path", ["/health", "/v1/models", "/", "/nothing"])
def test_another_name_is_a_rebound_page_and_refused(stage: Stage, host: str, path: str) -> None:
    reply = ask(stage, path, host=host)
    assert (reply.status, reply.error["code"]) == (403, "host_not_allowed")
    assert reply.error["type"] == "permission_error"


def test_a_request_of_http_1_0_needs_no_host(locked: Stage) -> None:
    def answered(head: bytes) -> Reply:
        with Wire(locked.port) as wire:
            wire.send(head + b"\r\n")
            return wire.reply()

    key = f"authorization: Bearer {KEY}\r\n".encode()
    assert answered(b"GET /health HTTP/1.0\r\n").json == {"status": "ok"}
    assert answered(b"GET /v1/models HTTP/1.0\r\n" + key).status == 200
    # HAProxy's default health check.
    assert answered(b"OPTIONS / HTTP/1.0\r\n").status == 204
    # The other checks stay.
    assert answered(b"GET /v1/models HTTP/1.0\r\n").status == 401
    page = b"origin: https://evil.example\r\n"
    assert answered(b"GET /health HTTP/1.0\r\n" + page).error["code"] == "origin_not_allowed"
    assert answered(b"GET /health HTTP/1.0\r\nhost: evil.example\r\n").status == 403


def test_a_request_of_http_1_1_without_a_host_or_with_two_is_refused(stage: Stage) -> None:
    with Wire(stage.port) as wire:
        wire.send(b"GET /health HTTP/1.1\r\n\r\n")
        assert wire.reply().error["code"] == "host_not_allowed"
    with Wire(stage.port) as wire:
        wire.send(b"GET /health HTTP/1.1\r\nhost: localhost\r\nhost: evil.example\r\n\r\n")
        assert wire.reply().status == 403


def test_names_that_the_user_gave_are_names(open_stage: Stage) -> None:
    assert ask(open_stage, "/health", host="box.lan:8114").status == 200
    assert ask(open_stage, "/health", host="192.168.1.5").status == 200
    assert ask(open_stage, "/health", host="192.168.1.6").status == 403


def test_a_server_of_every_address_answers_to_addresses_and_to_no_foreign_name() -> None:
    with serving(ServerConfig(any_address=True)) as stage:
        assert ask(stage, "/health", host="10.1.2.3:8114").status == 200
        assert ask(stage, "/health", host="[fe80::1]").status == 200
        assert ask(stage, "/health", host="evil.example").status == 403
        assert ask(stage, "/health", host="1.2.3").status == 403


@pytest.mark.parametrize(
    "origin",
    [
        *("https://evil.example", "null", "http://127.0.0.1:8114", "http://localhost:3000"),
        *("file://", "", "vscode-webview://abc"),
    ],
)
def test_a_page_may_not_ask_and_nothing_is_done(stage: Stage, origin: str) -> None:
    before = len(stage.engine.requests)
    reply = ask(stage, CHAT, BODY, headers={"origin": origin})
    assert (reply.status, reply.error["code"]) == (403, "origin_not_allowed")
    assert len(stage.engine.requests) == before
    assert not any(name.startswith("access-control") for name in reply.headers)
    assert reply.headers["vary"] == "Origin"


def test_a_page_of_another_site_may_not_even_look(stage: Stage) -> None:
    assert ask(stage, "/v1/models", headers={"sec-fetch-site": "cross-site"}).status == 403
    assert ask(stage, "/v1/models", headers={"sec-fetch-site": "none"}).status == 200


@pytest.mark.parametrize(
    ("origin", "may"),
    [
        ("http://localhost:3000", True),
        ("vscode-webview://1a2b", True),
        ("https://app.example.org", True),
        ("http://localhost", False),
        ("https://localhost:3000", False),
        ("http://localhost:3000.evil.example", False),
        ("http://localhost:30/evil", False),
        ("https://app.example.org.evil.example", False),
        ("https://app.example.org:444", False),
    ],
)
def test_pages_that_the_user_allowed_may_ask(open_stage: Stage, origin: str, may: bool) -> None:
    headers = {"origin": origin, "sec-fetch-site": "cross-site"}
    reply = ask(open_stage, CHAT, BODY, headers=headers)
    assert reply.status == (200 if may else 403)
    assert reply.headers.get("access-control-allow-origin") == (origin if may else None)
    assert "access-control-allow-credentials" not in reply.headers


@pytest.mark.parametrize(
    "origin",
    ["*", "", "localhost:3000", "http://", "http://a.org/x", "http://a:99x", "http://ä.org"],
)
def test_an_origin_that_no_page_has_is_refused_at_the_start(origin: str) -> None:
    with pytest.raises(UsageError, match="is not a valid origin"):
        checked_origins(("http://localhost:*", origin))


def test_origins_and_names_are_taken_as_people_write_them() -> None:
    given = (
        "http://LocalHost:*",
        "vscode-webview://*",
        "https://*.example.org/",
        "http://[::1]:3000",
    )
    assert checked_origins((*given, "null")) == (
        "http://localhost:*",
        "vscode-webview://*",
        "https://*.example.org",
        "http://[::1]:3000",
        "null",
    )
    assert checked_names(("Box.lan", "10.0.0.5", "[fe80::1]")) == (
        "box.lan",
        "10.0.0.5",
        "[fe80::1]",
    )


@pytest.mark.parametrize("name", ["*", "", "box.lan:8114", "http://box.lan", ".lan", "box lan"])
def test_a_name_that_no_machine_has_is_refused_at_the_start(name: str) -> None:
    with pytest.raises(UsageError, match="is not a host name or an address"):
        checked_names((name,))


def test_a_page_that_may_ask_reads_refusals_too() -> None:
    origin = "https://app.example.org"
    with serving(ServerConfig(origins=(origin,), api_keys=(KEY,))) as stage:
        for headers, status in (({}, 401), ({"x-api-key": KEY}, 404)):
            reply = ask(stage, "/nothing", headers={"origin": origin, **headers})
            assert reply.status == status
            assert reply.headers["access-control-allow-origin"] == origin


def test_a_page_that_may_ask_reads_the_headers_that_libraries_need(open_stage: Stage) -> None:
    headers = {"origin": "http://localhost:3000"}
    reply = ask(open_stage, CHAT, BODY, headers=headers)
    exposed = set(reply.headers["access-control-expose-headers"].split(", "))
    needed = {"x-request-id", "request-id", "retry-after", "x-should-retry"}
    assert needed <= exposed
    assert {name.decode() for name in (HEADER, SCHEMA_RELAXED, CONTEXT_TOKENS)} <= exposed


@pytest.mark.parametrize("authority", ["http://127.0.0.1:8114", "HTTP://localhost", "https://box"])
def test_a_url_as_target_means_its_path(stage: Stage, authority: str) -> None:
    assert ask(stage, f"{authority}/health").status == 200
    assert ask(stage, f"{authority}/v1/models").status == 200
    assert ask(stage, authority).status == 200
    assert ask(stage, f"{authority}/health", host="evil.example").status == 403


def test_a_preflight_is_answered_for_allowed_pages_only(open_stage: Stage) -> None:
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "x-a"}
    good = {"origin": "http://localhost:3000", **asked}
    reply = ask(open_stage, CHAT, method="OPTIONS", headers=good)
    assert reply.status == 204
    assert reply.headers["access-control-allow-origin"] == "http://localhost:3000"
    assert reply.headers["access-control-allow-headers"] == "x-a"
    assert "POST" in reply.headers["access-control-allow-methods"]
    private = {**good, "access-control-request-private-network": "true"}
    for headers in (private, asked, {"origin": "https://evil.example", **asked}):
        reply = ask(open_stage, CHAT, method="OPTIONS", headers=headers)
        assert reply.status == 403
        assert not any(name.startswith("access-control") for name in reply.headers)


@pytest.mark.parametrize("given", ["Bearer ", "Bearer undefined", "Bearer none", "Basic x", ""])
def test_without_a_key_any_authorization_is_taken(stage: Stage, given: str) -> None:
    assert ask(stage, CHAT, BODY, headers={"authorization": given}).status == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": f"Bearer {KEY}"},
        {"authorization": f"bearer {KEY} "},
        {"x-api-key": KEY},
        {"api-key": "another-key"},
        {"authorization": "Bearer undefined", "x-api-key": KEY},
    ],
)
def test_a_key_opens_however_it_is_sent(locked: Stage, headers: dict[str, str]) -> None:
    assert ask(locked, CHAT, BODY, headers=headers).status == 200


@pytest.mark.parametrize("path", ["/v1/models", "/props", "/metrics", "/tokenize", "/nothing"])
@pytest.mark.parametrize("given", [None, "Bearer ", f"Bearer {KEY}x", f"Basic {KEY}", "Bearer é"])
def test_without_the_key_everything_is_closed(locked: Stage, path: str, given: str | None) -> None:
    headers = {"authorization": given} if given is not None else {}
    reply = ask(locked, path, headers=headers)
    assert (reply.status, reply.error["code"]) == (401, "invalid_api_key")
    assert reply.error["type"] == "authentication_error"
    assert reply.headers["www-authenticate"] == "Bearer"


def test_health_needs_no_key_but_a_name(locked: Stage) -> None:
    assert ask(locked, "/health").json == {"status": "ok"}
    assert ask(locked, "/").status == 200
    assert ask(locked, "/health", host="evil.example").status == 403


def test_clients_with_different_keys_share_no_cache(locked: Stage, stage: Stage) -> None:
    salts, owners = set(), set()
    for key in (KEY, "another-key"):
        ask(locked, CHAT, {**BODY, "cache_salt": "a"}, headers={"x-api-key": key})
        salts.add(locked.last.salt)
        owners.add(locked.last.owner)
    assert len(salts) == 2 and not any(KEY in salt for salt in salts)
    assert len(owners) == 2 and all(owners) and not any(KEY in owner for owner in owners)
    ask(stage, CHAT, {**BODY, "cache_salt": "a"})
    assert stage.last.salt == "a"
    ask(stage, CHAT, BODY)
    assert stage.last.salt == ""


def test_keys_of_one_owner_share_the_cache() -> None:
    with serving(ServerConfig(api_keys=(KEY, "another-key"), one_owner=True)) as stage:
        salts = set()
        for key in (KEY, "another-key"):
            assert ask(stage, CHAT, BODY, headers={"x-api-key": key}).status == 200
            salts.add((stage.last.salt, stage.last.owner))
    assert len(salts) == 1


def test_keys_are_read_from_a_file_that_only_its_owner_reads(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# mine\n{KEY}\n\nanother-key\n")
    file.chmod(0o600)
    assert read_keys(file, {}) == (KEY, "another-key")
    assert read_keys(file, {"LOCALCHAT_API_KEY": "from-outside"}) == (
        "from-outside",
        KEY,
        "another-key",
    )
    assert read_keys(None, {}) == ()
    file.write_text(f"{KEY}\r\n", encoding="utf-8-sig")
    assert read_keys(file, {}) == (KEY,)
    file.chmod(0o640)
    with pytest.raises(UsageError, match="other users of this machine can read"):
        read_keys(file, {})


def test_bad_files_of_keys_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileMissing):
        read_keys(tmp_path / "none", {})
    file = tmp_path / "keys"
    for text in ("# only a note\n", "short\n", "with a blank in it\n", "naïve-naïve\n"):
        file.write_text(text)
        file.chmod(0o600)
        with pytest.raises(UsageError):
            read_keys(file, {})


def test_a_key_is_never_shown(locked: Stage) -> None:
    config = locked.server._service.config
    assert KEY not in repr(config)
