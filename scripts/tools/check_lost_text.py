"""Measures what SIGKILL loses of an answer as plain text: one-shots and the line mode.

    python -m scripts.tools.check_lost_text [--kills 20] [--seed 1]

Kills one-shots and line modes at random moments of an answer, each `--kills` times, on a terminal with the real
engine and the guide. Lost is what the terminal showed and the history lacks, in seconds since its first letter
appeared. Ends with 1 if a kill loses more than a second, or if a question is missing. check_lost.py does the
same with the screen.
"""

import argparse
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from pathlib import Path

from localchat.history.store import History
from tests.support.terminal_program import Program, endless, letters

ROOT = Path(__file__).resolve().parents[2]
LOST_S = 1.0
_LONGEST_S = 2.5
_QUESTION = "What is the KV cache, and what is speculation?"
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    places = [str(ROOT), str(ROOT / "backends"), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(places)
    draw = random.Random(asked.seed)
    found: dict[str, list[float]] = {"one-shot": [], "line mode": []}
    with tempfile.TemporaryDirectory() as folder:
        for kind, seconds in found.items():
            for _ in range(asked.kills):
                seconds.append(_kill(Path(folder), kind, draw.uniform(0.05, _LONGEST_S)))
                print(f"{kind} {len(seconds)}: {seconds[-1]:.2f} s lost", flush=True)
    most = {kind: round(max(seconds), 3) for kind, seconds in found.items()}
    print(json.dumps({"kills": asked.kills, "lost_s_most": most}))
    return 1 if max(most.values()) > LOST_S else 0


def _kill(data: Path, kind: str, pause_s: float) -> float:
    """Seconds of an answer that a kill lost, `pause_s` after its first word."""
    is_line_mode = kind == "line mode"
    what = ["-i"] if is_line_mode else [_QUESTION]
    program = Program(data, ("-q", *what, *endless()), width=120, height=100)
    samples: list[tuple[float, str]] = []
    try:
        if is_line_mode:
            program.see(">")
            program.ask(_QUESTION)

        def shown() -> str:
            text = _CONTROL.sub("", program.raw.decode(errors="ignore"))
            text = letters(text.rpartition(_QUESTION)[2] if is_line_mode else text)
            if not samples or samples[-1][1] != text:
                samples.append((time.monotonic(), text))
            return text

        program.until(shown)
        end = time.monotonic() + pause_s
        while time.monotonic() < end:
            program.rest(0.01)
            shown()
        killed_s = time.monotonic()
        program.process.send_signal(signal.SIGKILL)
        program.process.wait()
    finally:
        program.close()
    with History.open(data / "history.sqlite3") as history:
        last = history.last()
        assert last is not None, "the question is lost"
        path = history.load(last.id).path()
    assert path[0].message.content == _QUESTION, "the question is lost"
    kept = letters(path[-1].message.content) if len(path) > 1 else ""
    text = samples[-1][1]
    assert text.startswith(kept) or kept.startswith(text), f"shown {text!r}, kept {kept!r}"
    first_s = next((at for at, each in samples if len(each) > len(kept)), killed_s)
    return killed_s - first_s


if __name__ == "__main__":
    sys.exit(main())
