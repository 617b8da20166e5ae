"""The servers under measurement: localchat of any checkout, and llama.cpp's own inside the wheel xllamacpp."""

import http.client
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil

from localchat.engine.local.process import child_environment
from localchat.measure.workload import prose

ROOT = Path(__file__).resolve().parents[3]
ECHO = "scripts.bench.server.echo_backend:EchoBackend"
SCRIPTED = "tests.support.scripted_backend:ScriptedBackend"
_PATIENCE_S = 120.0
_SETTLE_S = 60.0
_LOOK_S = 0.25
_IDLE_SHARE = 0.03
"""CPU time of servers that do nothing, in seconds per second."""
_COUNTER = r"^localchat_engine_{}_total(?:\{{.*\}})? ([\d.e+]+)$"

_LLAMACPP = """
import sys, threading, xllamacpp
path, slots, context, threads = sys.argv[1], *map(int, sys.argv[2:5])
params = xllamacpp.CommonParams()
params.endpoint_slots, params.slot_save_path = True, sys.argv[5] + "/"
params.model.path = path
params.n_parallel, params.n_ctx, params.kv_unified = slots, context, True
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
params.n_gpu_layers = 0
server = xllamacpp.Server(params)
print(server.listening_address, flush=True)
threading.Event().wait()
"""


_LLAMA_SERVER = """
import os, socket, sys
program, path, slots, context, threads, folder = sys.argv[1:]
with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = str(probe.getsockname()[1])
print("http://127.0.0.1:" + port, flush=True)
os.dup2(2, 1)
os.execv(program, [
    program, "--model", path, "--port", port, "--parallel", slots, "--ctx-size", context,
    "--kv-unified", "--threads", threads, "--threads-batch", threads, "--n-gpu-layers", "0",
    "--slots", "--slot-save-path", folder,
])
"""


class Served(NamedTuple):
    """A running server."""

    name: str
    port: int
    pid: int

    def cpu_s(self) -> float:
        """CPU time of the server's own process so far, its engines not counted."""
        return _cpu_s(self.pid)

    def all_cpu_s(self) -> float:
        """CPU time of the server and its engines so far."""
        engines = psutil.Process(self.pid).children(recursive=True)
        return sum(map(_cpu_s, (self.pid, *(one.pid for one in engines))))

    def engine_cpu_s(self) -> tuple[float, float]:
        """CPU time of the engine processes so far, and the part of their main threads, which run the steps."""
        engines = [one.pid for one in psutil.Process(self.pid).children()]
        threads = [Path(f"/proc/{pid}/task/{pid}/schedstat") for pid in engines]
        main_s = sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9
        return self.all_cpu_s() - self.cpu_s(), main_s

    def counter(self, name: str) -> float | None:
        """Return a counter of the engine, such as `preemptions`. None if the server does not report it."""
        wire = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_PATIENCE_S)
        try:
            wire.request("GET", "/metrics")
            text = wire.getresponse().read().decode()
            match = re.search(_COUNTER.format(name), text, re.MULTILINE)
        finally:
            wire.close()
        if match is None:
            return None
        return float(match[1])

    def rss_bytes(self) -> int:
        """Resident memory of the server's own process."""
        return psutil.Process(self.pid).memory_info().rss

    def all_bytes(self) -> int:
        """Resident memory of the server and its engines."""
        process = psutil.Process(self.pid)
        return sum(one.memory_info().rss for one in (process, *process.children(recursive=True)))


def settle(served: Iterable[Served]) -> None:
    """Wait until the servers do nothing.

    localchat computes a reproducible answer again while it is idle, and a server that works would slow down the
    one that is measured next. Waits a minute at most.
    """
    servers = list(served)
    spent_s = sum(server.all_cpu_s() for server in servers)
    for _ in range(round(_SETTLE_S / _LOOK_S)):
        time.sleep(_LOOK_S)
        before_s = spent_s
        spent_s = sum(server.all_cpu_s() for server in servers)
        if spent_s - before_s < _IDLE_SHARE * _LOOK_S:
            return


def _cpu_s(pid: int) -> float:
    threads = Path(f"/proc/{pid}/task")
    if threads.is_dir():  # in nanoseconds, where cpu_times has steps of 10 ms
        return sum(int(one.read_text().split()[0]) for one in threads.glob("*/schedstat")) / 1e9
    spent = psutil.Process(pid).cpu_times()
    return spent.user + spent.system


def write_script(path: Path, step_ms: int) -> Path:
    """A model of the scripted backend with steps of this duration."""
    reply = prose(700, 0)  # nothing that repeats itself: every token is an event
    script = {"reply": reply, "context_tokens": 131_072, "step_s": step_ms / 1000}
    path.write_text(json.dumps(script))
    return path


@contextmanager
def localchat(
    name: str, root: Path, model: Path, folder: Path, options: Sequence[str], library: str = ""
) -> Iterator[Served]:
    """Serve a model by the checkout at `root`, with a data folder of its own in `folder`.

    library: source of llama.cpp, empty for the default.
    """
    environ = child_environment(os.environ)
    if library:
        environ["LOCALCHAT_LLAMACPP_LIBRARY"] = library
    environ["PYTHONPATH"] = os.pathsep.join([str(root), str(root / "backends")])
    environ["LOCALCHAT_DATA_DIR"] = str(folder / name)
    command = [sys.executable, "-m", "localchat", "serve", str(model), "--port", "0", *options]
    with _running(name, command, environ, folder, root) as served:
        yield served


@contextmanager
def llamacpp(
    program: Path, model: Path, folder: Path, *, slots: int, context: int, threads: int
) -> Iterator[Served]:
    """Serve a model by llama.cpp's server, which saves slots in `folder`.

    program: a Python that has xllamacpp, or a compiled llama-server.
    """
    start = [str(program), "-c", _LLAMACPP]
    if program.name == "llama-server":
        start = [sys.executable, "-c", _LLAMA_SERVER, str(program)]
    numbers = map(str, (slots, context, threads))
    command = [*start, str(model), *numbers, str(folder)]
    with _running("llama.cpp", command, child_environment(os.environ), folder, folder) as served:
        yield served


@contextmanager
def _running(
    name: str, command: Sequence[str], environ: dict[str, str], folder: Path, place: Path
) -> Iterator[Served]:
    """Run a server until the end of the block; the first line that it prints is its address."""
    log = folder / f"{name.replace('/', '-')}.log"
    with log.open("wb") as errors:
        process = subprocess.Popen(
            command, env=environ, cwd=place, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        try:
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            if not address:
                raise RuntimeError(f"{name} did not start: {log.read_text()[-2000:]}")
            yield Served(name, int(address.removesuffix("/v1").rpartition(":")[2]), process.pid)
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def wait_ready(served: Served) -> None:
    """Wait until the model is loaded. Raises TimeoutError."""
    end_s = time.monotonic() + _PATIENCE_S
    while time.monotonic() < end_s:
        wire = http.client.HTTPConnection("127.0.0.1", served.port, timeout=_PATIENCE_S)
        try:
            wire.request("GET", "/health")
            if wire.getresponse().status == 200:
                return
        except OSError:
            pass
        finally:
            wire.close()
        time.sleep(0.1)
    raise TimeoutError(f"{served.name} does not load its model")
