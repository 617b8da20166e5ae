"""Prices: the `[prices]` section of the settings file, in any currency.

[prices]
machine_hour = 2.50    # a machine, rented or written off
hosted_in = 0.15       # a hosted API, for a million tokens of prompts
hosted_out = 0.60      # and of answers
"""

from pathlib import Path

import msgspec

from localchat.errors import UsageError

FIELDS = ("machine_hour", "hosted_in", "hosted_out")
_REMOVED = ("kwh",)
"""Fields of earlier versions, which are ignored."""


class Prices(msgspec.Struct, frozen=True, omit_defaults=True):
    """Known prices. None stands for an unknown price."""

    machine_hour: float | None = None
    hosted_in: float | None = None
    """Price of a million tokens."""
    hosted_out: float | None = None


def read_prices(path: Path, section: object) -> Prices:
    """Check the `[prices]` table of a settings file. Raises UsageError."""
    if not isinstance(section, dict):
        raise UsageError(f"{path}: prices is not a section", hint="as in [prices]")
    prices = {name: value for name, value in section.items() if name not in _REMOVED}
    for name, value in prices.items():
        if name not in FIELDS:
            raise UsageError(
                f"{path} [prices]: there is no {name!r}", hint=f"use one of {', '.join(FIELDS)}"
            )
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1e9:
            raise UsageError(
                f"{path} [prices]: {name} must be a number from 0 on, not {value!r:.80}"
            )
    return Prices(**{name: float(value) for name, value in prices.items()})
