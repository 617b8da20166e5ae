"""Fixtures of all tests of the screen."""

from collections.abc import Iterator
from typing import Any

import pytest
from textual.css.model import RuleSet
from textual.css.stylesheet import Stylesheet

from localchat.tui.transcript import widget
from localchat.tui.widgets import banner


@pytest.fixture(autouse=True)
def lasting_hints(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the screen shows briefly stays, so that a slow machine does not miss it."""
    monkeypatch.setattr(banner, "_HINT_S", 3600.0)
    monkeypatch.setattr(widget, "_COPIED_S", 3600.0)


@pytest.fixture(scope="session", autouse=True)
def styles_parsed_once() -> Iterator[None]:
    """Apps share parsed styles: each would parse the same ones for a tenth of its test's time."""
    parse_rules = Stylesheet._parse_rules
    parsed: dict[Any, list[RuleSet]] = {}

    def parse_once(self: Stylesheet, css: str, read_from: Any, **options: Any) -> list[RuleSet]:
        key = (css, read_from, *options.items(), *self._variables.items())
        if key not in parsed:
            parsed[key] = parse_rules(self, css, read_from, **options)
        return parsed[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stylesheet, "_parse_rules", parse_once)
        yield
