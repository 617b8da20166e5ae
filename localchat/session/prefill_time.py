"""Estimates how long the rest of a prompt takes."""

from collections.abc import Sequence
from typing import Final, NamedTuple

_TRUSTED_SHARE: Final = 0.25
"""Share of the prompt from which on the measured growth of the cost counts fully."""


class PrefillSample(NamedTuple):
    """Progress of a prompt at one moment."""

    tokens: int
    """Tokens computed or cached so far."""
    elapsed_s: float


def seconds_left(samples: Sequence[PrefillSample], cached: int, total: int) -> float | None:
    """Estimate the seconds until `total` tokens are computed. None before the first computed token.

    Attention makes each token cost more than the previous one. The model is a line: its slope comes from the
    mean costs up to a sample in the middle and up to the last one. The first steps of a long prompt say little
    about it, and other programs disturb them, so that the slope counts less there.
    """
    measured = [item for item in samples if item.tokens > cached and item.elapsed_s > 0]
    if not measured:
        return None
    last = measured[-1]
    middle_tokens = (cached + last.tokens) / 2
    middle = min(measured, key=lambda sample: abs(sample.tokens - middle_tokens))
    mean_s = last.elapsed_s / (last.tokens - cached)
    growth_s = 0.0
    if middle.tokens < last.tokens:
        middle_mean_s = middle.elapsed_s / (middle.tokens - cached)
        growth_s = 2 * (mean_s - middle_mean_s) / (last.tokens - middle.tokens)
        # Noise must not turn the line downwards, nor below zero at the start.
        growth_s = min(max(growth_s, 0.0), 2 * mean_s / (last.tokens + cached))
        share = (last.tokens - cached) / (total - cached)
        growth_s *= min(1.0, share / _TRUSTED_SHARE) ** 2
    first_s = mean_s - growth_s * (last.tokens + cached) / 2
    return (first_s + growth_s * (last.tokens + total) / 2) * (total - last.tokens)
