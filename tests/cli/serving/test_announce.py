"""The address of a server: on stdout for programs, and once on a terminal."""

import io
import sys
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from localchat.cli.serving import serve
from localchat.cli.streams import Terminal
from localchat.server.config import ServerConfig
from localchat.server.uvicorn_server import bind_sockets
from tests.support.cli_program import INFO


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("out", "err", "is_printed"), [(Tty, Tty, False), (Tty, io.StringIO, True)]
)
def test_the_address_alone_is_printed_unless_the_terminal_has_it_already(
    monkeypatch: pytest.MonkeyPatch, out: Any, err: Any, is_printed: bool
) -> None:
    streams = out(), err()
    monkeypatch.setattr(sys, "stdout", streams[0])
    monkeypatch.setattr(sys, "stderr", streams[1])
    setup: Any = SimpleNamespace(terminal=Terminal({"NO_COLOR": "1"}))
    sockets = bind_sockets("127.0.0.1", 0)
    try:
        base = f"http://127.0.0.1:{sockets[0].getsockname()[1]}/v1"
        serve._announce(setup, ServerConfig(), sockets, INFO)
    finally:
        for listener in sockets:
            listener.close()
    assert f"serving on {base}" in streams[1].getvalue()
    assert (base in streams[0].getvalue().splitlines()) is is_printed


def test_the_example_is_a_request_that_the_model_answers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    setup: Any = SimpleNamespace(terminal=Terminal({"NO_COLOR": "1"}))
    for info, route in (
        (INFO, "/v1/chat/completions"),
        (msgspec.structs.replace(INFO, only_embeds=True), "/v1/embeddings"),
    ):
        sockets = bind_sockets("127.0.0.1", 0)
        try:
            serve._announce(setup, ServerConfig(), sockets, info)
        finally:
            for listener in sockets:
                listener.close()
        assert route in capsys.readouterr().err
