"""The process that compiles a model's kernels, as the load sees it.

It takes seconds to import torch and Triton, as the load itself does. So it is started before the load imports
them, unless a file in Triton's cache says that the model's first kernels are compiled.
"""

import contextlib
import hashlib
import os
import signal
import subprocess
import sys
from pathlib import Path

from localchat_cuda.environment import installed_version

_COMMAND = (sys.executable, "-m", "localchat_cuda.compile_ahead")
_PACKAGE = Path(__file__).parents[1]


class CompileProcess:
    """A process of `localchat_cuda.compile_ahead`, which waits for a job.

    As a context manager it ends the process if the load fails. This module does not import torch."""

    def __init__(self, model: Path | None = None) -> None:
        """`model`: start now if this model's kernels may have to be compiled; None: start on `send`."""
        self._process: subprocess.Popen[bytes] | None = None
        self._record: Path | None = None
        if model is None:
            return
        self._record = _cache_folder() / f"localchat-{_digest(model)}-loaded"
        if not self._record.exists():
            # Without this process, kernels compile later or on first use.
            with contextlib.suppress(OSError):
                self._process = _start()

    def __enter__(self) -> "CompileProcess":
        return self

    def __exit__(self, error: object, *_: object) -> None:
        if error is not None:
            self.kill()
            self.wait()

    def send(self, job: bytes) -> None:
        """Make the process compile a pickled CompileJob. Raises OSError if it cannot be started."""
        if self._process is None:
            self._process = _start()
        assert self._process.stdin is not None
        # If the process has died, its output ends.
        with contextlib.suppress(OSError):
            self._process.stdin.write(job)
            self._process.stdin.close()

    def read_line(self) -> bytes:
        """Wait for a line of the process. Empty once it has ended."""
        if self._process is None or self._process.stdout is None:
            return b""
        return self._process.stdout.readline()

    def remember(self) -> None:
        """Record that the first kernels of the model are compiled."""
        if self._record is not None:
            touch(self._record)

    def kill(self) -> None:
        """End the process and those that it has forked. Idempotent."""
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def wait(self) -> None:
        """Wait for the end of the process. No other thread may be in `read_line`."""
        if self._process is None:
            return
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


def touch(record: Path) -> None:
    """Create an empty file and its folder, if the disk allows."""
    with contextlib.suppress(OSError):
        record.parent.mkdir(parents=True, exist_ok=True)
        record.touch()


def _start() -> "subprocess.Popen[bytes]":
    # A process with threads cannot be forked safely, and numpy's library starts some.
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    # A group of its own, so that all processes can be ended together.
    return subprocess.Popen(
        _COMMAND,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        process_group=0,
    )


def _cache_folder() -> Path:
    """Return Triton's cache folder, without importing Triton."""
    home = os.environ.get("TRITON_HOME") or Path.home()
    return Path(os.environ.get("TRITON_CACHE_DIR") or Path(home) / ".triton" / "cache")


def _digest(model: Path) -> str:
    """Return a digest of the model's path, the libraries and this package's files."""
    libraries = map(installed_version, ("torch", "triton"))
    seen: list[object] = [str(model.resolve()), *libraries]
    seen += [(path.name, path.stat().st_mtime_ns) for path in sorted(_PACKAGE.rglob("*.py"))]
    return hashlib.sha256(repr(seen).encode()).hexdigest()[:16]
