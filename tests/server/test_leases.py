"""Leases on the event loop."""

import asyncio
from typing import Any

import pytest

from localchat.errors import EngineClosed
from localchat.pool.pool import EnginePool
from localchat.server.leases import AsyncEnginePool
from tests.support.pool_models import FakeMachine

NO_RESOLVER: Any = None


def test_lease_from_a_closed_pool_is_refused() -> None:
    machine = FakeMachine({"a": 1})
    engines = AsyncEnginePool(
        EnginePool(machine.resolve, machine.open, machine.check_memory), NO_RESOLVER
    )
    engines.close()
    with pytest.raises(EngineClosed):
        asyncio.run(engines.lease("a"))
