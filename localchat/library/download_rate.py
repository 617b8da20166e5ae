"""How fast this machine's network was in the last pull: what download times are told by."""

from pathlib import Path
from typing import Annotated, Final, NamedTuple

import msgspec
from msgspec import Meta

from localchat.atomic import write_text

_FILE: Final = "download-rate.json"
ASSUMED_BYTES_PER_S: Final = 12_500_000
"""100 Mbit/s."""
_LEAST_BYTES: Final = 20_000_000
"""Less says more of the first seconds than of the line."""


class DownloadRate(NamedTuple):
    """`measured`: by the last pull; otherwise it is assumed, and said to be."""

    bytes_per_s: float
    measured: bool


class _Kept(msgspec.Struct, frozen=True):
    bytes_per_s: Annotated[float, Meta(gt=0)]


def download_rate(state_dir: Path) -> DownloadRate:
    """What is known, else the assumption."""
    try:
        kept = msgspec.json.decode((state_dir / _FILE).read_bytes(), type=_Kept)
    except (OSError, msgspec.DecodeError):
        return DownloadRate(ASSUMED_BYTES_PER_S, False)
    return DownloadRate(kept.bytes_per_s, True)


def remember_rate(state_dir: Path, fetched_bytes: int, elapsed_s: float) -> None:
    """After a pull. Raises OSError."""
    if fetched_bytes >= _LEAST_BYTES and elapsed_s > 0:
        kept = msgspec.json.encode(_Kept(fetched_bytes / elapsed_s))
        write_text(state_dir / _FILE, f"{kept.decode()}\n")
