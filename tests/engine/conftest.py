"""Remote engines and their servers."""

from collections.abc import Iterator
from typing import Any

import pytest

from localchat.engine.remote.engine import RemoteEngine, RemoteOptions
from tests.support.remote_server import Handler, Open, Server


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def opened(said: list[str]) -> Iterator[Open]:
    made: list[tuple[RemoteEngine, Server]] = []

    def make(answer: Handler, **options: Any) -> tuple[RemoteEngine, Server]:
        server = Server(answer)
        options = {"model": "m", "silence_s": 90.0, **options}
        engine = RemoteEngine(RemoteOptions(server.url, **options), notify=said.append)
        made.append((engine, server))
        return made[-1]

    yield make
    for engine, server in made:
        engine.close()
        server.stop()
