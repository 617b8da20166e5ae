"""Has the kernels of a model compiled ahead, in parallel, where Triton's cache lacks them.

What is compiled, and how, says rehearsal.py; here its processes are started, while the weights are read, and
waited for. They need no GPU, but memory and a core each. A file in Triton's cache says that all were compiled:
later loads start none.
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
from localchat_cuda.kernels import launch
from localchat_cuda.model_config import ModelConfig

_COMMAND = (sys.executable, "-m", "localchat_cuda.compile_ahead.trace")
_PATIENCE_S = 900
_MOST_PROCESSES = 24
"""Each begins with seconds of imports and of its own walk; some kernels take ten times as long as others."""
_PROCESS_BYTES = 1_000_000_000
"""What a compiling process takes of the machine's memory (0.7 GB where it was measured)."""


class CompileAhead:
    """Processes that compile; none where all was compiled before, and for a CPU."""

    def __init__(
        self, config: ModelConfig, capabilities: Capabilities, device: torch.device,
        say: Callable[[str], None], *, head_int8: bool = False,
    ) -> None:  # fmt: skip
        self._started: list[subprocess.Popen[bytes]] = []
        self._claims: tempfile.TemporaryDirectory[str] | None = None
        if device.type != "cuda" or launch.interpreted():
            return
        job = CompileJob(config, capabilities, launch.traits(device), head_int8)
        self._mark = Path(triton.knobs.cache.dir) / f"localchat-{_digest(job)}"
        if self._mark.exists():
            return
        try:
            self._start(job, _processes())
        except OSError as error:
            say(f"Kernels are compiled when they are first needed: {error.strerror or error}.")
        if self._started:
            count = len(self._started)
            say(f"The kernels for this model are compiled, once, by {count} processes.")

    def _start(self, job: CompileJob, count: int) -> None:
        """Start so many; those that run share the work of the others. Raises OSError where none could be
        started."""
        self._claims = tempfile.TemporaryDirectory(prefix="localchat-kernels-")
        text = pickle.dumps(job._replace(claims=self._claims.name))
        for _ in range(count):
            try:
                one = subprocess.Popen(_COMMAND, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
            except OSError:
                if not self._started:
                    raise
                return
            self._started.append(one)
            assert one.stdin is not None
            with contextlib.suppress(OSError):  # it died: its status says so
                one.stdin.write(text)
                one.stdin.close()

    def __enter__(self) -> "CompileAhead":
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def wait(self) -> None:
        """Until all are compiled. What failed is compiled when it is first needed."""
        if not self._started:
            return
        try:
            statuses = [each.wait(_PATIENCE_S) for each in self._started]
            if not any(statuses):
                with contextlib.suppress(OSError):  # asked again next time
                    self._mark.parent.mkdir(parents=True, exist_ok=True)
                    self._mark.touch()
        except subprocess.TimeoutExpired:
            pass
        finally:
            self.stop()

    def stop(self) -> None:
        """End what still compiles. Idempotent."""
        for each in self._started:
            each.kill()
            each.wait()
        if self._claims is not None:
            self._claims.cleanup()
        self._claims = None


def _digest(job: CompileJob) -> str:
    """Names all that compiled kernels depend on: the script, these sources, Triton."""
    # how many pages there are is no constant of a kernel, and changes from load to load; as a long context.
    # But steps that had no room in the cache were not rehearsed.
    capabilities = job.capabilities
    capabilities = replace(
        capabilities,
        context_tokens=min(capabilities.context_tokens, 2 * capabilities.max_step_tokens),
    )
    steps = [shape.tokens <= capabilities.kv_tokens for shape in all_shapes(capabilities)]
    job = job._replace(capabilities=replace(capabilities, kv_tokens=0))
    found = hashlib.sha256(f"{job}{triton.__version__}{steps}".encode())
    for path in sorted(Path(__file__).parent.parent.rglob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


def _processes() -> int:
    """One for each logical core that this process may use, as far as memory goes."""
    allowed, limit = len(os.sched_getaffinity(0)), read_limits().cpus
    cores = min(allowed, int(limit)) if limit else allowed
    by_memory = read_machine().ram_free_bytes // 2 // _PROCESS_BYTES
    return max(1, min(cores, by_memory, _MOST_PROCESSES))
