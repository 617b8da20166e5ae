"""The server under soak: the program itself, observed from outside through its local API."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import psutil

from localchat.config.paths import find_paths
from localchat.engine.attached.engine import AttachedEngine, ServerClient
from localchat.engine.attached.protocol import AttachSpec
from localchat.engine.events import EngineStats
from localchat.pool.server_registry import registered

PATIENCE_S = 60.0
_PARKED_MIB = "16"


class Watched:
    """A running `localchat serve`. MetricsSnapshot comes from the engine's own counts."""

    def __init__(
        self, process: "subprocess.Popen[bytes]", server: ServerClient, spec: AttachSpec
    ) -> None:
        self.process = process
        self.port = int(server.url.rpartition(":")[2])
        self._server = server
        self._engine = AttachedEngine(server, spec, "soak")

    def stats(self) -> EngineStats:
        return self._engine.stats()

    def engine_pid(self) -> int:
        """The engine's process: the server's only child."""
        (child,) = psutil.Process(self.process.pid).children()
        return child.pid

    def memory_bytes(self) -> dict[str, int]:
        """Resident memory of both processes."""
        return {
            "server": psutil.Process(self.process.pid).memory_info().rss,
            "engine": psutil.Process(self.engine_pid()).memory_info().rss,
        }

    def idle_counts(self) -> EngineStats:
        """The counts once the engine is idle."""
        end_s = time.monotonic() + PATIENCE_S
        while (stats := self.stats()).requests:
            if time.monotonic() > end_s:
                raise TimeoutError(f"{len(stats.requests)} requests never end")
            time.sleep(0.05)
        return stats


@contextmanager
def serving(model: Path, environ: dict[str, str], log: Path, *, parallel: int) -> Iterator[Watched]:
    """Run `localchat serve` on a free port until the end of the block. `log`: file for its stderr."""
    command = [sys.executable, "-m", "localchat", "serve", str(model), "--port", "0", "--quiet"]
    # Swapped prefixes may grow up to their limit, which is not a leak; a low limit fills early.
    command += ["--cache-ram", _PARKED_MIB, "--parallel", str(parallel), "--keep-alive", "-1"]
    with log.open("wb") as errors:
        process = subprocess.Popen(
            command,
            env=environ,
            stdout=subprocess.DEVNULL,
            stderr=errors,
        )
        try:
            yield _found(process, model, environ)
        finally:
            process.terminate()
            process.wait(30)


def _found(process: "subprocess.Popen[bytes]", model: Path, environ: dict[str, str]) -> Watched:
    spec = AttachSpec(bytes(model), model.stem)
    end_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < end_s and process.poll() is None:
        for about in registered(find_paths(environ)):
            server = ServerClient(about.url, about.token)
            if about.pid == process.pid and server.loaded_models() is not None:
                watched = Watched(process, server, spec)
                if AttachedEngine(server, spec, "soak").info().loaded:
                    return watched
        time.sleep(0.1)
    raise TimeoutError("the server does not come up; its log tells why")


def clients(plan: msgspec.Struct) -> "subprocess.Popen[bytes]":
    """Start the clients of a plan."""
    return subprocess.Popen(
        [sys.executable, "-m", "scripts.tools.soak.clients", msgspec.json.encode(plan).decode()],
        stdout=subprocess.PIPE,
    )
