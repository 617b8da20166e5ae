"""Compares a new library with the one in use: the guide must give the same answer with both.

Each library answers in a localchat of its own, with its own folders, because it may crash.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from localchat.config.paths import CRASH_RECORD, find_paths
from localchat_llamacpp.library_source import VARIABLE

_QUESTION: Final = "What is a KV cache, and why does a model need one?"
_ARGUMENTS: Final = (
    *("-m", "guide", "--backend", "llamacpp", "--no-attach", "--no-history", "--quiet"),
    *("--temperature", "0", "--max-tokens", "48"),
)
_ON_CPU: Final = ("--gpu-layers", "0")
_ON_GPU: Final = ("--gpu-layers", "all", "--require-gpu")
_SAME_CHARACTERS: Final = 60
"""Start of the answer that must be equal. Libraries round differently, so a later word may differ by right."""
_TIMEOUT_S: Final = 300.0
_PREFIX: Final = "localchat: "
_VARIABLES: Final = "LOCALCHAT_"

Try = Callable[[Path, bool], str]
"""Returns the answer that a library computes, on a GPU if the flag is set. Raises TrialFailed."""


class TrialFailed(Exception):
    """A trial without an answer. The text is the end of a sentence."""


class Verdict(NamedTuple):
    """Whether to use the new library, and why."""

    accepted: bool
    sentence: str


def try_library(library: Path, on_gpu: bool) -> str:
    """Return the guide's answer with a library. Raises TrialFailed."""
    placement: tuple[str, ...] = _ON_CPU
    if on_gpu:
        placement = _ON_GPU
    with tempfile.TemporaryDirectory(prefix="localchat-") as folder:
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith(_VARIABLES)
        }
        environment |= {
            VARIABLE: str(library),
            "LOCALCHAT_DATA_DIR": folder,
            "LOCALCHAT_CONFIG": f"{folder}/settings.toml",
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        }
        try:
            done = subprocess.run(
                [sys.executable, "-m", "localchat", *_ARGUMENTS, *placement, _QUESTION],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_S,
                check=False,
                env=environment,
            )
        except subprocess.TimeoutExpired as slow:
            raise TrialFailed(f"took longer than {_TIMEOUT_S:.0f} s") from slow
        crashed = (find_paths(environment).state_dir / CRASH_RECORD).exists()
    if done.returncode or not done.stdout.strip():
        lines = [line for line in done.stderr.splitlines() if line.startswith(_PREFIX)]
        lines.append(f"status {done.returncode}")
        raise TrialFailed(f"failed: {lines[0].removeprefix(_PREFIX)}")
    # The engine restarts such a library without its faster kernels, and then it answers.
    if crashed:
        raise TrialFailed("crashed before its first answer, and works in safe mode only")
    return done.stdout.strip()


def compare(current: Path | None, built: Path, on_gpu: bool, try_: Try = try_library) -> Verdict:
    """Return whether `built` is correct.

    current: the library in use, which is tried on the CPU; None without one. Blocks for seconds. Raises
    OSError.
    """
    try:
        new = try_(built, on_gpu)
    except TrialFailed as problem:
        return Verdict(False, f"it {problem}")
    if current is None:
        return Verdict(True, "it is the only library here, and it works")
    try:
        old = try_(current, False)
    except TrialFailed as problem:
        return Verdict(True, f"the library in use {problem}, and this one does not")
    if old[:_SAME_CHARACTERS] != new[:_SAME_CHARACTERS]:
        return Verdict(False, f"it generates another text: {new[:_SAME_CHARACTERS]!r}")
    return Verdict(True, "it writes the same text as the library in use")
