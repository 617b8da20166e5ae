"""The helper process of the benchmark ends with the process that asked for it, and removes its models."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from localchat_llamacpp.speed.benchmark import FOLDER_PREFIX

_HELPER = """
import os, threading, time
from localchat_llamacpp.speed.benchmark_process import _end_with
threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
print(os.getpid(), flush=True)
time.sleep(600)
"""
_CALLER = """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", sys.argv[1]])
sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="an orphan has another parent on Unix alone")
def test_the_helper_ends_with_its_caller_and_leaves_no_models(tmp_path: Path) -> None:
    folder = tmp_path / f"{FOLDER_PREFIX}1"
    folder.mkdir()
    (folder / "synthetic.gguf").write_bytes(b"GGUF")
    caller = subprocess.Popen(
        [sys.executable, "-c", _CALLER, _HELPER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={
            **os.environ,
            "TMPDIR": str(folder),
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        },
    )
    assert caller.stdin is not None and caller.stdout is not None
    assert caller.stdout.readline()
    caller.kill()
    caller.wait()
    assert caller.stdout.read() == b""  # the helper has the pipe until it ends
    end = time.monotonic() + 60
    while folder.exists() and time.monotonic() < end:
        time.sleep(0.01)
    assert not folder.exists()
    caller.stdin.close()
    caller.stdout.close()
