"""Specs of comparisons for tests."""

from collections.abc import Sequence

from localchat.measure.records import QualitySpec
from localchat.measure.variants import BenchVariant


def quality_spec(
    variants: Sequence[BenchVariant],
    tests: tuple[str, ...],
    *,
    window_tokens: int = 64,
    most_windows: int = 2,
    needle_lengths: tuple[int, ...] = (512, 2048),
) -> QualitySpec:
    """A small comparison."""
    return QualitySpec(
        variants=tuple(variants),
        tests=tests,
        text="text",
        text_digest="",
        window_tokens=window_tokens,
        most_windows=most_windows,
        needle_lengths=needle_lengths,
        needle_depths=5,
        tasks=3,
    )
