"""Which native builds are known to crash here, remembered between runs.

A build is named by Backend.build_key (library file and CPU), so a rebuilt library is tried afresh.
"""

from pathlib import Path

import msgspec

from localchat.state_file import StateFile


class _Crashes(msgspec.Struct, frozen=True):
    crashed_in_warmup: tuple[str, ...] = ()


class CrashRecord:
    """A small JSON list on disk. A file that cannot be read counts as empty: the worst that follows is one
    more crash in warm-up, which is survived. `path` None: remembered for this process only."""

    def __init__(self, path: Path | None) -> None:
        self._file = StateFile(path, _Crashes, _Crashes())
        self._known = self._file.read().crashed_in_warmup
        self._tried = ""

    def known(self) -> tuple[str, ...]:
        return (*self._known, self._tried) if self._tried else self._known

    def try_out(self, build: str) -> None:
        """Take `build` for one that crashes until it is settled whether that was the reason."""
        self._tried = build

    def settle(self, *, helped: bool) -> bool:
        """What was tried has answered, and is remembered, or has crashed in safe mode too: then the build is
        not to blame, and other models are spared its slower way. False: nothing was tried. Raises OSError
        where it cannot be written; it then holds for this process."""
        tried, self._tried = self._tried, ""
        if tried and helped:
            self.add(tried)
        return bool(tried)

    def add(self, build: str) -> None:
        """Remember `build`; written at once, atomically."""
        on_disk = self._file.read().crashed_in_warmup if self._file.path else self._known
        self._known = (*(known for known in on_disk if known != build), build)
        self._file.write(_Crashes(self._known))
