"""Measures from fork to the first screen: the real program continuing a conversation, and a minimal app."""

import statistics
import sys
import tempfile
from pathlib import Path

from localchat.chat.conversation import Conversation
from localchat.engine.request import Message
from localchat.history.store import History
from scripts.bench.tui.programs import MARK
from scripts.bench.tui.prose import markdown
from scripts.bench.tui.terminal import Terminal
from tests.support.histories import record

EMPTY = "sk anything"
"""The composer is drawn; its first letter is under the cursor, in a separate style."""
_MESSAGES, _TOKENS = 20, 150

Starts = dict[str, float]


def measure(bare: list[str], rounds: int) -> Starts:
    """Medians in ms, and of the ratios of consecutive starts; the order alternates. One start of each
    comes before, for the bytecode.
    """
    with tempfile.TemporaryDirectory() as folder:
        _talk(Path(folder) / "history.sqlite3")
        environment = {
            "LOCALCHAT_DATA_DIR": folder,
            "LOCALCHAT_CONFIG": str(Path(folder) / "settings.toml"),
        }
        ours = [sys.executable, "-m", "localchat", "--continue", "--no-attach"]
        _started(bare, {}, MARK), _started(ours, environment, EMPTY, MARK)
        pairs = []
        for number in range(rounds):
            if number % 2:
                first = _started(ours, environment, EMPTY, MARK)
                pairs.append((_started(bare, {}, MARK), first))
            else:
                pairs.append((_started(bare, {}, MARK), _started(ours, environment, EMPTY, MARK)))
    return {
        "paint_bare_ms": statistics.median(little[0] for little, _ in pairs),
        "paint_ms": statistics.median(whole[0] for _, whole in pairs),
        "paint_over_ms": statistics.median(whole[0] - little[0] for little, whole in pairs),
        "paint_bare_cpu_ms": statistics.median(little[-1] for little, _ in pairs),
        "paint_cpu_ms": statistics.median(whole[-1] for _, whole in pairs),
        "paint_cpu_over_ms": statistics.median(whole[-1] - little[-1] for little, whole in pairs),
        "paint_ratio": statistics.median(whole[0] / little[0] for little, whole in pairs),
        "paint_last_ms": statistics.median(whole[1] for _, whole in pairs),
        "paint_last_ratio": statistics.median(whole[1] / little[0] for little, whole in pairs),
    }


def _started(command: list[str], environment: dict[str, str], *marks: str) -> list[float]:
    """Milliseconds until each mark is on the screen; as the last number, user CPU time until the first one,
    in the 10 ms of the system's clock."""
    with Terminal(command, own=environment) as terminal:
        waits = [terminal.wait_for(marks[0], terminal.begun_s)]
        cpu_s = terminal.user_cpu_s()
        waits += [terminal.wait_for(mark, terminal.begun_s) for mark in marks[1:]]
    return [*(float("nan") if wait is None else wait * 1e3 for wait in waits), cpu_s * 1e3]


def _talk(path: Path) -> None:
    """A conversation with the guide, whose last message ends with the mark."""
    conversation = Conversation(model="guide")
    nodes = []
    for number in range(0, _MESSAGES, 2):
        question = Message("user", f"question {number}")
        nodes.append(conversation.add(question, parent=conversation.head))
        mark = f"\n\n{MARK}" if number + 2 >= _MESSAGES else ""
        answer = Message("assistant", markdown(_TOKENS, number) + mark)
        nodes.append(conversation.add(answer, parent=conversation.head))
    with History.open(path) as history:
        record(history, conversation, nodes)
