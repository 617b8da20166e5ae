"""Measures what a kill loses: kills screen, engine, one-shots and line mode at random moments of an answer.

    python -m scripts.tools.check_lost [--kills 20] [--engine-kills 5] [--line-kills 20] [--seed 1]

Runs on a terminal, with the real engine and the guide.

1. SIGKILL to the screen. Lost is what the terminal showed and the history lacks, counted in
   seconds (since the first lost letter appeared) and in letters. At most the last second may be missing. Every
   conversation must open again: on the screen, which the next round begins with, and by `localchat history`.
2. SIGKILL to the engine. Everything shown must be in the history, and the next question must be answered.
3. SIGKILL to one-shots and to the line mode by turns, from the first moment on that a question is stored.
   Counted as with the screen.

The guide is kept from ending its answers, so that every kill hits one. The last line is JSON. Ends with
1 if something is lost.
"""

import argparse
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from localchat.chat.conversation import Conversation, Node
from localchat.history.store import History
from tests.support.terminal_program import Program, endless, letters
from tests.support.terminal_screen import Screen

ROOT = Path(__file__).resolve().parents[2]
LOST_S = 1.0
_WIDTH, _HEIGHT = 120, 100
_LONGEST_S = 2.0
_LEAST_ROOM = 30


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--engine-kills", type=int, default=5)
    parser.add_argument("--line-kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    places = [str(ROOT), str(ROOT / "backends"), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(places)
    draw = random.Random(asked.seed)
    with tempfile.TemporaryDirectory() as folder:
        found, rounds = _kill_screens(Path(folder), asked.kills, draw)
        wrong = _open_all(Path(folder), rounds) if rounds else []
    with tempfile.TemporaryDirectory() as folder:
        engines = _kill_engines(Path(folder), asked.engine_kills, draw)
    with tempfile.TemporaryDirectory() as folder:
        lines = _kill_lines(Path(folder), asked.line_kills, draw)
        wrong += _open_all(Path(folder), len(lines)) if lines else []
    wrong += [f"a kill of {name} lost {lost_s:.2f} s" for name, lost_s in lines if lost_s > LOST_S]
    seconds = sorted(lost_s for lost_s, _ in found)
    wrong += [f"a kill lost {each:.2f} s" for each in seconds if each > LOST_S]
    wrong += [f"an engine's death lost {each} letters" for each in engines if each]
    print("\n".join(wrong) or "nothing lost beyond a second; every conversation opens")
    print(
        json.dumps(
            {
                "kills": len(found),
                "lost_s_median": round(seconds[len(seconds) // 2], 3) if seconds else None,
                "lost_s_most": round(max(seconds, default=0.0), 3),
                "lost_letters_most": max((count for _, count in found), default=0),
                "line_kills": len(lines),
                "line_lost_s_most": round(max((lost_s for _, lost_s in lines), default=0.0), 3),
                "engine_kills": len(engines),
                "engine_lost_letters": sum(engines),
                "wrong": wrong,
            }
        )
    )
    return 1 if wrong else 0


def _question(number: int) -> str:
    return f"Question {number}: what is the KV cache, and what is speculation?"


def _kill_screens(
    data: Path, kills: int, draw: random.Random
) -> tuple[list[tuple[float, int]], int]:
    """Seconds and letters lost by each kill, and the number of conversations. An answer that was over
    before its kill does not count.
    """
    found: list[tuple[float, int]] = []
    rounds = 0
    while len(found) < kills:
        again = ("-c",) if rounds else ()
        program = Program(data, (*again, *endless()), width=_WIDTH, height=_HEIGHT)
        try:
            program.see("● ready")
            if rounds:
                program.see(_question(rounds - 1)[:30])
                program.ask("/new")
                program.see("Enter send")
            pause_s = draw.uniform(0.05, _LONGEST_S)
            _begin(program, _question(rounds))
            _rest(program, pause_s)
            program.process.send_signal(signal.SIGKILL)
            program.process.wait()
            path = _last(data).path()
            if not path or path[0].message.content != _question(rounds):
                raise SystemExit(f"the question was lost {pause_s:.2f} s after its answer began")
            rounds += 1
            node = path[-1]
            if node.message.role == "user":
                found.append(program.lost(""))
                continue
            if node.state != "open":
                print(f"the answer was over after {pause_s:.2f} s ({node.state})")
                continue
            found.append(program.lost(node.message.content))
        finally:
            program.close()
        lost_s, count = found[-1]
        print(
            f"screen {len(found):>2} killed after {pause_s:.2f} s: {lost_s:.2f} s, {count} letters",
            flush=True,
        )
    return found, rounds


def _begin(program: Program, question: str) -> None:
    """Ask, and wait for the first words."""
    program.watch(question)
    program.ask(question)
    program.until(lambda: "● writing" in program.text and program.answer)


def _rest(program: Program, pause_s: float) -> None:
    """Read for a while, as long as the question stays in view."""
    end = time.monotonic() + pause_s
    while time.monotonic() < end and program.room > _LEAST_ROOM:
        program.rest(0.02)


def _last(data: Path) -> Conversation:
    with History.open(data / "history.sqlite3") as history:
        last = history.last()
        assert last is not None, "the conversation is not in the history"
        return history.load(last.id)


def _settled(program: Program, data: Path, state: str) -> Node:
    """The last message, once it is saved in this state."""
    program.until(lambda: _last(data).path()[-1].state == state)
    return _last(data).path()[-1]


def _open_all(data: Path, rounds: int) -> list[str]:
    """The conversations that no longer open."""
    wrong: list[str] = []
    with sqlite3.connect(data / "history.sqlite3") as connection:
        (verdict,) = connection.execute("PRAGMA integrity_check").fetchone()
    if verdict != "ok":
        wrong.append(f"the database is broken: {verdict}")
    listed = json.loads(_localchat(data, "history", "list", "--all", "--json"))
    if len(listed) != rounds:
        wrong.append(f"{len(listed)} of {rounds} conversations are listed")
    for row in listed:
        shown = json.loads(_localchat(data, "history", "show", row["id"], "--json"))
        if not shown:
            wrong.append(f"{row['id']} does not open")
    return wrong


def _localchat(data: Path, *args: str) -> str:
    return subprocess.run(
        [sys.executable, "-m", "localchat", *args],
        env={**os.environ, "LOCALCHAT_DATA_DIR": str(data)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def _kill_engines(data: Path, kills: int, draw: random.Random) -> list[int]:
    """Letters shown but not saved, for each death of the engine."""
    found: list[int] = []
    program = Program(data, endless(), width=_WIDTH, height=_HEIGHT)
    try:
        program.see("● ready")
        for number in range(kills):
            _begin(program, _question(number))
            pause_s = draw.uniform(0.05, _LONGEST_S)
            _rest(program, pause_s)
            program.engine.kill()
            program.look_away()
            program.until(
                lambda: "1 try again" in program.text and "engine stopped" in program.text
            )
            node = _settled(program, data, "failed")
            found.append(program.lost(node.message.content)[1])
            assert program.answer.startswith(letters(node.message.content)), "it left the screen"
            print(f"engine {number + 1:>2} killed after {pause_s:.2f} s: {found[-1]} letters lost")
            program.ask("/set max_tokens 30")
            program.ask("And what is a quantization?")
            program.until(lambda: "length limit" in program.text)
            _settled(program, data, "length")
            program.ask("/set max_tokens 3000")
            program.see("max_tokens = 3000")
            program.ask("/new")
            program.see("Enter send")
            program.until(
                lambda: "max_tokens =" not in program.text
            )  # or it reads as of the answer
    finally:
        program.close()
    return found


def _kill_lines(data: Path, kills: int, draw: random.Random) -> list[tuple[str, float]]:
    """What was killed and the seconds that it lost, one-shots and line mode by turns."""
    found: list[tuple[str, float]] = []
    os.environ["LOCALCHAT_DATA_DIR"] = str(data)
    for number in range(kills):
        name, flags = (("a one-shot", ()), ("the line mode", ("-i",)))[number % 2]
        question = _question(number)
        args = ("-m", "localchat", "-q", "-m", "guide", *endless(), *flags, question)
        program = Screen(args, term="xterm-256color")
        pause_s = draw.uniform(0.05, 3.0)
        end, shown = time.monotonic() + 90.0, ""
        came: list[tuple[float, int]] = []
        while time.monotonic() < end:
            shown += program.read()
            if shown and not came:
                end = time.monotonic() + pause_s
            came.append((time.monotonic(), len(letters(shown)))) if shown else None
        killed_s = time.monotonic()
        os.killpg(program.process.pid, signal.SIGKILL)
        program.process.wait()
        path = _last(data).path()
        if not path or path[0].message.content != question:
            raise SystemExit(f"{name} lost its question {pause_s:.2f} s after its answer began")
        kept = len(letters(path[1].message.content)) if len(path) > 1 else 0
        lost_s = next((killed_s - at_s for at_s, count in came if count > kept), 0.0)
        found.append((name, lost_s))
        print(
            f"{name} killed after {pause_s:.2f} s: {lost_s:.2f} s, {came[-1][1] - kept} letters",
            flush=True,
        )
    del os.environ["LOCALCHAT_DATA_DIR"]
    return found


if __name__ == "__main__":
    sys.exit(main())
