"""Fixtures of the model library: a fake hub, a models folder, and a pull without waiting times."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fake_hub import FakeHub
from tests.support.pullers import Puller


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A fake hub that the process takes for the real one."""
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    # read once at import, and the whole test run imports it under HF_HUB_OFFLINE=1
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    server = FakeHub()
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    yield server
    server.close()


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that requests to the hub would wait before their next try. Nothing waits."""
    waited: list[float] = []
    monkeypatch.setattr("localchat.models.hub.retry.sleep", waited.append)
    return waited


@pytest.fixture
def pull(hub: FakeHub, tmp_path: Path, waits: list[float]) -> Puller:
    return Puller(hub, tmp_path / "models", waits)
