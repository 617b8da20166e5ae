"""Fixtures of all tests of the screen."""

import pytest

from localchat.tui.transcript import widget
from localchat.tui.widgets import banner


@pytest.fixture(autouse=True)
def lasting_hints(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the screen shows briefly stays, so that a slow machine does not miss it."""
    monkeypatch.setattr(banner, "_HINT_S", 3600.0)
    monkeypatch.setattr(widget, "_COPIED_S", 3600.0)
