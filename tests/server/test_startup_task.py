"""The task that loads the server's own model once the server listens."""

import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from localchat.engine.interface import EngineInfo
from localchat.media import decode
from localchat.server.app import create_app
from localchat.server.bootstrap import startup_task
from tests.support.http_server import UNHURRIED
from tests.support.scripted_engine import ScriptedEngine
from tests.support.single_engine import SingleEngine


@pytest.mark.parametrize("media", [(), ("image",), ("image", "audio")])
def test_decoders_are_imported_while_a_model_that_reads_media_is_loaded(
    media: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Engine(ScriptedEngine):
        def info(self) -> EngineInfo:
            return msgspec.structs.replace(ScriptedEngine.info(self), media=media)

    imported: list[Any] = []
    monkeypatch.setattr(decode, "load_decoders", imported.append)
    engines = SingleEngine(Engine(), "m")
    engines.resolver = SimpleNamespace(own=SimpleNamespace(name="m"))  # type: ignore[assignment]
    app = create_app(engines, UNHURRIED)
    notices: list[str] = []
    task = startup_task(app, lambda: None, notices.append)
    asyncio.run(task(SimpleNamespace(stop=lambda: None)))  # type: ignore[arg-type]
    assert app.state.service.ready and notices == ["m is ready"]
    assert imported == [media] * bool(media)
