"""What the tests of the library share: a fake hub, a models folder, and a pull that waits for nothing."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from localchat.models.hub.client import Hub
from localchat.models.hub.events import PullEvent
from localchat.models.hub.manifest import Installed
from localchat.models.hub.pull import fetch, look_up
from localchat.models.hub.retry import RetryPolicy
from localchat.models.names import parse
from tests.fake_hub import FakeHub


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


class Puller:
    """Pulls into one folder; `events` and `waits` tell what happened."""

    def __init__(self, hub: FakeHub, models_dir: Path) -> None:
        self.hub = hub
        self.models_dir = models_dir
        self.events: list[PullEvent] = []
        self.waits: list[float] = []
        self.token: str | None = None
        self.silence_s = 5.0

    def __call__(self, word: str, catalogue: Path | None = None) -> Installed:
        from localchat.models.catalog import read_models

        known = read_models(catalogue) if catalogue else {}
        patience = RetryPolicy(sleep=self.waits.append)
        hub = Hub(self.hub.url, self.token, self.silence_s)
        choice = look_up(parse(word, known), hub, self.events.append, patience)
        return fetch(choice, hub, self.models_dir, self.events.append, patience)

    def told(self, kind: type[PullEvent]) -> list[PullEvent]:
        return [event for event in self.events if isinstance(event, kind)]


@pytest.fixture
def pull(hub: FakeHub, tmp_path: Path) -> Puller:
    return Puller(hub, tmp_path / "models")
