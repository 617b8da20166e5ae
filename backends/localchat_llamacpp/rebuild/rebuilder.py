"""Rebuilds llama.cpp: build, trial, and the switch to the new library."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from localchat.backend_api.interface import RebuildOffer, RebuildOutcome, RebuildProgress
from localchat.errors import LocalchatError
from localchat_llamacpp.build_advice import best_offer, build_minutes, has_amx
from localchat_llamacpp.library_source import BINDING_VERSION, VARIABLE, find_library
from localchat_llamacpp.rebuild.builder import (
    KINDS,
    BuildRequest,
    build,
    builds_with_gcc,
    missing_tools,
)
from localchat_llamacpp.rebuild.comparison import Verdict, compare
from localchat_llamacpp.rebuild.store import BuildStore

Report = Callable[[RebuildProgress], None]
Build = Callable[[BuildRequest, Path, Path, Report], Path]
Compare = Callable[[Path | None, Path, bool], Verdict]


class LlamaCppRebuilder:
    """Builds llama-cpp-python's llama.cpp for this machine into a folder of its own."""

    kinds: Sequence[str] = KINDS

    def __init__(
        self,
        store: BuildStore | None = None,
        build: Build = build,
        compare: Compare = compare,
    ) -> None:
        self._store = store or BuildStore()
        self._build = build
        self._compare = compare

    def offer(self) -> RebuildOffer | None:
        """Return the build that would help most here. None if the library in use is fine. Loads no library."""
        return best_offer()

    def minutes(self, kind: str) -> float:
        """Return the expected time of a build on this machine."""
        return build_minutes(kind)

    def rebuild(self, kind: str, report: Report) -> RebuildOutcome:
        """Build a library, try it, and use it if it is correct. See Rebuilder."""
        if os.environ.get(VARIABLE):
            raise LocalchatError(
                f"{VARIABLE} names the library to use, so a build would not be used",
                hint=f"unset {VARIABLE} first",
            )
        if missing := missing_tools(kind):
            raise LocalchatError(f"llama.cpp cannot be built for {kind} here", hint=missing)
        request = BuildRequest(kind, BINDING_VERSION, has_amx() and builds_with_gcc())
        with self._store.locked(), self._store.workspace() as work:
            library = self._build(request, work, self._store.log, report)
            report(RebuildProgress("trying it"))
            current = None
            if in_use := find_library().library:
                current = in_use.file
            verdict = self._compare(current, library, kind != "cpu")
            if verdict.accepted:
                self._store.take(library.parent, library.name, request.version, kind)
        return RebuildOutcome(verdict.accepted, verdict.sentence)

    def undo(self) -> bool:
        """Remove the build in use. False without one."""
        with self._store.locked():
            return self._store.remove()
