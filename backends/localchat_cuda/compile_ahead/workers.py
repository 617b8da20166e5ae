"""Compiles a model's kernels ahead, in parallel processes, if Triton's cache lacks them.

This module starts processes of trace.py while the weights are read. They need no GPU, but memory and a core
each. A load waits for their first phase; the others go on while the model answers, and a step waits for its own
phase. A file in Triton's cache records that all kernels were compiled, so that later loads start no processes.
"""

import contextlib
import hashlib
import os
import pickle
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import triton

from localchat.backend_api.interface import Capabilities
from localchat.fit.hardware import read_limits, read_machine
from localchat_cuda.compile_ahead.phase import Phase
from localchat_cuda.compile_ahead.trace import CompileJob, all_shapes
from localchat_cuda.config.gguf import LayerFormats
from localchat_cuda.config.model import ModelConfig
from localchat_cuda.kernels import launch

_COMMAND = (sys.executable, "-m", "localchat_cuda.compile_ahead.trace")
_TIMEOUT_S = 900
_MAX_PROCESSES = 24
"""Limit of processes.

Each spends seconds on imports and tracing, and some kernels take ten times as long as others, so more do not
help."""
_PROCESS_BYTES = 1_000_000_000
"""Memory of a compiling process (0.7 GB measured)."""


class CompileAhead:
    """Compiling processes. A CPU, or a model whose kernels were compiled before, has none.

    As a context manager it stops them if the load fails."""

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
        self._ended = {phase: threading.Event() for phase in Phase}
        """Set once all processes have finished a phase, or have ended."""
        if device.type != "cuda" or launch.interpreted():
            return
        job = CompileJob(
            config, capabilities, launch.traits(device), head_int8, unpacked, head_bounds, formats
        )
        self._done_file = Path(triton.knobs.cache.dir) / f"localchat-{_digest(job)}"
        if self._done_file.exists():
            return
        claims = tempfile.TemporaryDirectory(prefix="localchat-kernels-")
        try:
            self._start(job._replace(claims=claims.name), _process_count())
        except OSError as error:
            claims.cleanup()
            notify(f"Kernels will compile on first use: {error.strerror or error}.")
            return
        count = len(self._processes)
        notify(
            f"Compiling this model's kernels with {count} processes; later loads skip this. "
            "Until it is done, several requests at once may wait for it."
        )
        threading.Thread(
            target=self._follow, args=(claims,), name="compile ahead", daemon=True
        ).start()

    def _start(self, job: CompileJob, count: int) -> None:
        """Start up to `count` processes. Raises OSError if none can be started."""
        text = pickle.dumps(job)
        for _ in range(count):
            try:
                process = subprocess.Popen(_COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            except OSError:
                if not self._processes:
                    raise
                return
            self._processes.append(process)
            assert process.stdin is not None
            # If the process has died, its exit status shows it.
            with contextlib.suppress(OSError):
                process.stdin.write(text)
                process.stdin.close()

    def _follow(self, claims: tempfile.TemporaryDirectory[str]) -> None:
        """Wait for the processes, phase by phase, and record that all have succeeded."""
        for phase in Phase:
            for process in self._processes:
                assert process.stdout is not None
                # Empty if the process has ended.
                process.stdout.readline()
            if phase is not Phase.ALL:
                self._ended[phase].set()
        statuses = [process.wait() for process in self._processes]
        for process in self._processes:
            assert process.stdout is not None
            process.stdout.close()
        if not any(statuses):
            # Without the file, the next load compiles again.
            with contextlib.suppress(OSError):
                self._done_file.parent.mkdir(parents=True, exist_ok=True)
                self._done_file.touch()
        claims.cleanup()
        self._ended[Phase.ALL].set()

    def __enter__(self) -> "CompileAhead":
        return self

    def __exit__(self, error: object, *_: object) -> None:
        if error is not None:
            self.stop()

    def finished(self) -> bool:
        """See phase.Compiling."""
        return not self._processes or self._ended[Phase.ALL].is_set()

    def wait(self, phase: Phase = Phase.ALL, timeout_s: float = _TIMEOUT_S) -> None:
        """See phase.Compiling. Kernels that failed are compiled on first use."""
        if self._processes:
            self._ended[phase].wait(timeout_s)

    def stop(self) -> None:
        """See phase.Compiling."""
        for process in self._processes:
            process.kill()
        if self._processes:
            self._ended[Phase.ALL].wait()


def _digest(job: CompileJob) -> str:
    """Return a digest of what compiled kernels depend on: the job, these sources, and Triton."""
    # The number of pages and a long context change from load to load, but they are not constants of kernels.
    # Steps that did not fit in the cache were not compiled, so the list of steps that fit is part of the
    # digest.
    capabilities = job.capabilities
    capabilities = replace(
        capabilities,
        context_tokens=min(capabilities.context_tokens, 2 * capabilities.max_step_tokens),
    )
    steps = [shape.tokens <= capabilities.kv_tokens for shape in all_shapes(capabilities)]
    windows = min(1, capabilities.window_blocks)
    job = job._replace(capabilities=replace(capabilities, kv_tokens=0, window_blocks=windows))
    digest = hashlib.sha256(f"{job}{triton.__version__}{steps}".encode())
    for path in sorted(Path(__file__).parent.parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _process_count() -> int:
    """Return one process per logical core that this process may use, if memory allows."""
    cores = len(os.sched_getaffinity(0))
    limit = read_limits().cpus
    if limit:
        cores = min(cores, int(limit))
    by_memory = read_machine().ram_free_bytes // 2 // _PROCESS_BYTES
    return max(1, min(cores, by_memory, _MAX_PROCESSES))
