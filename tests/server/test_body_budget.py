"""One memory budget for all bodies that are being read."""

import asyncio
import select
from contextlib import ExitStack

import pytest

from localchat.server.body_budget import FREE_BYTES, BodyBudget
from localchat.server.config import ServerConfig, ServerLimits
from localchat.server.errors import ApiError
from tests.support.http_server import Wire, chat, serving, settled

MIB = 1 << 20


def test_reservations_share_one_limit() -> None:
    async def scene() -> None:
        budget = BodyBudget(4 * MIB)
        with budget.reservation() as first, budget.reservation() as second:
            first.resize(3 * MIB)
            second.resize(MIB)
            with pytest.raises(ApiError) as caught:
                second.resize(2 * MIB)
            assert (caught.value.status, caught.value.headers["retry-after"]) == (503, "1")
            assert budget.used_bytes == 4 * MIB - 2 * FREE_BYTES
            first.resize(0)
            second.resize(2 * MIB)
        assert budget.used_bytes == 0

    asyncio.run(scene())


def test_small_bodies_need_no_budget() -> None:
    async def scene() -> None:
        budget = BodyBudget(0)
        with budget.reservation() as reservation:
            reservation.resize(FREE_BYTES)
            assert budget.used_bytes == 0

    asyncio.run(scene())


def test_half_sent_bodies_are_refused_beyond_the_budget_and_small_requests_go_on() -> None:
    limits = ServerLimits(bodies_bytes=2 * MIB)
    with serving(ServerConfig(limits=limits)) as stage, ExitStack() as stack:
        half = b'{"messages":[{"role":"user","content":"' + b"a" * MIB
        wires = [stack.enter_context(Wire(stage.port)) for _ in range(5)]
        for wire in wires:
            wire.ask("/v1/chat/completions", half, headers={"content-length": str(4 * MIB)})
        # The server reads all of them at once, so any may be the one beyond the budget.
        readable, _, _ = select.select([wire.socket for wire in wires], [], [], 20)
        refused = next(wire for wire in wires if wire.socket in readable).reply()
        assert (refused.status, refused.error["code"]) == (503, "server_busy")
        assert refused.headers["retry-after"] == "1"
        assert chat(stage).status == 200
        for wire in wires:
            wire.socket.close()
        assert settled(lambda: chat(stage, "b" * MIB).status == 200)
