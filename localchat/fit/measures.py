"""What probes measured on this machine, remembered for a day: the next verdict need not measure again.

A small JSON file in the state folder, numbers by name. It is a cache: what cannot be read or written is
measured again.
"""

import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Final, Literal, NamedTuple

import msgspec
from msgspec import Meta

from localchat.atomic import write_text

MEASURES_FILE: Final = "measures.json"
_KEPT_S: Final = 24 * 3600.0
"""A laptop is on battery tomorrow, or its fan is clean."""
_MOST: Final = 512


class Estimate(NamedTuple):
    """Tokens a second. disturbed: other programs were busy while it was measured, and it is rather more."""

    tokens_per_s: float
    disturbed: bool = False


class Measure(msgspec.Struct, frozen=True):
    """A number and when it was taken, in seconds of the epoch."""

    value: Annotated[float, Meta(gt=0)]
    at_s: float


class _File(msgspec.Struct, frozen=True, kw_only=True):
    version: Literal[1]
    measures: dict[str, Measure] = {}


class Measures:
    """`state_dir`: None remembers nothing."""

    def __init__(self, state_dir: Path | None) -> None:
        self._path = state_dir / MEASURES_FILE if state_dir is not None else None

    def known(self, now_s: float | None = None) -> dict[str, float]:
        """Every number that is not too old, by name."""
        now = time.time() if now_s is None else now_s
        return {
            name: one.value
            for name, one in self._read().items()
            if -60 <= now - one.at_s <= _KEPT_S  # a clock that was put back makes nothing eternal
        }

    def keep(self, found: Mapping[str, float]) -> None:
        """Remember numbers, over those of the same names; the oldest go where there are many."""
        if self._path is None or not found:
            return
        now = time.time()
        fresh = {name: Measure(value, now) for name, value in found.items()}
        latest = sorted({**self._read(), **fresh}.items(), key=lambda pair: pair[1].at_s)
        body = msgspec.json.encode(_File(version=1, measures=dict(latest[-_MOST:])))
        with suppress(OSError):
            write_text(self._path, f"{msgspec.json.format(body).decode()}\n")

    def _read(self) -> dict[str, Measure]:
        if self._path is None:
            return {}
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=_File).measures
        except (OSError, msgspec.DecodeError):
            return {}


NOTHING_MEASURED: Final = Measures(None)
"""Knows nothing and remembers nothing."""
