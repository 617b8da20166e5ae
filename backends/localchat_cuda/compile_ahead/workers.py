"""Compiles a model's kernels ahead, in parallel processes, if Triton's cache lacks them.

trace.py compiles; this module starts its processes while the weights are read, and waits for them. They need
no GPU, but memory and a core each. A file in Triton's cache records that all were compiled: later loads start
none.
"""

import contextlib
import hashlib
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import triton

from localchat.backend_api.interface import Capabilities
from localchat.fit.hardware import read_limits, read_machine
from localchat_cuda.compile_ahead.trace import CompileJob, all_shapes
from localchat_cuda.config.gguf import LayerFormats
from localchat_cuda.config.model import ModelConfig
from localchat_cuda.kernels import launch

_COMMAND = (sys.executable, "-m", "localchat_cuda.compile_ahead.trace")
_TIMEOUT_S = 900
_MAX_PROCESSES = 24
"""More do not help: each spends seconds on imports and on tracing, and some kernels take ten times as long as
others."""
_PROCESS_BYTES = 1_000_000_000
"""Memory of a compiling process (0.7 GB measured)."""


class CompileAhead:
    """Compiling processes; none if all kernels were compiled before, or for a CPU."""

    def __init__(
        self,
        config: ModelConfig,
        capabilities: Capabilities,
        device: torch.device,
        notify: Callable[[str], None],
        *,
        head_int8: bool = False,
        unpacked: bool = False,
        head_bounds: bool = False,
        formats: LayerFormats = (),
    ) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._claims: tempfile.TemporaryDirectory[str] | None = None
        if device.type != "cuda" or launch.interpreted():
            return
        job = CompileJob(
            config, capabilities, launch.traits(device), head_int8, unpacked, head_bounds, formats
        )
        self._done_file = Path(triton.knobs.cache.dir) / f"localchat-{_digest(job)}"
        if self._done_file.exists():
            return
        try:
            self._start(job, _process_count())
        except OSError as error:
            notify(f"Kernels will compile on first use: {error.strerror or error}.")
        if self._processes:
            count = len(self._processes)
            notify(f"Compiling this model's kernels with {count} processes; later loads skip this.")

    def _start(self, job: CompileJob, count: int) -> None:
        """Start `count` processes; fewer share the same work. Raises OSError if none could be started."""
        self._claims = tempfile.TemporaryDirectory(prefix="localchat-kernels-")
        text = pickle.dumps(job._replace(claims=self._claims.name))
        for _ in range(count):
            try:
                process = subprocess.Popen(
                    _COMMAND, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
                )
            except OSError:
                if not self._processes:
                    raise
                return
            self._processes.append(process)
            assert process.stdin is not None
            with contextlib.suppress(OSError):  # it died: its exit status shows it
                process.stdin.write(text)
                process.stdin.close()

    def __enter__(self) -> "CompileAhead":
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def wait(self) -> None:
        """Wait until all are compiled. A kernel that failed is compiled when it is first needed."""
        if not self._processes:
            return
        try:
            statuses = [each.wait(_TIMEOUT_S) for each in self._processes]
            if not any(statuses):
                with contextlib.suppress(OSError):  # compiled again next time
                    self._done_file.parent.mkdir(parents=True, exist_ok=True)
                    self._done_file.touch()
        except subprocess.TimeoutExpired:
            pass
        finally:
            self.stop()

    def stop(self) -> None:
        """Kill processes that still compile. Idempotent."""
        for each in self._processes:
            each.kill()
            each.wait()
        if self._claims is not None:
            self._claims.cleanup()
        self._claims = None


def _digest(job: CompileJob) -> str:
    """A digest of all that compiled kernels depend on: the job, these sources, Triton."""
    # The number of pages is no constant of a kernel and changes from load to load, as does a long context.
    # But steps that had no room in the cache were not compiled, so the list of those is part of the digest.
    capabilities = job.capabilities
    capabilities = replace(
        capabilities,
        context_tokens=min(capabilities.context_tokens, 2 * capabilities.max_step_tokens),
    )
    steps = [shape.tokens <= capabilities.kv_tokens for shape in all_shapes(capabilities)]
    windows = min(1, capabilities.window_blocks)
    job = job._replace(capabilities=replace(capabilities, kv_tokens=0, window_blocks=windows))
    found = hashlib.sha256(f"{job}{triton.__version__}{steps}".encode())
    for path in sorted(Path(__file__).parent.parent.rglob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


def _process_count() -> int:
    """One per logical core that this process may use, if memory allows."""
    allowed = len(os.sched_getaffinity(0))
    limit = read_limits().cpus
    cores = min(allowed, int(limit)) if limit else allowed
    by_memory = read_machine().ram_free_bytes // 2 // _PROCESS_BYTES
    return max(1, min(cores, by_memory, _MAX_PROCESSES))
