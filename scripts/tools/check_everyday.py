"""Fifty everyday prompts with default settings, through the command line, the screen and `serve`.

    PYTHONPATH=.:backends python scripts/tools/check_everyday.py MODEL [--front cli serve screen] [--prompts 15]

Counts how the answers ended. Two counts must be 0: answers that looped up to a limit, and answers that
a limit or the loop guard ended without a notice. The last line is JSON.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from localchat.chat.conversation import Node
from localchat.history.store import History
from tests.support.terminal_program import Program

EVERYDAY = (Path(__file__).parent / "everyday.txt").read_text("utf-8").splitlines()
_TAIL_CHARS = 1200
_LOOP_RATIO = 0.12
"""zlib ratio of the last 1,200 characters below which a text counts as a loop. Prose has 0.4 to 0.55."""


@dataclass(frozen=True)
class Answer:
    """One answer and how it ended."""

    front: str
    prompt: str
    text: str
    reason: str
    """stop, length, repetition, or error."""
    noticed: bool
    """The front end said that a limit or the loop guard ended the answer."""

    @property
    def looped(self) -> bool:
        """Return True if a limit ended an answer that only repeated itself."""
        tail = self.text[-_TAIL_CHARS:].encode()
        compressed = len(zlib.compress(tail, 9))
        return self.reason == "length" and len(tail) > 400 and compressed < _LOOP_RATIO * len(tail)

    @property
    def silent(self) -> bool:
        """Return True if the answer was cut without a notice."""
        return self.reason in ("length", "repetition") and not self.noticed


def environment(folder: Path) -> dict[str, str]:
    """Return an environment with settings and history of its own."""
    return {
        **os.environ,
        "LOCALCHAT_DATA_DIR": str(folder),
        "LOCALCHAT_CONFIG": str(folder / "settings.toml"),
        "HOME": str(folder),
    }


def by_command_line(model: str, folder: Path, prompts: Sequence[str]) -> Iterator[Answer]:
    """Ask each prompt with a command of its own."""
    for prompt in prompts:
        command = [sys.executable, "-m", "localchat", "-m", model, "--no-attach", "--json", prompt]
        done = subprocess.run(
            command, capture_output=True, text=True, input="", env=environment(folder), check=False
        )
        if done.returncode:
            yield Answer("cli", prompt, done.stderr, "error", True)
            continue
        report = json.loads(done.stdout)
        noticed = bool(re.search(r"repeat|limit|cut|full", done.stderr))
        yield Answer("cli", prompt, report["text"], report["finish_reason"], noticed)


def by_server(
    model: str, folder: Path, prompts: Sequence[str], clients: int = 4
) -> Iterator[Answer]:
    """Ask all prompts of a server with default settings, four at a time."""
    port = 8931 + os.getpid() % 500
    server = subprocess.Popen(
        [sys.executable, "-m", "localchat", "serve", model, "--port", str(port)],
        env=environment(folder),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    address = f"http://127.0.0.1:{port}"

    def ask(prompt: str) -> Answer:
        body = {"messages": [{"role": "user", "content": prompt}]}
        request = urllib.request.Request(
            f"{address}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=1800) as reply:
            choice = json.load(reply)["choices"][0]
        reason = choice["finish_reason"]
        if "repetition" in json.dumps(choice.get("stop_reason") or ""):
            reason = "repetition"
        # The finish reason is the notice of a protocol.
        noticed = choice["finish_reason"] != "stop"
        return Answer("serve", prompt, choice["message"]["content"] or "", reason, noticed)

    try:
        wait_for(address)
        with ThreadPoolExecutor(clients) as pool:
            yield from pool.map(ask, prompts)
    finally:
        server.terminate()
        server.wait()


def wait_for(address: str) -> None:
    """Wait until the server answers its health route."""
    for _ in range(600):
        try:
            urllib.request.urlopen(f"{address}/health", timeout=5).close()
        except OSError:
            time.sleep(0.2)
        else:
            return
    raise TimeoutError(address)


def by_screen(model: str, folder: Path, prompts: Sequence[str]) -> Iterator[Answer]:
    """Ask each prompt on the screen, each in a new conversation."""
    program = Program(folder, ("-m", model, "--no-attach"), width=120, height=50)
    try:
        program.see("Ask anything")
        for number, prompt in enumerate(prompts):
            if number:
                program.type("/new\r")
                program.see("Ask anything")
            program.ask(prompt)
            deadline = time.monotonic() + 1800
            node = stored_answer(folder, prompt)
            while node is None or "● writing" in program.text:
                assert time.monotonic() < deadline, prompt
                program.rest(0.2)
                node = stored_answer(folder, prompt)
            program.rest(1.5)
            reason = "error" if node.error else node.end.reason if node.end else "stop"
            noticed = bool(re.search(r"■|repeat", program.text))
            yield Answer("screen", prompt, node.message.content, reason, noticed)
    finally:
        program.close()


def stored_answer(folder: Path, prompt: str) -> Node | None:
    """Return the answer to a prompt from the last conversation. None until it has ended."""
    with History.open(folder / "history.sqlite3") as history:
        summary = history.last()
        if summary is None:
            return None
        path = history.load(summary.id).path()
    if path[-1].message.role != "assistant" or path[-2].message.content != prompt:
        return None
    return path[-1]


FRONTS = {"cli": by_command_line, "serve": by_server, "screen": by_screen}


def main() -> None:
    """Run the fronts one after the other, and print their counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--front", nargs="+", choices=FRONTS, default=list(FRONTS))
    parser.add_argument("--prompts", type=int, default=len(EVERYDAY), help="ask only the first N")
    parser.add_argument("--json", type=Path, help="write every answer to this file")
    options = parser.parse_args()
    report = {}
    answers: list[Answer] = []
    for front in options.front:
        with tempfile.TemporaryDirectory() as folder:
            given = list(FRONTS[front](options.model, Path(folder), EVERYDAY[: options.prompts]))
        answers += given
        counts = dict(Counter(answer.reason for answer in given))
        loops = [answer.prompt for answer in given if answer.looped]
        silent = [answer.prompt for answer in given if answer.silent]
        report[front] = {"ended": counts, "loops": len(loops), "silent": len(silent)}
        print(
            f"{front:7} {counts} looped to a limit: {loops} without a notice: {silent}", flush=True
        )
    if options.json:
        options.json.write_text(json.dumps([asdict(answer) for answer in answers], indent=1))
    print(json.dumps({"model": Path(options.model).name, **report}))


if __name__ == "__main__":
    main()
