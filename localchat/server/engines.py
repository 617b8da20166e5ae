"""What the server asks of whoever owns the loaded models (the pool), and the smallest owner: one engine.

The Protocols stand here, with their caller; the pool implements them without inheriting.
"""

import asyncio
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol

from localchat.engine.interface import Engine, EngineInfo
from localchat.errors import ModelMissing


@dataclass(frozen=True, slots=True)
class ModelCard:
    """A model that can be asked for by `name`. `context_tokens`: of the loaded engine, what it would be
    given otherwise, 0 where that is not known yet; `context_train`, `parameters`, `size_bytes`: 0 where
    unknown. `created`: seconds of the Unix clock (the file's date, or the load). `abilities`: of chat, tools,
    thinking, infill."""

    name: str
    loaded: bool
    context_tokens: int = 0
    context_train: int = 0
    created: int = 0
    architecture: str = ""
    quantization: str = ""
    parameters: int = 0
    size_bytes: int = 0
    abilities: frozenset[str] = frozenset()


class Lease(Protocol):
    """The right to use an engine. `async with` holds the engine; the end of the block gives it back, and
    only then may it be unloaded. Leaving by an exception or a cancelled task gives it back too."""

    engine: Engine
    name: str
    """What the model is called here, which may differ from the word that was asked for."""
    info: EngineInfo

    async def __aenter__(self) -> "Lease": ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class Engines(Protocol):
    """Everything that can answer. Called from the event loop of the server; nothing here may block it:
    what takes time (a load, a question to the child) runs in a thread."""

    async def lease(self, model_word: str, *, user: str = "") -> Lease:
        """The engine of a model, started where it is not running. Returns as soon as a request can be handed
        to the engine (the vocabulary is read; the weights may follow while it streams `Loading`). The word
        is a name of the library, never a path; empty: the server's own model. `user`: who asks, for `ps`.
        Cancelling the call takes back the wish. Raises ModelMissing, ModelInvalid, DoesNotFit, EngineDied."""
        ...

    def models(self) -> list[ModelCard]:
        """Every model that can be asked for, the server's own first."""
        ...

    def loaded(self) -> list[tuple[str, Engine]]:
        """The engines that run now, by name; their `stats()` are read for `/metrics`."""
        ...


@dataclass(slots=True)
class _OneLease:
    engine: Engine
    name: str
    info: EngineInfo

    async def __aenter__(self) -> "_OneLease":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return None


@dataclass(slots=True)
class OneEngine:
    """An Engines of one engine, which somebody else closes."""

    engine: Engine
    name: str
    created: int = field(default_factory=lambda: int(time.time()))
    _info: EngineInfo | None = None

    async def lease(self, model_word: str, *, user: str = "") -> Lease:
        if model_word not in ("", self.name):
            raise ModelMissing(
                f"there is no model {model_word!r} here", hint=f"this server has {self.name}"
            )
        self._info = await asyncio.to_thread(self.engine.info)
        return _OneLease(self.engine, self.name, self._info)

    def models(self) -> list[ModelCard]:
        info = self._info
        if info is None:
            return [ModelCard(self.name, loaded=True, created=self.created)]
        return [
            ModelCard(
                self.name,
                loaded=True,
                context_tokens=info.context_tokens,
                context_train=info.context_train,
                created=self.created,
                architecture=info.architecture,
                quantization=info.quantization,
                parameters=info.parameters,
                size_bytes=info.file_bytes,
            )
        ]

    def loaded(self) -> list[tuple[str, Engine]]:
        return [(self.name, self.engine)]
