"""The helper process: its limits, its end, its restart, and who may use it at once."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Any

import psutil
import pytest

from localchat.chat_format import render_process as module
from localchat.chat_format.render_process import RenderFailure, RenderLimits, RenderProcess
from localchat.errors import TemplateError

NOW = datetime(2026, 3, 7, 9, 5)
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
ECHO = "{{ text }}"


@pytest.fixture
def process() -> Iterator[RenderProcess]:
    process = RenderProcess(RenderLimits(seconds=0.3))
    yield process
    process.close()


def say(process: RenderProcess, text: str) -> str:
    return process.render(ECHO, {"text": text}, NOW)


def running(process: RenderProcess) -> bool:
    return process._process is not None and process._process.poll() is None


def pid_of(process: RenderProcess) -> int:
    assert process._process is not None and running(process)
    return process._process.pid


def gone(pid: int) -> bool:
    """Whether a process has ended and was reaped, within five seconds."""
    for _ in range(500):
        if not psutil.pid_exists(pid):
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize(
    "text", ["", "a\nb\r\u2028", "日本 🧑‍🚀", "half \ud83d pair", "\0\x1f", "NaN"]
)
def test_any_text_comes_back_unchanged(process: RenderProcess, text: str) -> None:
    assert say(process, text) == text


def test_values_reach_the_template_as_they_are(process: RenderProcess) -> None:
    values = {"a": [1, 2.5, None, True, {"b": {}}], "n": float("inf")}
    text = process.render("{{ a }}{{ n }}{{ strftime_now('%H:%M') }}", values, NOW)
    assert text == "[1, 2.5, None, True, {'b': {}}]inf09:05"


def test_the_process_is_started_once_and_only_when_it_is_needed() -> None:
    process = RenderProcess()
    assert not running(process)
    process.start()
    pid = pid_of(process)
    assert [say(process, text) for text in "ab"] == ["a", "b"]
    assert pid_of(process) == pid
    process.close()
    assert not running(process) and gone(pid)


def test_a_template_that_computes_for_too_long_is_killed_and_the_next_render_starts_anew(
    process: RenderProcess,
) -> None:
    say(process, "x")
    pid = pid_of(process)
    with pytest.raises(TemplateError, match=r"takes longer than 0\.3 s") as raised:
        process.render(ENDLESS, {}, NOW)
    assert raised.value.details["reason"] == "limit"
    assert gone(pid)
    assert say(process, "again") == "again"


def test_one_long_operation_of_c_is_killed_too(process: RenderProcess) -> None:
    with pytest.raises(TemplateError, match="takes longer"):
        process.render("{% set n = 7 ** (10 ** 8) %}{{ n * n }}{{ text }}", {"text": 1}, NOW)


def test_a_process_that_hangs_without_computing_is_killed(
    process: RenderProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(process, "x")
    os.kill(pid_of(process), signal.SIGSTOP)
    with monkeypatch.context() as patch:
        patch.setattr(module, "_WALL_TIME_FACTOR", 1)
        with pytest.raises(TemplateError, match="takes longer"):
            say(process, "y")
    assert say(process, "z") == "z"


def test_memory_is_given_back_after_a_render_took_too_much(process: RenderProcess) -> None:
    say(process, "x")
    pid = pid_of(process)
    with pytest.raises(RenderFailure) as raised:
        process.render("{{ text * n }}", {"text": "x" * 99, "n": 10**9}, NOW)
    assert (raised.value.reason, raised.value.type) == ("limit", "MemoryError")
    assert say(process, "y") == "y"
    assert pid_of(process) != pid


def test_memory_is_watched_where_no_limit_of_it_is_honoured(
    process: RenderProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_WATCH_MEMORY", True)
    monkeypatch.setattr(module, "_resident_bytes", lambda pid: 1 << 40)
    with pytest.raises(TemplateError, match="takes too much memory"):
        process.render(ENDLESS, {}, NOW)
    monkeypatch.setattr(module, "_resident_bytes", lambda pid: 0)
    assert say(process, "x") == "x"


def test_the_memory_of_the_process_can_be_read(process: RenderProcess) -> None:
    say(process, "x")
    assert 1 << 20 < module._resident_bytes(pid_of(process)) < 1 << 27
    assert module._resident_bytes(2**22 + 1) == 0


def test_a_text_that_is_too_long_is_refused_and_the_process_goes_on(process: RenderProcess) -> None:
    say(process, "x")
    pid = pid_of(process)
    with pytest.raises(RenderFailure, match=r"characters; .* are allowed") as raised:
        process.render("{% for i in range(99) %}{{ 'a' * 99999 }}{% endfor %}", {}, NOW)
    assert raised.value.reason == "limit"
    assert say(process, "y") == "y"
    assert pid_of(process) == pid


def test_a_process_that_was_killed_from_outside_is_named_and_replaced(
    process: RenderProcess,
) -> None:
    say(process, "x")
    killer = threading.Timer(0.1, os.kill, (pid_of(process), signal.SIGKILL))
    killer.start()
    with pytest.raises(TemplateError, match="SIGKILL"):
        process.render(ENDLESS, {}, NOW)
    killer.join()
    assert say(process, "y") == "y"
    pid = pid_of(process)
    os.kill(pid, signal.SIGKILL)
    while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    assert say(process, "z") == "z"  # it was dead before it was asked: nobody's fault


def test_a_process_that_cannot_be_started_fails_the_render_alone(
    process: RenderProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", refuse)
        process.start()
        with pytest.raises(TemplateError, match="no process could be started"):
            say(process, "x")
    assert say(process, "y") == "y"


def test_several_threads_get_their_own_texts(process: RenderProcess) -> None:
    texts = [f"text {number} " * 99 for number in range(64)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda text: say(process, text), texts)) == texts


def test_a_slow_template_holds_others_up_no_longer_than_its_limit(process: RenderProcess) -> None:
    with ThreadPoolExecutor(2) as pool:
        slow = pool.submit(process.render, ENDLESS, {}, NOW)
        quick = [pool.submit(say, process, "quick") for _ in range(3)]
        assert isinstance(slow.exception(20), TemplateError)
        assert [answer.result(20) for answer in quick] == ["quick"] * 3


def test_an_exchange_that_was_interrupted_does_not_answer_the_next_request(
    process: RenderProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> str:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, "_watch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            say(process, "old")
    assert say(process, "new") == "new"


def test_ctrl_c_does_not_end_the_process(process: RenderProcess) -> None:
    say(process, "x")
    pid = pid_of(process)
    os.kill(pid, signal.SIGINT)
    assert say(process, "y") == "y"
    assert pid_of(process) == pid


def test_a_process_ends_with_the_object_that_nobody_holds_any_more() -> None:
    process = RenderProcess()
    say(process, "x")
    pid = pid_of(process)
    del process
    assert gone(pid)


@pytest.mark.parametrize("busy", [False, True])
def test_the_process_ends_when_its_parent_dies(busy: bool) -> None:
    program = (
        "import os, threading, time\n"
        "from datetime import datetime\n"
        "from localchat.chat_format.render_process import RenderLimits, RenderProcess\n"
        "process = RenderProcess(RenderLimits(seconds=1.0))\n"
        "process.render('x', {}, datetime.now())\n"
        f"task = lambda: process.render({ENDLESS!r}, {{}}, datetime.now())\n"
        f"{busy} and (threading.Thread(target=task, daemon=True).start(), time.sleep(0.1))\n"
        "print(process._process.pid, flush=True)\n"
        "os._exit(0)\n"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    pid = int(said.stdout)
    assert ended(pid)


def ended(pid: int) -> bool:
    """Whether a process that is not ours to reap has ended, within five seconds."""
    for _ in range(500):
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.01)
    return False


def test_the_worker_imports_nothing_of_ours(process: RenderProcess) -> None:
    say(process, "x")
    program = (
        "import runpy, sys\n"
        f"runpy.run_path({str(module._WORKER)!r})\n"
        "print(*sorted(sys.modules), sep='\\n')\n"
    )
    said = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    loaded: set[Any] = {name.partition(".")[0] for name in said.stdout.split()}
    assert "jinja2" in loaded
    assert not loaded & {"localchat", "msgspec", "numpy", "psutil"}
