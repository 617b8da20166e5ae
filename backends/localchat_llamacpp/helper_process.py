"""Runs a module of this package in a process of its own.

Native code may crash, and callers load none of it.
"""

import os
import subprocess
import sys
from collections.abc import Mapping


def run_module(
    module: str,
    *,
    timeout_s: float,
    stdin: bytes = b"",
    environment: Mapping[str, str] | None = None,
) -> bytes:
    """Return the stdout of `python -m localchat_llamacpp.MODULE`, even if it crashed or timed out.

    environment: variables that replace those of this process. Raises OSError.
    """
    try:
        return complete_module(
            module, timeout_s=timeout_s, stdin=stdin, environment=environment
        ).stdout
    except subprocess.TimeoutExpired as slow:
        return slow.stdout or b""


def complete_module(
    module: str,
    *,
    timeout_s: float,
    stdin: bytes = b"",
    environment: Mapping[str, str] | None = None,
) -> "subprocess.CompletedProcess[bytes]":
    """Run a module, and return its result. Raises OSError, subprocess.TimeoutExpired."""
    return subprocess.run(
        [sys.executable, "-m", f"localchat_llamacpp.{module}"],
        input=stdin,
        capture_output=True,
        timeout=timeout_s,
        check=False,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "GGML_NO_BACKTRACE": "1",
            **(environment or {}),
        },
    )
