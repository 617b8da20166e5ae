"""Starts the processes of the other ranks for rank 0, and sends them its steps.

A rank that ended leaves the others waiting in a kernel for its part, so the whole engine process ends with it.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

import torch

from localchat import errors
from localchat.backend_api.interface import LoadBlock, Progress, SaveBlock, StepPlan
from localchat.errors import FAULT_STATUS, DeviceFault, EngineClosed, LocalchatError
from localchat_cuda.ranks import messages
from localchat_cuda.ranks.messages import RankJob
from localchat_cuda.ranks.process_collective import ProcessCollective
from localchat_cuda.runner.input_batch import TokenSpan

_COMMAND = (sys.executable, "-m", "localchat_cuda.ranks.worker")
_POLL_S = 0.1
_GRACE_S = 3.0
"""Time for the runner to notice that a rank ended. After that, the process ends without it."""
_NOTICE_S = 2.0
"""Time in which the end of a rank explains an error of a collective operation."""
_ENVIRONMENT = {
    # Variables of the collective libraries, for this process and those that it starts.
    # Ranks are on one host.
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    # Ranks capture their graphs at different times, and registering buffers would need all of them.
    "NCCL_GRAPH_REGISTER": "0",
    # NVLink multicast fails on some machines, and few rows do not need it.
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}


class Workers:
    """Processes of all ranks but 0. One thread sends, and one per process listens."""

    def __init__(self, job: RankJob, devices: list[str], end: Callable[[str], object]) -> None:
        """Start the processes.

        `job`: of rank 0. `devices`: of ranks 1 and up. `end`: ends this process, unless an operation here
        reports within seconds that a rank ended. Gets the sentence for the log."""
        self.job = job
        self._devices = [job.device, *devices]
        self._end = end
        self._reported = threading.Event()
        self._failed = threading.Event()
        self._failure = ""
        self._closing = False
        self._lock = threading.Lock()
        self._encoder = messages.PlanEncoder()
        self._touched: dict[int, int] = {}
        """Message of the last step that copied each host block."""
        self._copied = [0] * job.ranks
        """Last message whose copies of host blocks are complete, by rank."""
        self._links: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._listeners: list[threading.Thread] = []
        for rank, device in enumerate(devices, 1):
            self._start(replace(job, rank=rank, device=device))

    def _start(self, job: RankJob) -> None:
        ours, theirs = Pipe()
        files = [theirs.fileno()]
        if job.host_memory >= 0:
            files.append(job.host_memory)
        with theirs:
            process = subprocess.Popen(
                (*_COMMAND, str(theirs.fileno())), stdin=subprocess.DEVNULL, pass_fds=files
            )
        self._links.append(ours)
        self._processes.append(process)
        with contextlib.suppress(OSError):
            ours.send(job)

    def join(
        self, device: torch.device, columns: int, progress: Progress, *, host_blocks: bool
    ) -> tuple[ProcessCollective, bool]:
        """Wait until all ranks have loaded their weights, and connect them.

        `columns`: of the rows that are added up. `progress`: see load_runner. `host_blocks`: those of rank 0
        are usable. Returns True for host blocks that all ranks can use. Raises the error of a rank."""
        for rank, link in enumerate(self._links, 1):
            while not link.poll(_POLL_S):
                if not progress(0, 0):
                    raise EngineClosed("The load was cancelled.")
            host_blocks = self._loaded(rank, link).host_blocks and host_blocks
        for link in self._links:
            link.send(messages.Loaded(host_blocks))
        self.listen()
        with self.watched():
            collective = ProcessCollective(0, self.job.ranks, self.job.meeting, device, columns)
        return collective, host_blocks

    def listen(self) -> None:
        """Start to notice if a rank ends."""
        for rank, link in enumerate(self._links, 1):
            listener = threading.Thread(
                target=self._listen, args=(rank, link), name=f"rank {rank}", daemon=True
            )
            listener.start()
            self._listeners.append(listener)

    def _loaded(self, rank: int, link: Connection) -> messages.Loaded:
        """Return the next message of a rank that loads. Raises its error."""
        try:
            message = link.recv()
        except (EOFError, OSError):
            raise DeviceFault(self._ended(rank)) from None
        if isinstance(message, messages.RankFailed):
            kind = getattr(errors, message.kind, DeviceFault)
            assert issubclass(kind, LocalchatError)
            raise kind(f"{self._name(rank)}: {message.message}", hint=message.hint)
        assert isinstance(message, messages.Loaded)
        return message

    def launch(self, plan: StepPlan) -> None:
        """Send a plan that rank 0 is about to launch. Raises DeviceFault if a rank has ended."""
        message = self._encoder.encode(plan)
        if message.copies_blocks:
            for operation in plan.memory:
                if isinstance(operation, SaveBlock | LoadBlock):
                    self._touched[operation.host_block] = message.number
        self._send(message)

    def launch_padding(self, spans: list[TokenSpan], kind: str) -> None:
        """Send a step of padding that rank 0 is about to run. Raises DeviceFault if a rank has ended."""
        self._send(messages.LaunchPadding(spans, kind))

    def _send(self, message: object) -> None:
        with self.watched():
            for link in self._links:
                link.send(message)

    def copied(self, number: int) -> bool:
        """Return True if all ranks have finished their copies of a host block."""
        last = self._touched.get(number, 0)
        if min(self._copied[1:]) < last:
            return False
        self._touched.pop(number, None)
        return True

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Run an operation with all ranks. Raises DeviceFault that names a rank if one has ended."""
        if self._failed.is_set():
            raise self._fault()
        try:
            yield
        except LocalchatError:
            raise
        except Exception as error:
            if self._failed.wait(_NOTICE_S):
                raise self._fault() from error
            raise

    def _fault(self) -> DeviceFault:
        self._reported.set()
        return DeviceFault(self._failure)

    def _listen(self, rank: int, link: Connection) -> None:
        """Receive the messages of a rank until it ends."""
        failure = ""
        try:
            while True:
                message = link.recv()
                if isinstance(message, messages.RankFailed):
                    failure = f"{self._name(rank)} failed: {message.message}"
                elif isinstance(message, messages.Copied):
                    self._copied[rank] = message.number
        except (EOFError, OSError):
            pass
        with self._lock:
            if self._closing or self._failed.is_set():
                return
            self._failure = failure or self._ended(rank)
            self._failed.set()
        if not self._reported.wait(_GRACE_S) and not self._closing:
            self._end(self._failure)

    def _name(self, rank: int) -> str:
        return f"Rank {rank} of {self.job.ranks} ({self._devices[rank]})"

    def _ended(self, rank: int) -> str:
        """Return a sentence on a rank whose pipe has closed."""
        try:
            status = self._processes[rank - 1].wait(_NOTICE_S)
        except subprocess.TimeoutExpired:
            return f"{self._name(rank)} closed its pipe."
        if status < 0:
            return f"{self._name(rank)} was killed by signal {-status}."
        return f"{self._name(rank)} exited with status {status}."

    def close(self) -> None:
        """End all ranks. Steps must be complete. Idempotent."""
        with self._lock:
            self._closing = True
        for link in self._links:
            with contextlib.suppress(OSError):
                link.send(messages.Stop())
        for process in self._processes:
            if not self._listeners:
                # It still loads.
                process.kill()
            try:
                process.wait(_NOTICE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        # A listener must not read from a descriptor that was closed and used again.
        for listener in self._listeners:
            listener.join(_NOTICE_S)
        for link in self._links:
            link.close()


def end_process(sentence: str) -> NoReturn:
    """Log a sentence, and end this process as a DeviceFault does."""
    sys.stderr.write(f"{sentence}\n")
    sys.stderr.flush()
    os._exit(FAULT_STATUS)


@contextlib.contextmanager
def started(job: RankJob, devices: list[str]) -> Iterator[Workers]:
    """Start the other ranks for a load, and end them if it fails. See Workers."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    with tempfile.TemporaryDirectory(prefix="localchat-ranks-") as folder:
        workers = Workers(replace(job, meeting=Path(folder) / "meeting"), devices, end_process)
        try:
            yield workers
        except BaseException:
            workers.close()
            raise
