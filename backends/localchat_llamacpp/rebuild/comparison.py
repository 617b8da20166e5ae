"""Compares a new library with the one in use: equal text, and speeds from alternating processes."""

import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from localchat_llamacpp.helper_process import complete_module
from localchat_llamacpp.library_source import VARIABLE
from localchat_llamacpp.rebuild.trial import TrialRequest, TrialResult

ROUNDS: Final = 3
MAX_ROUNDS: Final = 8
"""Limit on the rounds of each library.

More than three run if the best two of a speed differ, because other programs only slow a round down (a load of
13 on two cores: by a factor of 2 either way in three rounds).
"""
_ALIKE: Final = 0.95
FASTER: Final = 1.05
"""Factor by which prefill or decode must be faster, and the other not slower."""
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
    """Whether to take the new library."""

    better: bool
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
    current: Path | None,
    built: Path,
    request: TrialRequest,
    report: Callable[[int, int], None],
    try_: Try = try_library,
) -> Verdict:
    """Return whether `built` is correct, and faster than `current`.

    current: the library in use, None without one. request: the trial of the new library, while `current`
    computes on the CPU. report: called with the numbers of finished and of all trials. Blocks for about half a
    minute. Raises OSError.
    """
    here = msgspec.structs.replace(request, gpu=False)
    old: list[TrialResult] = []
    new: list[TrialResult] = []
    for number in range(MAX_ROUNDS):
        if number >= ROUNDS and _settled(new) and _settled(old):
            break
        report(2 * number, 2 * MAX_ROUNDS)
        try:
            new.append(try_(built, request))
        except TrialFailed as problem:
            return Verdict(False, f"it {problem}")
        report(2 * number + 1, 2 * MAX_ROUNDS)
        if current is None:
            continue
        try:
            here = _working(current, here, try_) if number == 0 else here
            old.append(try_(current, here))
        except TrialFailed as problem:
            return Verdict(True, f"the library in use {problem}, and this one does not")
    if not old:
        return Verdict(True, "it is the only library here, and it works")
    if difference := _difference(old[0], new[0], _TIE_ON_GPU if request.gpu else _TIE):
        return Verdict(False, difference)
    return _faster(old, new)


def _working(current: Path, request: TrialRequest, try_: Try) -> TrialRequest:
    """Return the request for the library in use: in safe mode if it crashes otherwise."""
    try:
        try_(current, request)
    except TrialFailed:
        return msgspec.structs.replace(request, safe_mode=True)
    return request


def _settled(results: list[TrialResult]) -> bool:
    """Return True if the two best results of each speed agree."""
    for speeds in (
        sorted(result.prefill_tokens_per_s for result in results),
        sorted(result.decode_tokens_per_s for result in results),
    ):
        if len(speeds) > 1 and speeds[-2] < _ALIKE * speeds[-1]:
            return False
    return True


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


def _faster(old: list[TrialResult], new: list[TrialResult]) -> Verdict:
    prefill = [max(result.prefill_tokens_per_s for result in results) for results in (old, new)]
    decode = [max(result.decode_tokens_per_s for result in results) for results in (old, new)]
    prefill_ratio = prefill[1] / prefill[0]
    decode_ratio = decode[1] / decode[0]
    figures = f"prompts {_ratio(prefill)}, answers {_ratio(decode)}, on a model of 60 MB in Q4_K"
    if max(prefill_ratio, decode_ratio) < FASTER:
        return Verdict(False, f"it is no faster: {figures}")
    if min(prefill_ratio, decode_ratio) < 1 / FASTER:
        return Verdict(False, f"it is slower in one of the two: {figures}")
    return Verdict(True, figures)


def _ratio(speeds: list[float]) -> str:
    before, now = speeds
    return f"{now / before:.2f} times as fast ({before:.0f} to {now:.0f} tok/s)"
