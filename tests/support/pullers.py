"""Shared by tests: Puller."""

from pathlib import Path

from localchat.models.hub.client import HubClient
from localchat.models.hub.events import PullEvent
from localchat.models.hub.manifest import Installed
from localchat.models.hub.pull import fetch, select_files
from localchat.models.names import parse
from tests.support.fake_hub import FakeHub


class Puller:
    """Pulls into one folder; `events` and `waits` tell what happened."""

    def __init__(self, hub: FakeHub, models_dir: Path, waits: list[float]) -> None:
        self.hub = hub
        self.models_dir = models_dir
        self.events: list[PullEvent] = []
        self.waits = waits
        self.token: str | None = None
        self.silence_s = 5.0

    def __call__(self, word: str, catalogue: Path | None = None) -> Installed:
        from localchat.models.catalog import read_models

        known = read_models(catalogue) if catalogue else {}
        hub = HubClient(self.hub.url, self.token, self.silence_s)
        choice = select_files(parse(word, known), hub, self.events.append)
        return fetch(choice, hub, self.models_dir, self.events.append)

    def told(self, kind: type[PullEvent]) -> list[PullEvent]:
        return [event for event in self.events if isinstance(event, kind)]
