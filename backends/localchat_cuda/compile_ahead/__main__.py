"""Compiles a model's kernels: `python -m localchat_cuda.compile_ahead < JOB`, a pickled CompileJob.

The process imports torch and Triton while it waits for the job. Then it forks one process per core, which
need no imports of their own. It prints a line for each phase that all of them have finished.
"""

import os
import pickle
import signal
import sys
import threading
import time
import traceback
from typing import IO

from triton.runtime.cache import triton_key

from localchat_cuda.compile_ahead.job import CompileJob, Phase, phase_line
from localchat_cuda.compile_ahead.trace import compile_all
from localchat_cuda.compile_ahead.triton_cache import hash_bottom_up

_NICENESS = 10
"""Niceness of the forked processes once the load no longer waits for them."""
_PARENT_CHECK_S = 0.5


def main() -> int:
    """Compile the job from stdin. Return 0 if all kernels could be compiled, or if there is no job."""
    parent_pid = os.getppid()
    # Cached, so that the forked processes need not compute these.
    triton_key()
    hash_bottom_up()
    try:
        job = pickle.load(sys.stdin.buffer)  # noqa: S301 (written by workers.py)
    except EOFError:
        return 0
    outputs = _fork_all(job)
    threading.Thread(target=_end_with_parent, args=(parent_pid,), daemon=True).start()
    all_ok = True
    for phase in Phase:
        # A list, so that each process is waited for. A process that has ended gives an empty line.
        lines = [output.readline() for output in outputs]
        ok = all(line == phase_line(phase, ok=True) for line in lines)
        all_ok = all_ok and ok
        sys.stdout.write(phase_line(phase, ok=ok))
        sys.stdout.flush()
    for _ in outputs:
        os.wait()
    return 0 if all_ok else 1


def _fork_all(job: CompileJob) -> list[IO[str]]:
    """Start the processes of a job and return their outputs.

    The system may allow fewer than wanted. Raises OSError if it allows none."""
    outputs: list[IO[str]] = []
    for _ in range(job.processes):
        try:
            outputs.append(_fork(job))
        except OSError:
            if not outputs:
                raise
            break
    return outputs


def _fork(job: CompileJob) -> IO[str]:
    """Start a process that compiles what no other one does. Return its output."""
    reading, writing = os.pipe()
    if os.fork():
        os.close(writing)
        return os.fdopen(reading)
    code = 1
    try:
        os.close(reading)
        with os.fdopen(writing, "w") as output:
            code = _compile(job, output)
    except Exception:  # noqa: BLE001 (os._exit would hide it)
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _compile(job: CompileJob, output: IO[str]) -> int:
    def report(phase: Phase, errors: list[Exception]) -> None:
        output.write(phase_line(phase, ok=not errors))
        output.flush()
        if phase is Phase.ONE_ROW:
            os.nice(_NICENESS)

    _, errors = compile_all(job, report)
    for error in errors:
        sys.stderr.write(f"{error}\n")
    return 1 if errors else 0


def _end_with_parent(parent_pid: int) -> None:
    """End this process and those that it has forked once its parent has ended."""
    while os.getppid() == parent_pid:
        time.sleep(_PARENT_CHECK_S)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
