"""Killed at twenty random points and run again: the file is byte-equal, and hardly a byte is sent twice."""

import subprocess
import sys
from pathlib import Path
from random import Random

from localchat.models.hub.manifest import installed
from tests.support.fake_hub import FakeHub

NAME = "maker/Large-GGUF"
SIZE = 48 << 20
KILLS = 20

_DRIVER = """
import faulthandler, os, signal, socket, sys
from pathlib import Path
import filelock  # what every child needs, once
from huggingface_hub import HfApi, get_session
from localchat.models.hub.client import HubClient
from localchat.models.names import parse
from localchat.models.hub.pull import fetch, select_files
from localchat.models.hub.events import ProgressMeter

connect = socket.socket.connect

def narrow(self, address):
    self.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
    return connect(self, address)

socket.socket.connect = narrow
url, models, name, *points = sys.argv[1:]
get_session()

def pull(point):
    came = ProgressMeter.add
    def came_and_died(self, file, count):
        came(self, file, count)
        if self._done >= point:
            os.kill(os.getpid(), signal.SIGKILL)
    ProgressMeter.add = came_and_died
    hub = HubClient(url)
    fetch(select_files(parse(name, {}), hub, print), hub, Path(models), print)

def ended(point):
    child = os.fork()
    if not child:
        faulthandler.dump_traceback_later(90, exit=True)
        try:
            pull(point)
        except BaseException as problem:
            print(problem, file=sys.stderr)
            os._exit(2)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

for point in [*map(int, points), 1 << 62]:
    # Status 1 is the watchdog's: a fork may inherit a lock that another thread of this driver held.
    status = next((s for s in (ended(point) for _ in range(3)) if s != 1), 1)
    print("ended", status, flush=True)
"""


def test_killed_at_random_points_the_bytes_sent_stay_near_the_file(
    hub: FakeHub, tmp_path: Path
) -> None:
    draw = Random(4)
    body = b"GGUF" + draw.randbytes(SIZE - 4)
    hub.add(NAME, {"large-q4_k_m.gguf": body})
    # what the system holds between the two ends is lost with the process: as little as it allows, on both sides
    hub.send_buffer = 1 << 14
    points = sorted(draw.sample(range(1, SIZE), KILLS))
    models = tmp_path / "models"
    done = subprocess.run(
        [sys.executable, "-c", _DRIVER, hub.url, str(models), NAME, *map(str, points)],
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    ends = [line for line in done.stdout.splitlines() if line.startswith("ended")]
    assert ends == ["ended -9"] * KILLS + ["ended 0"], done.stderr
    (found,) = installed(models)
    assert found.path.read_bytes() == body
    assert hub.sent <= SIZE * 1.05
