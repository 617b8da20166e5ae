"""Record of native builds that crashed on this machine, kept between runs.

A build is named by Backend.build_key (library file and CPU), so a rebuilt library is tried again.
"""

from pathlib import Path

import msgspec

from localchat.state_file import StateFile


class _Crashes(msgspec.Struct, frozen=True):
    crashed_in_warmup: tuple[str, ...] = ()


class CrashRecord:
    """A small JSON list on disk.

    A file that cannot be read counts as empty: the worst that follows is one more crash in warm-up, which is
    survived.
    """

    def __init__(self, path: Path | None) -> None:
        """`path` None: kept for this process only."""
        self._file = StateFile(path, _Crashes, _Crashes())
        self._known = self._file.read().crashed_in_warmup
        self._tried = ""

    def known(self) -> tuple[str, ...]:
        if self._tried:
            return (*self._known, self._tried)
        return self._known

    def try_safe_mode(self, build: str) -> None:
        """Treat `build` as one that crashes until `resolve` reports whether safe mode helped."""
        self._tried = build

    def resolve(self, *, helped: bool) -> bool:
        """Keep or drop the build that is being tried; False: none was.

        If safe mode did not help the build is not to blame, and other models are spared its slower path.
        Raises OSError where the record cannot be written; it then holds for this process.
        """
        tried = self._tried
        self._tried = ""
        if tried and helped:
            self.add(tried)
        return bool(tried)

    def add(self, build: str) -> None:
        """Record `build`; written at once, atomically."""
        on_disk = self._file.read().crashed_in_warmup if self._file.path else self._known
        self._known = (*(known for known in on_disk if known != build), build)
        self._file.write(_Crashes(self._known))
