"""Options of an engine process before its model is read."""

import pytest

from localchat.core.process import limit_threads
from localchat.engine.local import protocol
from localchat.fit.hardware import read_cpus
from localchat.fit.load_options import LoadOptions


@pytest.mark.parametrize(("requested", "used"), [(0, 0), (1, 1), (2, 2), (3, 2), (1024, 2)])
def test_no_more_threads_compute_than_there_are_cpus(
    monkeypatch: pytest.MonkeyPatch, requested: int, used: int
) -> None:
    monkeypatch.setattr("localchat.core.process.read_cpus", lambda: 2)
    notices: list[str] = []
    spec = protocol.Open(b"m.gguf", "m", None, LoadOptions(threads=requested))
    assert limit_threads(spec, notices.append).load.threads == used
    assert bool(notices) == (requested > 2)
    assert all(f"--threads {requested} is more" in notice for notice in notices)


def test_this_machine_has_cpus() -> None:
    assert read_cpus() >= 1
