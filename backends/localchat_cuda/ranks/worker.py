"""Process of a rank other than 0. Loads a part of the model, and launches the steps of rank 0.

    python -m localchat_cuda.ranks.worker FD    FD: the pipe to rank 0 (workers.py)

It exits when the pipe closes. Its results are those of rank 0, so it drops them.
"""

import contextlib
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection

import torch

from localchat.backend_api.interface import Progress
from localchat.errors import DeviceFault, LocalchatError
from localchat_cuda.load import load_runner
from localchat_cuda.ranks import messages
from localchat_cuda.ranks.process_collective import ProcessCollective
from localchat_cuda.ranks.split import split_config
from localchat_cuda.runner.runner import CudaRunner
from localchat_cuda.runner.step_output import DEPTH

_POLL_S = 0.001
"""Interval at which a step in flight is checked while no message comes."""
_BLAME_S = 1.0
"""Time for rank 0 to notice that another rank has ended."""


class Inbox:
    """Messages from rank 0, which a thread receives.

    Loading takes minutes, and a step may wait for rank 0 forever. Only a thread notices that rank 0 ended."""

    def __init__(self, link: Connection, end: Callable[[], object]) -> None:
        """`end`: called if rank 0 ends."""
        self._link = link
        self._end = end
        self._messages: queue.SimpleQueue[object] = queue.SimpleQueue()
        threading.Thread(target=self._receive, name="receiver", daemon=True).start()

    def _receive(self) -> None:
        message: object = None
        try:
            while not isinstance(message, messages.Stop):
                message = self._link.recv()
                self._messages.put(message)
        except (EOFError, OSError):
            self._end()

    def get(self, timeout_s: float | None = None) -> object:
        """Return the next message; None: none came in time."""
        try:
            return self._messages.get(timeout=timeout_s)
        except queue.Empty:
            return None


class WorkerGroup:
    """See load.RankGroup."""

    def __init__(self, job: messages.RankJob, link: Connection, inbox: Inbox) -> None:
        self.job = job
        self._link = link
        self._inbox = inbox

    def join(
        self, device: torch.device, columns: int, progress: Progress, *, host_blocks: bool
    ) -> tuple[ProcessCollective, bool]:
        """See workers.Workers.join."""
        self._link.send(messages.Loaded(host_blocks))
        answer = self._inbox.get()
        assert isinstance(answer, messages.Loaded)
        job = self.job
        collective = ProcessCollective(job.rank, job.ranks, job.meeting, device, columns)
        return collective, answer.host_blocks


class Follower:
    """Launches the steps of rank 0, with as many in flight."""

    def __init__(self, runner: CudaRunner, link: Connection, inbox: Inbox) -> None:
        self._runner = runner
        self._link = link
        self._inbox = inbox
        self._decoder = messages.PlanDecoder()
        self._launched: list[messages.Launch] = []

    def run(self) -> None:
        """Launch steps until rank 0 closes the model."""
        while True:
            match self._next():
                case messages.Launch() as message:
                    if len(self._launched) == DEPTH:
                        self._collect()
                    self._runner.launch(self._decoder.decode(message))
                    self._launched.append(message)
                case messages.LaunchPadding(spans, kind):
                    self._collect_all()
                    self._runner.run_padding(list(spans), kind)
                case messages.Stop():
                    self._collect_all()
                    return

    def _next(self) -> object:
        """Wait for the next message, and collect steps that end meanwhile."""
        while self._launched:
            if self._runner.step_is_done:
                self._collect()
            elif (message := self._inbox.get(_POLL_S)) is not None:
                return message
        return self._inbox.get()

    def _collect_all(self) -> None:
        while self._launched:
            self._collect()

    def _collect(self) -> None:
        message = self._launched.pop(0)
        result = self._runner.collect()
        if result.status != "ok":
            raise DeviceFault(
                "a step ran out of GPU memory, in which other ranks wait for this one"
            )
        if message.copies_blocks:
            self._runner.finish_block_copies()
            self._link.send(messages.Copied(message.number))


def serve(link: Connection) -> None:
    """Load a rank and run its steps."""
    inbox = Inbox(link, partial(os._exit, 1))
    job = inbox.get()
    assert isinstance(job, messages.RankJob)
    part = split_config(job.config, job.ranks, "the model")
    group = WorkerGroup(job, link, inbox)
    runner = load_runner(
        part,
        job.path,
        job.device,
        job.request,
        progress=lambda done, total: True,
        # Rank 0 says the same to the user.
        notify=lambda text: None,
        group=group,
    )
    Follower(runner, link, inbox).run()
    runner.close()


def main() -> int:
    """Run a rank. Return the exit status."""
    # A terminal's Ctrl+C reaches the whole group, but rank 0 decides when this process ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    link = Connection(int(sys.argv[1]))
    try:
        serve(link)
    except LocalchatError as error:
        return _report(link, messages.RankFailed(type(error).__name__, error.message, error.hint))
    except Exception as error:  # noqa: BLE001 - rank 0 reports it
        traceback.print_exc()
        # If another rank has ended, operations fail here, too. Rank 0 then notices that rank first.
        time.sleep(_BLAME_S)
        text = f"{type(error).__name__}: {error}"
        return _report(link, messages.RankFailed("DeviceFault", text))
    return 0


def _report(link: Connection, failure: messages.RankFailed) -> int:
    """Send an error to rank 0, unless it has ended. Return the exit status."""
    with contextlib.suppress(OSError):
        link.send(failure)
    return 1


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    # Threads of native code must not delay the exit.
    os._exit(status)
