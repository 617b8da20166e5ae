"""Compiles a model's kernels: `python -m localchat_cuda.compile_ahead < JOB`, a pickled CompileJob.

The process imports torch and Triton while it waits for the job. Then it forks one process per core, which
need no imports of their own. It prints a line for each phase that all of them have finished.
"""

import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from multiprocessing.connection import Connection

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
    links = _start_all(job)
    threading.Thread(target=_end_with_parent, args=(parent_pid,), daemon=True).start()
    all_ok = True
    for phase in Phase:
        # Wait for each process, even after a failure.
        compiled = list(map(_compiled, links))
        ok = all(compiled)
        all_ok = all_ok and ok
        sys.stdout.write(phase_line(phase, ok=ok))
        sys.stdout.flush()
    return 0 if all_ok else 1


def _start_all(job: CompileJob) -> list[Connection]:
    """Start the processes of a job. Each sends True or False after each phase.

    The system may allow fewer than wanted. Raises OSError if it allows none."""
    context = multiprocessing.get_context("fork")
    links: list[Connection] = []
    for _ in range(job.processes):
        receiving, sending = context.Pipe(duplex=False)
        try:
            context.Process(target=_compile, args=(job, sending)).start()
        except OSError:
            if not links:
                raise
            break
        sending.close()
        links.append(receiving)
    return links


def _compiled(link: Connection) -> bool:
    """Wait for the end of a phase in a process. Return False if it failed, or the process has ended."""
    try:
        return bool(link.recv())
    except EOFError:
        return False


def _compile(job: CompileJob, link: Connection) -> None:
    """Compile what no other process does."""

    def report(phase: Phase, errors: list[Exception]) -> None:
        link.send(not errors)
        if phase is Phase.ONE_ROW:
            os.nice(_NICENESS)

    _, errors = compile_all(job, report)
    for error in errors:
        sys.stderr.write(f"{error}\n")


def _end_with_parent(parent_pid: int) -> None:
    """End this process and those that it has forked once its parent has ended."""
    while os.getppid() == parent_pid:
        time.sleep(_PARENT_CHECK_S)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
