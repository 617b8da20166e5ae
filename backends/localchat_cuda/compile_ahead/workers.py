"""Compiles a model's kernels ahead, in parallel processes, if Triton's cache lacks them.

This module gives a job to process.py while the weights are read. Its processes need no GPU, but memory and a
core each. A load waits for their first phase; the others go on while the model answers, and a step waits for
its own phase. Files in Triton's cache record the phases that were compiled. If only later phases are missing, a
load starts the job late, because a program that soon ends would start it in vain.
"""

import hashlib
import os
import pickle
import tempfile
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import triton

from localchat.fit.hardware import read_limits, read_machine
from localchat_cuda.compile_ahead.job import CompileJob, Phase, all_shapes, phase_line
from localchat_cuda.compile_ahead.process import CompileProcess, touch

_TIMEOUT_S = 900
_LATE_S = 15.0
"""Time from the start of a load to that of the processes, if only later phases are missing."""
_MAX_PROCESSES = 24
"""Limit of processes.

Each spends a second on tracing, and some kernels take ten times as long as others, so more do not
help."""
_PROCESS_BYTES = 1_000_000_000
"""Memory of a compiling process (0.7 GB measured)."""


class CompileAhead:
    """Compiling processes. A CPU, or a model whose kernels were compiled before, has none.

    As a context manager it stops them if the load fails."""

    def __init__(
        self,
        job: CompileJob | None,
        notify: Callable[[str], None],
        process: CompileProcess | None = None,
    ) -> None:
        """`job`: None on a CPU. `process`: has perhaps been started. None: a new one."""
        self._process = process or CompileProcess()
        self._ended = {phase: threading.Event() for phase in Phase}
        """Set once the processes have finished a phase, or have ended."""
        self._needed = threading.Event()
        """Set once the job should run, or will never be needed."""
        self._lock = threading.Lock()
        self._claims: tempfile.TemporaryDirectory[str] | None = None
        """Folder of claims, from the attempt to start the processes on."""
        self._stopped = False
        self._notify = notify
        if job is None:
            self._end()
            return
        self._job = job
        self._digest = _digest(job)
        if self._record(Phase.ALL).exists():
            self._process.remember()
            self._process.kill()
            self._process.wait()
            self._end()
            return
        if self._record(Phase.ONE_ROW).exists():
            self._process.remember()
            self._ended[Phase.ONE_ROW].set()
        else:
            self._needed.set()
            self._start()
        threading.Thread(target=self._run, name="compile ahead", daemon=True).start()

    def _record(self, phase: Phase) -> Path:
        """File that exists if the kernels of a phase were compiled."""
        return Path(triton.knobs.cache.dir) / f"localchat-{self._digest}-{phase.value}"

    def _start(self) -> None:
        """Start the job, unless it was stopped. If that fails, kernels compile on first use."""
        with self._lock:
            if self._stopped or self._claims is not None:
                return
            self._claims = tempfile.TemporaryDirectory(prefix="localchat-kernels-")
            count = _process_count()
            job = self._job._replace(claims=self._claims.name, processes=count)
            try:
                self._process.send(pickle.dumps(job))
            except OSError as error:
                self._claims.cleanup()
                self._notify(f"Kernels will compile on first use: {error.strerror or error}.")
                return
        self._notify(
            f"Compiling this model's kernels with {count} processes; later loads skip this. "
            "Until it is done, requests are answered one after the other."
        )

    def _run(self) -> None:
        """Start the job if it does not run yet. Record the phases that it compiles."""
        self._needed.wait(_LATE_S)
        self._start()
        for phase in Phase:
            if self._process.read_line() == phase_line(phase, ok=True).encode():
                touch(self._record(phase))
                self._process.remember()
            self._ended[phase].set()
        self._process.wait()
        if self._claims is not None:
            self._claims.cleanup()

    def _end(self) -> None:
        for phase in Phase:
            self._ended[phase].set()

    def __enter__(self) -> "CompileAhead":
        return self

    def __exit__(self, error: object, *_: object) -> None:
        if error is not None:
            self.stop()

    def finished(self) -> bool:
        """Return True once all kernels are compiled, or will be on first use."""
        return self.reached(Phase.ALL)

    def reached(self, phase: Phase) -> bool:
        """Return True once the kernels of a phase and of earlier ones are compiled."""
        return self._ended[phase].is_set()

    def hurry(self) -> None:
        """Start to compile now, although the program may soon end."""
        self._needed.set()

    def wait(self, phase: Phase = Phase.ALL) -> None:
        """Wait until the kernels of a phase and of earlier ones are compiled.

        Those that failed are compiled on first use."""
        if not self.reached(phase):
            self.hurry()
            self._ended[phase].wait(_TIMEOUT_S)

    def idle(self, seconds: float) -> None:
        """Let time pass while nothing else is to do. Returns early once all kernels are compiled."""
        self._ended[Phase.ALL].wait(seconds)

    def stop(self) -> None:
        """End the processes. Idempotent."""
        with self._lock:
            self._stopped = True
            self._process.kill()
        self._needed.set()
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
