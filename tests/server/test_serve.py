"""Where a server listens, and the verb that starts it."""

import os
import resource
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from localchat.errors import LocalchatError, UsageError
from localchat.server.config import ServerLimits
from localchat.server.uvicorn_server import bind_sockets
from tests.support.http_server import settled


def _close(sockets: list[socket.socket]) -> None:
    for each in sockets:
        each.close()


def test_loopback_is_both_of_its_addresses_on_one_port() -> None:
    sockets = bind_sockets("127.0.0.1", 0)
    try:
        names = [each.getsockname()[:2] for each in sockets]
        assert names[0][0] == "127.0.0.1"
        assert {port for _, port in names} == {names[0][1]}
        assert [host for host, _ in names[1:]] in ([], ["::1"])
    finally:
        _close(sockets)


def test_the_ends_of_responses_wait_for_nothing() -> None:
    sockets = bind_sockets("127.0.0.1", 0)
    try:
        # asyncio turns Nagle's algorithm off for sockets that name their protocol, and for no others.
        assert all(each.proto == socket.IPPROTO_TCP for each in sockets)
    finally:
        _close(sockets)


def test_port_in_use_is_refused_with_advice() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(LocalchatError, match=f"port {port} on 127.0.0.1 is in use") as refused:
            bind_sockets("127.0.0.1", port)
    assert f"--port {port + 1}" in refused.value.hint


def test_unknown_host_is_refused() -> None:
    with pytest.raises(UsageError, match="is not an address of this machine"):
        bind_sockets("nowhere.invalid", 0)


def serve(*arguments: str, **environ: str) -> subprocess.Popen[str]:
    """The program itself, with the scripted backend of the tests."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.support.server_program", "serve", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environ},
    )


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=90) as answer:
            return bool(answer.status == 200)
    except urllib.error.HTTPError as refused:
        refused.close()
        return False


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_command_prints_its_address_and_ends_cleanly(number: signal.Signals) -> None:
    with serve("guide", "--port", "0") as process:
        assert process.stdout is not None and process.stderr is not None
        url = process.stdout.readline().strip()
        assert url.startswith("http://127.0.0.1:") and url.endswith("/v1")
        assert settled(lambda: _answers(f"{url}/health"))
        with urllib.request.urlopen(f"{url}/models", timeout=90) as answer:
            body = answer.read()
            assert b'"guide"' in body and b'"n_ctx":4096' in body
        process.send_signal(number)
        _, talk = process.communicate(timeout=90)
        assert process.returncode == 0
    assert f"serving on {url}" in talk and f"curl {url}/chat/completions" in talk
    assert " GET /v1/models 200 " in talk
    assert "Traceback" not in talk


@pytest.fixture
def few_files() -> Iterator[int]:
    """Processes that start now may open few files, until they ask for more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard))
    yield hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.skipif(sys.platform != "linux", reason="limits of another process are read")
def test_server_has_files_for_all_connections(few_files: int) -> None:
    with serve("guide", "--port", "0") as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            assert settled(lambda: _answers(f"{url}/health"))
            most = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)[0]
            assert most >= min(ServerLimits().connections, few_files)
            process.send_signal(signal.SIGTERM)
            _, talk = process.communicate(timeout=90)
        finally:
            process.kill()
    assert "Traceback" not in talk


def test_network_needs_a_key_or_an_explicit_flag(tmp_path: Path) -> None:
    with serve("guide", "--host", "0.0.0.0", "--port", "0") as process:
        _, talk = process.communicate(timeout=90)
        assert process.returncode == 2
    assert "no API key" in talk and "--api-key-file" in talk and "--insecure-no-auth" in talk
    keys = tmp_path / "keys"
    keys.write_text("sk-0123456789\n")
    keys.chmod(0o600)
    for more in (("--insecure-no-auth",), ("--api-key-file", str(keys))):
        with serve("guide", "--host", "0.0.0.0", "--port", "0", *more) as process:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("http://0.0.0.0:")
            process.send_signal(signal.SIGTERM)
            _, talk = process.communicate(timeout=90)
            assert process.returncode == 0
        assert ("WARNING" in talk) == (more[0] == "--insecure-no-auth")
        assert "sk-0123456789" not in talk


def test_a_longest_answer_that_no_engine_could_be_told_is_refused() -> None:
    with serve("guide", "--port", "0", "--longest", "1" + "0" * 20) as process:
        _, talk = process.communicate(timeout=90)
        assert process.returncode == 2
    assert "is not in the range" in talk


def test_a_port_that_is_taken_ends_the_verb() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with serve("guide", "--port", str(port)) as process:
            _, talk = process.communicate(timeout=90)
            assert process.returncode == 1
    assert "is in use" in talk and f"--port {port + 1}" in talk
