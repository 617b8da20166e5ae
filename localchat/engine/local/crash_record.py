"""Persistent record of native builds that crashed on this machine.

A build is identified by Backend.build_key (library file and CPU), so a rebuilt library is tried again.
"""

from pathlib import Path

import msgspec

from localchat.state_file import StateFile


class _Crashes(msgspec.Struct, frozen=True):
    crashed_in_warmup: tuple[str, ...] = ()


class CrashRecord:
    """A small JSON list on disk.

    An unreadable file counts as empty. The worst consequence is another crash during warm-up, after which the
    engine restarts.
    """

    def __init__(self, path: Path | None) -> None:
        """path: None keeps the record for this process only."""
        self._file = StateFile(path, _Crashes, _Crashes())
        self._builds = self._file.read().crashed_in_warmup
        self._tried = ""

    def known(self) -> tuple[str, ...]:
        if self._tried:
            return (*self._builds, self._tried)
        return self._builds

    def try_safe_mode(self, build: str) -> None:
        """Count `build` as crashing until `resolve` reports whether safe mode helped."""
        self._tried = build

    def resolve(self, *, helped: bool) -> bool:
        """Record or drop the build under trial. Return False without one.

        If safe mode did not help, the build is not the cause, and other models need not run in safe mode.
        Raises OSError if the record cannot be written. It still applies to this process.
        """
        tried = self._tried
        self._tried = ""
        if tried and helped:
            self.add(tried)
        return bool(tried)

    def add(self, build: str) -> None:
        """Record `build` immediately and atomically."""
        on_disk = self._file.read().crashed_in_warmup if self._file.path else self._builds
        self._builds = (*(name for name in on_disk if name != build), build)
        self._file.write(_Crashes(self._builds))
