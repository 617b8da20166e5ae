"""A RAM whose bandwidth is known without measuring it."""

import pytest


def put_bandwidth(patch: pytest.MonkeyPatch, bytes_per_s: float) -> None:
    """Make every number of threads read so many bytes per second."""
    patch.setattr("localchat_llamacpp.plan.speed.ram_bandwidth", lambda threads: bytes_per_s)
