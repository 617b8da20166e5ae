"""Shared by tests: Open."""

from collections.abc import Callable

from localchat.engine.local.engine import LocalEngine

Open = Callable[[], LocalEngine]
