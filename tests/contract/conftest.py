"""One suite over every backend that runs here, through LocalEngine and a real child process."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from localchat.engine.local import EngineOptions, LocalEngine

Open = Callable[..., LocalEngine]
SCRIPTED = "localchat.loop.scripted:ScriptedBackend"


def _scripted(folder: Path) -> Path:
    path = folder / "hashed.script"
    path.write_text(json.dumps({"reply": None, "context_tokens": 2048}))
    return path


def _llamacpp(folder: Path) -> Path:
    from tests.localchat_llamacpp.llamacpp_models import write_chain

    return write_chain(folder / "chain.gguf")


def _cuda(folder: Path) -> Path:
    from tests.localchat_cuda.speaking import write_speaking

    return write_speaking(folder)


BACKENDS = {
    "scripted": (SCRIPTED, _scripted),
    "llamacpp": ("llamacpp", _llamacpp),
    "cuda": ("localchat_cuda.backend:ReferenceBackend", _cuda),
}


@pytest.fixture(scope="session", params=list(BACKENDS))
def backend(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path]:
    """Name of a backend and the path of a small model for it."""
    name, write = BACKENDS[request.param]
    return name, write(tmp_path_factory.mktemp("contract"))


@pytest.fixture
def start(backend: tuple[str, Path]) -> Iterator[Open]:
    """start(**options) -> a fresh engine, closed after the test. Books are audited whenever it is idle."""
    name, path = backend
    engines: list[LocalEngine] = []

    def begin(**options: object) -> LocalEngine:
        chosen = {"context_tokens": 2048, "threads": 1, "max_slots": 8, **options}
        engine = LocalEngine(
            EngineOptions(model=path, backend=name, audit=True, **chosen),  # type: ignore[arg-type]
            say=lambda sentence: None,
        )
        engines.append(engine)
        return engine

    yield begin
    for engine in engines:
        engine.close()
