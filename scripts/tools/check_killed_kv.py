#!/usr/bin/env python3
"""Kills a server and its engine with SIGKILL while KV goes to the disk, and compares the texts afterwards.

    scripts/tools/check_killed_kv.py [--kills 20] [--model GGUF] [--words 700]

Each round asks a new prompt, waits a moment that differs by round, and kills both processes. The next server
is asked the prompts of the last rounds again, with their answers of before expected, and every file of KV that
is there is read with its checksum. Prints one line of counts as JSON; ends with 1 where something is wrong.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "backends")]

from localchat.kv_store.entry import EntryInvalid, read_head, read_payload  # noqa: E402
from localchat.measure.workload import prose  # noqa: E402 - found by the path above
from scripts.bench.server import servers  # noqa: E402
from scripts.bench.server.client import Body, alone, chat  # noqa: E402

_GUIDE = ROOT / "localchat" / "guide" / "guide.gguf"
_LATEST_KILL_S = 0.5
_ASKED_AGAIN = 2


def main() -> int:
    """Kill, ask again and count."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--model", type=Path, default=_GUIDE)
    parser.add_argument("--words", type=int, default=700)
    asked = parser.parse_args()
    found: Counter[str] = Counter(kills=asked.kills)
    draw = random.Random(0)
    texts: list[tuple[Body, str]] = []
    with tempfile.TemporaryDirectory(prefix="killed-kv-") as name:
        folder = Path(name)
        for number in range(asked.kills + 1):
            with servers.localchat(
                "ours", ROOT, asked.model, folder, ["--parallel", "1"]
            ) as served:
                servers.wait_ready(served)
                for body, text in texts[-_ASKED_AGAIN:]:
                    found["other texts"] += alone(served.port, body).text != text
                    found["asked again"] += 1
                if number == asked.kills:
                    break
                body = chat(prose(asked.words, f"kill {number}"), 16, temperature=0)
                texts.append((body, alone(served.port, body).text))
                time.sleep(draw.uniform(0, _LATEST_KILL_S))
                _kill(served.pid)
            found.update(_files(folder))
    print(json.dumps(dict(found)))
    return 1 if found["other texts"] or found["damaged files"] else 0


def _kill(pid: int) -> None:
    """SIGKILL to a server's engines first, then to the server."""
    for child in psutil.Process(pid).children(recursive=True):
        child.kill()
    os.kill(pid, signal.SIGKILL)


def _files(folder: Path) -> Counter[str]:
    """How many files of KV are whole, damaged, or parts of a write that a kill ended."""
    found = Counter({"unfinished writes": sum(1 for _ in folder.rglob("*.part"))})
    for path in folder.rglob("*.kv"):
        if path.is_file():
            found["files read"] += 1
            try:
                read_payload(path, read_head(path))
            except EntryInvalid:
                found["damaged files"] += 1
    return found


if __name__ == "__main__":
    sys.exit(main())
