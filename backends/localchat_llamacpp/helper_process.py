"""Runs a module of this package in a process of its own.

Native code may crash, and callers load none of it.
"""

import os
import subprocess
import sys


def run_module(module: str, *, timeout_s: float) -> bytes:
    """Return the stdout of `python -m localchat_llamacpp.MODULE`, even if it crashed or timed out.

    Raises OSError.
    """
    try:
        return subprocess.run(
            [sys.executable, "-m", f"localchat_llamacpp.{module}"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
            check=False,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
                "GGML_NO_BACKTRACE": "1",
            },
        ).stdout
    except subprocess.TimeoutExpired as slow:
        return slow.stdout or b""
