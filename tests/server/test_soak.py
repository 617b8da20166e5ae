"""A twentieth of the soak (scripts/tools/soak): the program itself, the built-in guide, many clients in a
process of their own; some vanish, and the engine is killed under the others."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from scripts.tools.soak.clients import Client, Plan, Report
from scripts.tools.soak.server import Watched, clients, serving
from tests.support.local_api_server import until
from tests.support.paths import ROOT

pytestmark = pytest.mark.usefixtures("one_thread")

GUIDE = ROOT / "localchat/guide/guide.gguf"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Watched]:
    environ = {**os.environ, "LOCALCHAT_DATA_DIR": str(tmp_path)}
    with serving(GUIDE, environ, tmp_path / "log", parallel=8) as watched:
        yield watched


def soaked(server: Watched, **plan: float) -> list[Client]:
    process = clients(Plan(server.port, **{"clients": 12, "seconds": 1.0, "tokens": 12, **plan}))  # type: ignore[arg-type]
    out, _ = process.communicate()
    return msgspec.json.decode(out, type=Report).clients


def test_many_clients_are_all_answered_and_who_vanishes_costs_no_step(server: Watched) -> None:
    seen = soaked(server)
    assert [one.errors for one in seen if one.errors] == []
    assert all(one.answers for one in seen)
    before = server.idle_counts()
    assert before.finished >= sum(one.answers for one in seen)
    beside = soaked(server, vanishing=4)
    assert [one.errors for one in beside if one.errors] == []
    after = server.idle_counts()
    assert sum(one.vanished for one in beside) >= 4
    assert after.cancelled > before.cancelled
    assert after.failed == {}


def test_engine_death_ends_each_stream_and_the_next_request_works(server: Watched) -> None:
    process = clients(Plan(server.port, clients=10, seconds=0.0, answers=1, errors=1))
    until(lambda: len(server.stats().requests) == 10)
    os.kill(server.engine_pid(), signal.SIGKILL)
    out, _ = process.communicate(timeout=300)
    seen = msgspec.json.decode(out, type=Report).clients
    assert [len(one.errors) for one in seen] == [1] * 10
    assert all("engine stopped unexpectedly" in one.errors[0] for one in seen)
    assert all(one.answers for one in seen)
