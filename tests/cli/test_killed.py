"""What the history holds after kill -9, at moments drawn by chance, of a one-shot and of the line mode."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from localchat.chat.conversation import Conversation
from localchat.cli.chat.conversation_options import HISTORY_FILE
from localchat.config.paths import find_paths
from localchat.history.store import History
from tests.support.terminal_screen import Screen

_LAST_SECOND_S = 1.0


def kept() -> Conversation | None:
    """The one conversation on the disk."""
    with History.open(find_paths({}).data_dir / HISTORY_FILE) as history:
        summary = history.last()
        return history.load(summary.id) if summary else None


def words(text: str) -> int:
    found = text.split()
    assert found == [f"word{number}" for number in range(1, len(found) + 1)]
    return len(found)


def kill(screen: Screen, moment_s: float) -> tuple[int, int]:
    """Kill at this time after the first word. Returns the words that had been shown a second before, and those
    on the disk."""
    shown = screen.wait_for("word1 ")
    begun_s, early = time.monotonic(), 0
    while (since_s := time.monotonic() - begun_s) < moment_s:
        shown += screen.read()
        if since_s < moment_s - _LAST_SECOND_S:
            early = words(shown[shown.index("word1 ") :].rpartition(" ")[0])
    os.killpg(screen.process.pid, signal.SIGKILL)
    screen.process.wait()
    conversation = kept()
    assert conversation is not None
    question, answer = conversation.path()
    assert question.message.content == "tell me"
    assert answer.state == "open"
    return early, words(answer.message.content)


@pytest.mark.parametrize("args", [("tell me",), ("-i", "tell me")], ids=["one-shot", "lines"])
@pytest.mark.parametrize("seed", range(2))
def test_a_killed_answer_keeps_all_but_its_last_second(
    screen: Callable[..., Screen], args: tuple[str, ...], seed: int
) -> None:
    """Tried again where it lost more: a machine that lets no thread run for a second is no fault of ours."""
    chance = random.Random(seed)
    for _ in range(10):
        find_paths({}).data_dir.joinpath(HISTORY_FILE).unlink(missing_ok=True)
        early, written = kill(screen("talks", *args), 1.05 + chance.random())
        if early and written >= early:
            return
    pytest.fail(f"{early} words were shown a second before the end, and {written} were kept")


@pytest.mark.parametrize("args", [("tell me",), ("-i", "tell me")], ids=["one-shot", "lines"])
def test_a_question_is_kept_when_the_program_is_killed_during_the_load(
    model: Path, screen: Callable[..., Screen], args: tuple[str, ...]
) -> None:
    started = screen("loads", *args)
    started.wait_for("loading")
    end = time.monotonic() + 90
    while kept() is None:
        assert time.monotonic() < end
        time.sleep(0.1)
    os.killpg(started.process.pid, signal.SIGKILL)
    started.process.wait()
    conversation = kept()
    assert conversation is not None
    assert [node.message.content for node in conversation.path()] == ["tell me"]


def test_a_pipeline_that_is_killed_keeps_its_question(model: Path) -> None:
    environ = {**os.environ, "LOCALCHAT_MODEL": str(model)}
    command = [sys.executable, "-m", "tests.support.cli_program", "loads", "sum this up"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, env=environ) as process:
        assert process.stdin is not None
        process.stdin.write(b"a long text")
        process.stdin.close()
        end = time.monotonic() + 90
        while kept() is None:
            assert time.monotonic() < end
            time.sleep(0.1)
        process.kill()
    conversation = kept()
    assert conversation is not None
    assert conversation.path()[0].message.content == "a long text\n\nsum this up"
