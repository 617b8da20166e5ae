"""A RAM whose bandwidth is known without measuring it."""

import pytest

from localchat.fit.speed import Bandwidth


def put_bandwidth(patch: pytest.MonkeyPatch, bytes_per_s: float, *, quiet: bool = True) -> None:
    """Make every number of threads read so many bytes per second."""
    patch.setattr(
        "localchat.fit.speed._bandwidth",
        lambda threads: Bandwidth("", threads, bytes_per_s, quiet),
    )
