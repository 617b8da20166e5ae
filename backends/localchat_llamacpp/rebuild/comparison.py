"""Compares a new library with the one in use: it must write the same text."""

import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from localchat_llamacpp.helper_process import complete_module
from localchat_llamacpp.library_source import VARIABLE
from localchat_llamacpp.rebuild.trial import TrialRequest, TrialResult

_TIE: Final = 0.05
_TIE_ON_GPU: Final = 0.5
"""Logit distance below which either of the two likeliest tokens is correct. Libraries round differently, and a
GPU computes in half precision."""
_TIMEOUT_S: Final = 300.0
_LAST_LINE: Final = 300

_SPIN: Final = "2000"
"""GOMP_SPINCOUNT. Threads that spin for longer starve each other on a busy machine."""

Try = Callable[[Path, TrialRequest], TrialResult]
"""Tries the library at a path. Raises TrialFailed."""


class TrialFailed(Exception):
    """A trial without a result. The text is the end of a sentence."""


class Verdict(NamedTuple):
    """Whether to use the new library, and why."""

    accepted: bool
    sentence: str


def try_library(library: Path, request: TrialRequest) -> TrialResult:
    """Try the library in a process of its own. Raises TrialFailed."""
    try:
        done = complete_module(
            "rebuild.trial",
            timeout_s=_TIMEOUT_S,
            stdin=msgspec.json.encode(request),
            environment={VARIABLE: str(library), "GOMP_SPINCOUNT": _SPIN},
        )
    except subprocess.TimeoutExpired as slow:
        raise TrialFailed(f"took longer than {_TIMEOUT_S:.0f} s") from slow
    try:
        return msgspec.json.decode(done.stdout, type=TrialResult)
    except msgspec.DecodeError as problem:
        raise TrialFailed(_ended(done)) from problem


def _ended(done: "subprocess.CompletedProcess[bytes]") -> str:
    if done.returncode < 0:
        try:
            name = signal.Signals(-done.returncode).name
        except ValueError:
            name = f"signal {-done.returncode}"
        return f"crashed ({name})"
    last = done.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
    return f"failed: {last[:_LAST_LINE] or f'status {done.returncode}'}"


def compare(
    current: Path | None, built: Path, request: TrialRequest, try_: Try = try_library
) -> Verdict:
    """Return whether `built` is correct.

    current: the library in use, None without one. request: the trial of the new library, while `current`
    computes on the CPU. Blocks for seconds. Raises OSError.
    """
    try:
        new = try_(built, request)
    except TrialFailed as problem:
        return Verdict(False, f"it {problem}")
    if current is None:
        return Verdict(True, "it is the only library here, and it works")
    try:
        old = _current(current, msgspec.structs.replace(request, gpu=False), try_)
    except TrialFailed as problem:
        return Verdict(True, f"the library in use {problem}, and this one does not")
    if difference := _difference(old, new, _TIE_ON_GPU if request.gpu else _TIE):
        return Verdict(False, difference)
    return Verdict(True, "it writes the same text as the library in use")


def _current(library: Path, request: TrialRequest, try_: Try) -> TrialResult:
    """Try the library in use: in safe mode if it crashes otherwise. Raises TrialFailed."""
    try:
        return try_(library, request)
    except TrialFailed:
        return try_(library, msgspec.structs.replace(request, safe_mode=True))


def _difference(old: TrialResult, new: TrialResult, tie: float) -> str:
    """Return how the new library's text is wrong. Empty if it is correct."""
    pairs = zip(old.tokens, new.tokens, old.margins, strict=False)
    for position, (before, now, margin) in enumerate(pairs, 1):
        if before != now:
            if margin < tie:
                return ""  # after a tie, another text is as correct
            return f"it generates another text: token {position} of {len(old.tokens)} differs"
    if len(old.tokens) == len(new.tokens):
        return ""
    return "it generates a text of another length"
