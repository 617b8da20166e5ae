"""An engine pool of one engine, which the caller closes."""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast
from unittest.mock import Mock

from localchat.engine.interface import Engine, EngineInfo
from localchat.engine.options import EngineOptions
from localchat.errors import ModelMissing
from localchat.pool.entry import ModelSpec, PooledEngine, PoolEntry
from localchat.pool.pool import EnginePool, Lease
from localchat.pool.resolver import ModelCard
from localchat.server.leases import AsyncEnginePool, AsyncLease


@dataclass(slots=True)
class SingleEngine(AsyncEnginePool):
    engine: Engine
    name: str
    created: int = 1_700_000_000
    pool: EnginePool = field(
        default_factory=lambda: Mock(spec=EnginePool, loaded=Mock(return_value=[]))
    )
    """What is set on it has no effect."""
    _info: EngineInfo | None = None

    async def lease(self, model: str, *, user: str = "") -> AsyncLease:
        if model not in ("", self.name):
            raise ModelMissing(f"no model {model!r}", hint=f"this server has {self.name}")
        self._info = await asyncio.to_thread(self.engine.info)
        spec = ModelSpec(self.name, EngineOptions(Path(self.name), name=self.name))
        entry = PoolEntry(spec, cast(PooledEngine, self.engine), 0, 0.0)
        return AsyncLease(Lease(entry, lambda: None), self._info)

    def models(self) -> list[ModelCard]:
        info = self._info
        if info is None:
            return [ModelCard(self.name, created=self.created)]
        return [
            ModelCard(
                self.name,
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

    def close(self) -> None:
        """Leave the engine open: servers of tests share one."""
