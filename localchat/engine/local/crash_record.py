"""Which native builds are known to crash here, remembered between runs.

A build is named by Backend.build_key (library file and CPU), so a rebuilt library is tried afresh.
"""

import json
import os
import tempfile
from pathlib import Path


class CrashRecord:
    """A small JSON list on disk. A file that cannot be read counts as empty: the worst that follows is one
    more crash in warm-up, which is survived. `path` None: remembered for this process only."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._known = self._read()
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
        known = (*(b for b in self._read() if b != build), build)
        self._known = known
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=self._path.parent, prefix=self._path.name)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump({"crashed_in_warmup": known}, file, indent=1)
        Path(name).replace(self._path)

    def _read(self) -> tuple[str, ...]:
        if self._path is None:
            return getattr(self, "_known", ())
        try:
            content = json.loads(self._path.read_text(encoding="utf-8"))
            return tuple(str(build) for build in content["crashed_in_warmup"])
        except (OSError, ValueError, TypeError, KeyError):
            return ()
