"""Tells when the machine was slower than it can be, so that a measurement can leave that time out.

A virtual core may lose half of its speed for seconds while somebody else uses the other half of the core, or
wait for its turn; no load average of this machine shows it. One process on each core times a short loop again
and again: by the clock, which shows the waiting, and by its CPU time, which shows the slower core.
"""

import contextlib
import multiprocessing
import os
import statistics
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Final, NamedTuple

_PAUSE_S: Final = 0.1
_LOOP: Final = 12_000
_SLOWER: Final = 1.35
"""A loop that takes this many times the usual one of a fast core was on a slow one."""
_FAST: Final = 0.2
"""This share of all loops, the shortest ones, were on a fast core."""


class _Sample(NamedTuple):
    at_s: float
    """Of time.perf_counter, which all processes share."""
    cpu_s: float


class MachineSpeed:
    """What the cores' loops took so far."""

    def __init__(self, cores: list[Connection]) -> None:
        self._cores = cores
        self._samples: list[list[_Sample]] = [[] for _ in cores]

    def slow(self, start_s: float, end_s: float) -> float:
        """Share of the loops between two times of time.perf_counter that a slow core took; the slowest core
        counts. 1.0 where there were none."""
        found = 0.0
        for samples, connection in zip(self._samples, self._cores, strict=True):
            while connection.poll():
                samples.append(_Sample(*connection.recv()))
            usual_s = statistics.quantiles([one.cpu_s for one in samples], n=100)[int(_FAST * 100)]
            within = [one.cpu_s for one in samples if start_s <= one.at_s <= end_s]
            slow = sum(took_s > usual_s * _SLOWER for took_s in within)
            found = max(found, slow / len(within) if within else 1.0)
        return found


@contextlib.contextmanager
def machine_speed() -> Iterator[MachineSpeed]:
    """Watch the speed of all cores that this process may use, for 1 % of their time."""
    context = multiprocessing.get_context("spawn")
    processes, connections = [], []
    for core in sorted(os.sched_getaffinity(0)):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_watch, args=(core, theirs), daemon=True)
        process.start()
        processes.append(process)
        connections.append(ours)
    try:
        yield MachineSpeed(connections)
    finally:
        for process in processes:
            process.terminate()


def _watch(core: int, connection: Connection) -> None:
    os.sched_setaffinity(0, {core})
    while True:
        time.sleep(_PAUSE_S)
        start_s, cpu_s = time.perf_counter(), time.thread_time()
        total = 0
        for number in range(_LOOP):
            total += number
        connection.send((start_s, time.thread_time() - cpu_s))
