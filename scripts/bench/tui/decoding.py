"""Measures what the screen costs the engine: the guide's decode rate under the screen and on the
command line.

Both send the same request: greedy, without drafts, so long that the guide may not stop. The rate is the
engine's own metric: on the command line from `--json`, on the screen from the history, which stores it
with the answer. The CPU time a token of the screen's own process is reported too; a busy machine
disturbs it less.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from localchat.history.store import History
from scripts.bench.tui.starting import EMPTY
from scripts.bench.tui.terminal import Terminal, surroundings

_QUESTION = "how do I pull a model?"
_SETTINGS = """[defaults]
temperature = 0.0
speculation = false
max_tokens = {tokens}
attach = false
[defaults.logit_bias]
{banned}
"""
_CONTROL_TOKENS = range(8)
"""Of the guide's vocabulary; none may come, so that the answer has its full length."""
_PATIENCE_S = 60.0


def measure(rounds: int, tokens: int) -> dict[str, float]:
    """Medians: tokens a second of both, and how much less, in percent, it is under the screen than in
    the paired run of the command line; microseconds of CPU that the screen took for a token.
    """
    pairs, spent_us = [], []
    with tempfile.TemporaryDirectory() as folder:
        settings = Path(folder) / "settings.toml"
        banned = "\n".join(f"{token} = -100" for token in _CONTROL_TOKENS)
        settings.write_text(_SETTINGS.format(tokens=tokens, banned=banned))
        own = {"LOCALCHAT_DATA_DIR": folder, "LOCALCHAT_CONFIG": str(settings)}
        _of_command(own)
        for number in range(rounds):
            command = _of_command(own) if number % 2 else 0.0
            screen, cpu_s = _of_screen(own)
            pairs.append((command or _of_command(own), screen))
            spent_us.append(1e6 * cpu_s / tokens)
    return {
        "engine_command_tok_s": statistics.median(command for command, _ in pairs),
        "engine_screen_tok_s": statistics.median(screen for _, screen in pairs),
        "engine_screen_cpu_us": statistics.median(spent_us),
        "engine_loss_percent": statistics.median(100 * (1 - s / c) for c, s in pairs),
    }


def _of_command(own: dict[str, str]) -> float:
    done = subprocess.run(
        [sys.executable, "-m", "localchat", "--json", "--no-history", _QUESTION],
        env=surroundings(own),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=True,
    )
    return float(json.loads(done.stdout)["timings"]["decode_tokens_per_s"])


def _of_screen(own: dict[str, str]) -> tuple[float, float]:
    """Ask on the screen, wait for the metrics in the history. Returns the rate, and seconds of CPU
    since the question.
    """
    file = Path(own["LOCALCHAT_DATA_DIR"]) / "history.sqlite3"
    for suffix in ("", "-wal", "-shm"):
        Path(f"{file}{suffix}").unlink(missing_ok=True)
    with Terminal([sys.executable, "-m", "localchat"], own=own) as terminal:
        if terminal.wait_for(EMPTY, terminal.begun_s) is None:
            raise SystemExit("the program did not start")
        terminal.wait_for("ready", terminal.begun_s)
        terminal.type(_QUESTION)
        time.sleep(0.3)
        before_s = terminal.cpu_s()
        terminal.type("\r")
        until = time.monotonic() + _PATIENCE_S
        while time.monotonic() < until:
            time.sleep(0.5)
            terminal.forget()
            if (rate := _kept_rate(file)) is not None:
                return rate, terminal.cpu_s() - before_s
    raise SystemExit(f"no answer within {_PATIENCE_S:g} s")


def _kept_rate(file: Path) -> float | None:
    if not file.exists():
        return None
    with History.open(file) as history:
        last = history.last()
        nodes = history.load(last.id).nodes.values() if last is not None else ()
        done = [node.metrics.done for node in nodes if node.metrics and node.metrics.done]
    return done[-1].timings.decode_tokens_per_s if done else None
