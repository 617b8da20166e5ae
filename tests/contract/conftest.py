"""One suite over every backend that runs here, through LocalEngine and a real child process."""

import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from msgspec.structs import replace

from localchat.engine.local.engine import LocalEngine
from localchat.engine.options import EngineOptions
from localchat.engine.request import GenerateRequest
from localchat.engine.stream import Stream
from localchat.fit.load_options import LoadOptions
from tests.support.contract_engines import Open

_TESTS = count()
SCRIPTED = "tests.support.scripted_backend:ScriptedBackend"


def _scripted(folder: Path) -> Path:
    path = folder / "hashed.script"
    path.write_text(json.dumps({"reply": None, "context_tokens": 2048}))
    return path


def _paged(folder: Path) -> Path:
    path = folder / "paged.script"
    path.write_text(json.dumps({"reply": None, "context_tokens": 2048, "block_tokens": 16}))
    return path


def _llamacpp(folder: Path) -> Path:
    from tests.support.llamacpp_models import write_chain

    return write_chain(folder / "chain.gguf")


def _cuda(folder: Path) -> Path:
    from tests.support.speaking_checkpoint import write_speaking

    return write_speaking(folder)


BACKENDS = {
    "scripted": (SCRIPTED, _scripted),
    "paged": (SCRIPTED, _paged),
    "llamacpp": ("llamacpp", _llamacpp),
    "llamacpp-gpu": ("tests.support.gpu_llamacpp:GpuLlamaCppBackend", _llamacpp),
    "cuda": ("localchat_cuda.backend:ReferenceBackend", _cuda),
    "cuda-ranks": ("tests.support.rank_backend:TwoRankBackend", _cuda),
}


_LONG = "cuda-ranks"
"""Each of its engines starts two processes that import torch."""


@pytest.fixture(
    scope="session",
    params=[
        *(name for name in BACKENDS if name != _LONG),
        pytest.param(_LONG, marks=pytest.mark.slow),
    ],
)
def backend(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path]:
    """Name of a backend and the path of a small model for it."""
    name, write = BACKENDS[request.param]
    return name, write(tmp_path_factory.mktemp("contract"))


@pytest.fixture(scope="session")
def shared(backend: tuple[str, Path]) -> Iterator[LocalEngine]:
    """One engine for all tests: its start takes longer than most of them. Books are audited whenever it is
    idle."""
    name, path = backend
    options = EngineOptions(
        load=LoadOptions(context_tokens=2048, threads=1, max_slots=8),
        model=path,
        backend=name,
    )
    engine = LocalEngine(options, notify=lambda sentence: None)
    yield engine
    engine.close()


@pytest.fixture
def start(shared: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> Open:
    """start() -> an engine that has seen nothing: what other tests asked has another salt."""
    generate, salt = shared.generate, f"{next(_TESTS)} "

    def salted(request: GenerateRequest) -> Stream:
        return generate(replace(request, salt=salt + request.salt))

    def begin() -> LocalEngine:
        monkeypatch.setattr(shared, "generate", salted)
        return shared

    return begin
