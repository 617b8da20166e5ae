"""Hub client: tokens, gated repositories, endpoints, proxies, malformed answers."""

import socket
import threading

import huggingface_hub
import pytest

from localchat.errors import ModelMissing, NetworkError, UsageError
from localchat.http_transport import retry_after_s
from localchat.models.hub.client import (
    DEFAULT_ENDPOINT,
    HubClient,
    RetryableError,
    hub_from_environment,
)
from localchat.models.hub.events import Note, PullEvent
from localchat.models.hub.pull import select_files
from localchat.models.hub.retry import MAX_TRIES, wait_s
from localchat.models.names import parse
from tests.support.fake_hub import FakeHub, Fault
from tests.support.pullers import Puller

NAME = "maker/Small-GGUF"
BODY = b"GGUF and more"


@pytest.fixture(autouse=True)
def _repository(hub: FakeHub) -> None:
    hub.add(NAME, {"small-q4_k_m.gguf": BODY})


def test_environment_names_endpoint_and_token(monkeypatch: pytest.MonkeyPatch) -> None:
    found = hub_from_environment({"HF_ENDPOINT": "http://mirror.example/", "HF_TOKEN": " secret "})
    assert found.endpoint == "http://mirror.example"
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    assert hub_from_environment({}).endpoint == DEFAULT_ENDPOINT


def test_token_is_shown_to_the_endpoint_and_never_to_the_store(pull: Puller, hub: FakeHub) -> None:
    pull.token = "secret"
    pull(NAME)
    for at in ("api", "resolve"):
        assert {one.headers["Authorization"] for one in hub.requests(at)} == {"Bearer secret"}
    assert all("secret" not in str(one.headers) for one in hub.requests("store"))


def test_gated_repository_is_explained_with_its_page(pull: Puller, hub: FakeHub) -> None:
    hub.add(NAME, {"small-q4_k_m.gguf": BODY}, gated=True, token="right")
    with pytest.raises(NetworkError) as caught:
        pull(NAME)
    assert caught.value.message.endswith(f"accept its license at {hub.url}/{NAME}")
    assert "HF_TOKEN" in caught.value.hint
    pull.token = "wrong"
    with pytest.raises(NetworkError, match="refuses this token"):
        pull(NAME)
    pull.token = "right"
    assert pull(NAME).path.read_bytes() == BODY


def test_gated_listing_is_explained_too(pull: Puller, hub: FakeHub) -> None:
    hub.faults.append(Fault(at="api", status=403, headers={"X-Error-Code": "GatedRepo"}))
    with pytest.raises(NetworkError, match="is gated"):
        pull(NAME)


def test_another_refusal_is_not_called_gated(pull: Puller, hub: FakeHub) -> None:
    words = {"X-Error-Message": "blocked by your administrator"}
    hub.faults.append(Fault(at="api", status=403, headers=words))
    with pytest.raises(NetworkError, match=r"403 .* blocked by your administrator") as caught:
        pull(NAME)
    assert "gated" not in str(caught.value)
    assert "HF_TOKEN" in caught.value.hint


@pytest.mark.parametrize("endpoint", ["garbage", "ftp://x.example", "http://", "://"])
def test_an_endpoint_that_is_no_web_address_is_refused_at_once(endpoint: str) -> None:
    with pytest.raises(UsageError, match="HF_ENDPOINT must be a web address"):
        hub_from_environment({"HF_ENDPOINT": endpoint, "HF_TOKEN": "x"})


def test_a_listing_that_takes_long_is_said(
    pull: Puller, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("localchat.models.hub.retry._SILENT_S", 0.0)
    seen = threading.Event()
    real = HubClient.list

    def slow(self: HubClient, repository: str) -> object:
        assert seen.wait(60)
        return real(self, repository)

    def noted(event: PullEvent) -> None:
        pull.events.append(event)
        seen.set()

    monkeypatch.setattr(HubClient, "list", slow)
    select_files(parse(NAME, {}), HubClient(hub.url), noted)
    assert pull.events == [Note(f"waiting for {hub.url} to answer")]


def test_repository_that_is_not_there_is_a_missing_model(pull: Puller) -> None:
    with pytest.raises(ModelMissing, match="no repository maker/Other"):
        pull("maker/Other")


@pytest.mark.parametrize("body", [b"<html>log in</html>", b"[]", b"{}", b'{"sha": 3}', b"null"])
def test_answer_that_is_no_listing_is_said(pull: Puller, hub: FakeHub, body: bytes) -> None:
    hub.faults.append(Fault(at="api", body=body))
    with pytest.raises(NetworkError, match="not with a listing"):
        pull(NAME)


def test_hub_that_nobody_reaches_is_said_at_once(pull: Puller, hub: FakeHub) -> None:
    hub.close()
    with pytest.raises(NetworkError, match="connection") as caught:
        pull(NAME)
    assert (pull.waits, pull.events) == ([], [])
    assert caught.value.details == {"unreachable": True}


@pytest.mark.parametrize("found", [False, True])
def test_name_server_that_does_not_answer_is_not_waited_for(
    pull: Puller, monkeypatch: pytest.MonkeyPatch, found: bool
) -> None:
    monkeypatch.setattr("localchat.models.hub.client._FIRST_CONNECT_S", 60.0 if found else 0.01)
    over = threading.Event()

    def look_up(*_: object) -> None:
        assert found or over.wait(60)
        raise OSError("no such host")

    monkeypatch.setattr("localchat.models.hub.client.socket.getaddrinfo", look_up)
    said = "no such host" if found else "does not answer in time"
    with pytest.raises(NetworkError, match=said) as caught:
        pull(NAME)
    over.set()
    assert caught.value.details == {"unreachable": True}


@pytest.mark.parametrize(
    "problem",
    [
        socket.gaierror(-2, "Name or service not known"),
        socket.gaierror(-3, "Temporary failure in name resolution"),
        socket.gaierror(8, "nodename nor servname provided, or not known"),
        OSError(101, "Network is unreachable"),
    ],
)
def test_offline_is_said_in_plain_words(
    pull: Puller, monkeypatch: pytest.MonkeyPatch, problem: OSError
) -> None:
    def look_up(*_: object) -> None:
        raise problem

    monkeypatch.setattr("localchat.models.hub.client.socket.getaddrinfo", look_up)
    with pytest.raises(NetworkError, match="this computer seems to be offline") as caught:
        pull(NAME)
    assert "Errno" not in str(caught.value)


def test_proxy_looks_up_the_name(
    pull: Puller, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look_up(*_: object) -> None:
        raise AssertionError("this machine knows no names")

    monkeypatch.setenv("http_proxy", hub.url)
    monkeypatch.setattr("localchat.models.hub.client.socket.getaddrinfo", look_up)
    HubClient("http://hub.invalid")._find_host()


def test_hub_that_is_busy_is_given_time(pull: Puller, hub: FakeHub) -> None:
    hub.faults.extend(Fault(at="api", status=503) for _ in range(9))
    with pytest.raises(NetworkError, match="503"):
        pull(NAME)
    assert len(pull.waits) == MAX_TRIES - 1


def test_redirect_without_end_is_refused(pull: Puller, hub: FakeHub) -> None:
    again = f"{hub.url}/{NAME}/resolve/x/small-q4_k_m.gguf"
    hub.faults.extend(Fault(at="resolve", location=again) for _ in range(20))
    with pytest.raises(NetworkError, match="redirects more than"):
        pull(NAME)


def test_redirect_to_another_kind_of_address_is_refused(pull: Puller, hub: FakeHub) -> None:
    hub.faults.append(Fault(at="resolve", location="file:///etc/passwd"))
    with pytest.raises(NetworkError, match="redirects to file"):
        pull(NAME)


def test_proxy_of_the_environment_is_used(
    pull: Puller, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", hub.url)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    huggingface_hub.close_session()  # it reads the environment once
    try:
        listing = HubClient("http://hub.invalid").list(NAME)
    finally:
        huggingface_hub.close_session()
    assert listing.repository == NAME
    assert hub.asked[0].path.startswith(f"http://hub.invalid/api/models/{NAME}")


def test_listing_that_is_refused_for_now_may_be_tried_again(hub: FakeHub) -> None:
    hub.faults.append(Fault(at="api", status=503, headers={"Retry-After": "5"}))
    with pytest.raises(RetryableError) as caught:
        HubClient(hub.url).list(NAME)
    assert caught.value.asked_s == 5.0


def test_retry_after_is_seconds_or_a_date() -> None:
    assert retry_after_s("120") == 120.0
    assert retry_after_s("Wed, 21 Oct 2015 07:28:00 GMT") == 0.0
    assert retry_after_s("²") is None
    assert (retry_after_s("Wed, 21 Oct 2115 07:28:00 GMT") or 0) > 1e9
    assert retry_after_s("soon") is None
    assert retry_after_s(None) is None


@pytest.mark.parametrize("asked_s", [None, 0.0])
def test_a_wait_of_nothing_is_no_reason_to_use_up_all_tries_at_once(asked_s: float | None) -> None:
    assert [wait_s(failures, asked_s) for failures in (1, 2, 7)] == [1.0, 2.0, 30.0]
    assert wait_s(7, 2.0) == 2.0
