#!/usr/bin/env python3
"""Measures warm starts: KV read back from the disk beside computing it, and beside llama.cpp's saved slots.

    scripts/bench/bench_warm.py restart --models DIR --vocabulary GGUF [--llamacpp PYTHON]
        [--shapes 0.5b 1.5b] [--tokens 1500 8000 20000]
    scripts/bench/bench_warm.py cost (--models DIR --vocabulary GGUF | --model GGUF)
    scripts/bench/bench_warm.py hour [--model GGUF] [--turns 30]
    scripts/bench/bench_warm.py keys [--model GGUF] [--tokens 1000] [--rounds 40]

`restart`: a prompt is computed by a server, which is then ended; after each of the next starts the
conversation goes on with another question, with the files of KV in the file cache (warm) and without (cold).
llama.cpp's server (PYTHON: of an environment with the wheel xllamacpp) computes, saves and restores the same
prompt; its restoring counts in its first token. The answer to the first prompt is asked again behind each
start: `texts equal` are those that it has in common with the run that computed it. `cost`: servers with and
without the tier are asked in turn what neither has seen, and so are one-shots of the command line. `hour`:
what a conversation of so many turns writes, each question of 40 tokens and answer of 60, with a pause after
each. `keys`: one client of the endpoint asks what another one, with another API key, has asked before, and
what nobody has, in RAM and after a restart: a test of means of what the client could tell from the time of
its first token, with the first client's own second time as a control. Prints medians; the last line is JSON.
"""

import argparse
import http.client
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "backends")]

from localchat.engine.local.process import child_environment  # noqa: E402
from localchat.kv_store.entry import read_head  # noqa: E402
from localchat.measure.workload import prose  # noqa: E402 - found by the path above
from scripts.bench.server import servers  # noqa: E402
from scripts.bench.server.client import Answer, Body, alone, chat  # noqa: E402

_ANSWER_TOKENS = 8
_GUIDE = ROOT / "localchat" / "guide" / "guide.gguf"
_TRAINED = 65_536
_ROOM = 2_000
"""Context beside the prompt."""
_OFF = "--no-cache-disk"
_QUIET_S = 5.0
_WRITING_S = 60.0
"""Most time until a text begins to be written: that thread comes last on a busy machine."""
_PAUSE_S = 0.7
"""So that what one server writes is not written in the other's turn."""

Figures = dict[str, float]


def main() -> int:
    """Measure and print the part that was asked for."""
    asked = _arguments()
    parts: dict[str, Callable[[argparse.Namespace, Path], Figures]] = {
        "restart": _restart,
        "cost": _cost,
        "hour": _hour,
        "keys": _keys,
    }
    with tempfile.TemporaryDirectory(prefix="bench-warm-") as folder:
        figures = parts[asked.part](asked, Path(folder))
    around = {"rounds": asked.rounds, "load_average": round(os.getloadavg()[0], 2)}
    print(json.dumps({**around, **figures}))
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=("restart", "cost", "hour", "keys"))
    parser.add_argument("--models", type=Path, metavar="DIR", default=Path("bench-models"))
    parser.add_argument("--model", type=Path, metavar="GGUF", help="for cost, hour and keys")
    parser.add_argument("--vocabulary", type=Path, metavar="GGUF", help="to write missing models")
    parser.add_argument("--llamacpp", type=Path, metavar="PYTHON")
    parser.add_argument("--shapes", nargs="+", choices=("0.5b", "1.5b"), default=["0.5b"])
    parser.add_argument("--tokens", type=int, nargs="+", default=None, metavar="N")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--turns", type=int, default=30, metavar="N")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    return parser.parse_args()


def _model(asked: argparse.Namespace, shape: str) -> Path:
    """A model of this shape with random weights, written where it is missing."""
    path = Path(asked.models, f"random-{shape}-64k.gguf")
    if not path.exists():
        from gguf import GGUFReader

        from scripts.bench.llamacpp.gguf_models import MIDDLE, SMALL, write_model

        sizes = {"0.5b": SMALL, "1.5b": MIDDLE}
        path.parent.mkdir(parents=True, exist_ok=True)
        reader = GGUFReader(asked.vocabulary)
        write_model(path, reader, 0, sizes[shape], context=_TRAINED)
    return path


def _tell(figures: Figures, name: str, values: Sequence[float], unit: str = "s") -> float:
    """Print and keep a median, with its range."""
    middle = statistics.median(values)
    figures[name] = round(middle, 4)
    spread = f"   {min(values):.3f} to {max(values):.3f}" if len(values) > 1 else ""
    print(f"{name:<58}{middle:10.3f} {unit}{spread}", flush=True)
    return middle


# ---------------------------------------------------------------------------- after a restart


class _Talk(NamedTuple):
    """A conversation of one long message, its answer, and questions that follow."""

    text: str
    answer: str = ""

    def opening(self) -> Body:
        return chat(self.text, _ANSWER_TOKENS, temperature=0)

    def following(self, number: int) -> Body:
        """A question that goes on, for the time of its first token: a server may hold back text that is only
        white space, so there is no second one."""
        messages = [
            {"role": "user", "content": self.text},
            {"role": "assistant", "content": self.answer},
            {"role": "user", "content": f"And number {number}, in one word?"},
        ]
        return {**self.opening(), "messages": messages, "max_tokens": 1}


class _Ours:
    """localchat's server over one data folder."""

    name = "ours"

    def __init__(self, model: Path, folder: Path, context: int, threads: int) -> None:
        self.stored = folder / "ours"
        self._model, self._folder = model, folder
        self._options = ["--ctx", str(context), "--threads", str(threads), "--parallel", "1"]

    def compute(self, talk: _Talk) -> Answer:
        """Compute the prompt, and end the server once the disk has it."""
        with self._server() as served:
            servers.wait_ready(served)
            answer = alone(served.port, talk.opening())
            _wait_written(self.stored)
        return answer

    def go_on(self, talk: _Talk, number: int) -> tuple[float, str]:
        """First token of the next question after a start, and the first answer asked again."""
        with self._server() as served:
            servers.wait_ready(served)
            first_s = alone(served.port, talk.following(number)).first_s
            return first_s, alone(served.port, talk.opening()).text

    def _server(self) -> AbstractContextManager[servers.Served]:
        return servers.localchat("ours", ROOT, self._model, self._folder, self._options)


class _LlamaCpp:
    """llama.cpp's server, whose slot is saved and restored by its clients."""

    name = "llama.cpp"

    def __init__(self, python: Path, model: Path, folder: Path, context: int, threads: int) -> None:
        self._model, self._folder, self._python = model, folder, python
        self._context, self._threads = context, threads
        self.stored = folder / "slot.bin"

    def compute(self, talk: _Talk) -> Answer:
        """Compute the prompt and save the slot."""
        with self._server() as served:
            servers.wait_ready(served)
            answer = alone(served.port, talk.opening())
            self._slot(served, "save")
        return answer

    def go_on(self, talk: _Talk, number: int) -> tuple[float, str]:
        """First token of the next question after a start, restoring included."""
        with self._server() as served:
            servers.wait_ready(served)
            began_s = time.perf_counter()
            self._slot(served, "restore")
            restored_s = time.perf_counter() - began_s
            first_s = restored_s + alone(served.port, talk.following(number)).first_s
            return first_s, alone(served.port, talk.opening()).text

    def _slot(self, served: servers.Served, action: str) -> None:
        wire = http.client.HTTPConnection("127.0.0.1", served.port, timeout=120)
        body = json.dumps({"filename": self.stored.name})
        wire.request("POST", f"/slots/0?action={action}", body)
        found = wire.getresponse()
        if found.status != 200:
            raise RuntimeError(f"llama.cpp did not {action}: {found.read()[:200]!r}")
        found.read()
        wire.close()

    def _server(self) -> AbstractContextManager[servers.Served]:
        return servers.llamacpp(
            self._python,
            self._model,
            self._folder,
            slots=1,
            context=self._context,
            threads=self._threads,
        )


def _restart(asked: argparse.Namespace, folder: Path) -> Figures:
    """First tokens after restarts, by shape and length."""
    figures: Figures = {}
    for shape in asked.shapes:
        model = _model(asked, shape)
        for tokens in asked.tokens or [1500, 8000, 20_000]:
            place = folder / f"{shape}-{tokens}"
            place.mkdir()
            # A word of this text is two tokens.
            talk = _Talk(prose(tokens // 2, f"{shape} {tokens}"))
            context = tokens * 5 // 4 + _ROOM
            rivals: list[_Ours | _LlamaCpp] = [_Ours(model, place, context, asked.threads)]
            if asked.llamacpp:
                rivals.append(_LlamaCpp(asked.llamacpp, model, place, context, asked.threads))
            _restarts(rivals, talk, asked.rounds, figures, shape)
    return figures


def _restarts(
    rivals: Sequence[_Ours | _LlamaCpp], talk: _Talk, rounds: int, figures: Figures, shape: str
) -> None:
    talks, computed, label = {}, {}, shape
    for rival in rivals:
        answer = rival.compute(talk)
        talks[rival.name] = talk._replace(answer=answer.text)
        label = f"{shape}, {answer.prompt_tokens:,} tokens"
        computed[rival.name] = _tell(figures, f"{label}: {rival.name} computes", [answer.first_s])
        size_mb = sum(path.stat().st_size for path in _files(rival.stored)) / 1e6
        _tell(figures, f"{label}: {rival.name} stores", [size_mb], "MB")
    found: dict[tuple[str, str], list[float]] = {}
    equal: dict[str, int] = dict.fromkeys(talks, 0)
    for number in range(rounds):
        for cold in (False, True):
            for rival in rivals:
                _fill_cache(rival.stored, cold=cold)
                known = talks[rival.name]
                first_s, text = rival.go_on(known, 2 * number + cold)
                found.setdefault((rival.name, "cold" if cold else "warm"), []).append(first_s)
                equal[rival.name] += text == known.answer
    for (name, state), values in found.items():
        middle = _tell(figures, f"{label}: {name}, file cache {state}", values)
        ratio = computed[name] / middle
        _tell(figures, f"{label}: {name}, {state}: times as fast", [ratio], "x")
    for name, count in equal.items():
        _tell(figures, f"{label}: {name}: texts equal of {2 * rounds}", [count], "")


def _files(path: Path) -> list[Path]:
    return [path] if path.is_file() else [one for one in path.rglob("*.kv") if one.is_file()]


def _fill_cache(stored: Path, *, cold: bool) -> None:
    """Have the kernel's file cache hold all of these files, or none of them."""
    for path in _files(stored):
        with path.open("rb") as file:
            if cold:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            else:
                while file.read(1 << 24):
                    pass


def _wait_written(folder: Path) -> None:
    """Wait until something was written, and nothing more for a while."""
    size, since_s, end_s = 0, time.monotonic(), time.monotonic() + _WRITING_S
    while time.monotonic() < end_s and (not size or time.monotonic() - since_s < _QUIET_S):
        now = sum(path.stat().st_size for path in _files(folder))
        if now != size:
            size, since_s = now, time.monotonic()
        time.sleep(0.1)


# ---------------------------------------------------------------------------- where nothing is restored


def _cost(asked: argparse.Namespace, folder: Path) -> Figures:
    """With the tier over without it: first token and rate of a server, time of a one-shot."""
    model, figures = asked.model or _model(asked, asked.shapes[0]), Figures()
    length = (asked.tokens or [600])[0]
    options = ["--ctx", "4096", "--threads", str(asked.threads), "--parallel", "1"]
    ways: dict[str, list[str]] = {"on": [], "off": [_OFF]}
    found: dict[tuple[str, str], list[float]] = {}
    with ExitStack() as stack:
        running = {
            name: stack.enter_context(
                servers.localchat(name, ROOT, model, folder, [*options, *more])
            )
            for name, more in ways.items()
        }
        for served in running.values():
            servers.wait_ready(served)
            alone(served.port, chat("warm-up", 8))
        for number in range(asked.rounds):
            for name in list(ways) if number % 2 else list(reversed(ways)):
                body = chat(prose(length // 2, number), 32, temperature=0)
                before_s = running[name].all_cpu_s()
                answer = alone(running[name].port, {**body, "speculation": False})
                spent_s = running[name].all_cpu_s() - before_s
                found.setdefault((name, "CPU of an answer"), []).append(spent_s)
                found.setdefault((name, "first token"), []).append(answer.first_s)
                found.setdefault((name, "time a token"), []).append(1 / answer.tokens_per_s)
                time.sleep(_PAUSE_S)
    written = sum(path.stat().st_size for path in _files(folder / "on")) / 1e6
    _tell(figures, f"written for {asked.rounds} answers", [written], "MB")
    for number in range(asked.rounds):
        for name in list(ways) if number % 2 else list(reversed(ways)):
            text = prose(length // 2, f"one-shot {number}")
            options = ["--max-tokens", "8", "--ctx", "4096", *ways[name]]
            spent_s = _one_shot(model, folder / f"shots-{name}", text, options)
            found.setdefault((name, "one-shot"), []).append(spent_s)
    for what in ("first token", "time a token", "CPU of an answer", "one-shot"):
        on = _tell(figures, f"{what}, on", found["on", what])
        off = _tell(figures, f"{what}, off", found["off", what])
        pairs = zip(found["off", what], found["on", what], strict=True)
        _tell(figures, f"{what}: off over on", [off / on], "x")
        _tell(figures, f"{what}: off over on, by pairs", [one / two for one, two in pairs], "x")
    return figures


def _one_shot(model: Path, data: Path, text: str, options: Sequence[str]) -> float:
    """Seconds of the command line's answer to a text from a pipe."""
    command = [sys.executable, "-m", "localchat", "-m", str(model), *options, "What is this?"]
    began_s = time.perf_counter()
    subprocess.run(
        command,
        env=_environ(data),
        cwd=ROOT,
        input=text,
        text=True,
        capture_output=True,
        check=True,
    )
    return time.perf_counter() - began_s


def _environ(data: Path) -> dict[str, str]:
    environ = child_environment(os.environ)
    environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "backends")])
    environ["LOCALCHAT_DATA_DIR"] = str(data)
    return environ


# ---------------------------------------------------------------------------- an hour of chat

_QUESTION_TOKENS, _REPLY_TOKENS = 40, 60


def _hour(asked: argparse.Namespace, folder: Path) -> Figures:
    """What the turns of one conversation write, beside the KV that they have."""
    figures, messages = Figures(), list[dict[str, str]]()
    options = ["--threads", str(asked.threads), "--parallel", "1"]
    with servers.localchat("ours", ROOT, asked.model or _GUIDE, folder, options) as served:
        servers.wait_ready(served)
        for turn in range(asked.turns):
            messages.append({"role": "user", "content": prose(_QUESTION_TOKENS // 2, turn)})
            body = {**chat("", _REPLY_TOKENS, temperature=0), "messages": messages}
            answer = alone(served.port, body)
            messages.append({"role": "assistant", "content": answer.text})
            time.sleep(_PAUSE_S)
        _wait_written(folder / "ours")
    kept = [read_head(path) for path in _files(folder / "ours")]
    bytes_per_token = max(one.payload_bytes / len(one.ids) for one in kept if len(one.ids) >= 256)
    whole = answer.prompt_tokens + answer.tokens
    written = sum(one.file_bytes for one in kept)
    _tell(figures, "tokens of the conversation", [whole], "")
    _tell(figures, "files", [len(kept)], "")
    _tell(figures, "written", [written / 1e6], "MB")
    _tell(
        figures,
        "written, times the KV of the conversation",
        [written / whole / bytes_per_token],
        "x",
    )
    return figures


# ---------------------------------------------------------------------------- two clients

_FIRST_KEY, _OTHER_KEY = "first-client-key", "other-client-key"


def _keys(asked: argparse.Namespace, folder: Path) -> Figures:
    """Whether one client's first tokens tell what another one's prompts were."""
    draw, words = random.Random(asked.rounds), (asked.tokens or [1000])[0] // 2
    # The first text of a pair is asked by the first client, the second by nobody before.
    pairs = [(prose(words, 2 * at), prose(words, 2 * at + 1)) for at in range(2 * asked.rounds)]
    in_ram, on_disk = pairs[: asked.rounds], pairs[asked.rounds :]
    keys = folder / "keys.txt"
    keys.write_text(f"{_FIRST_KEY}\n{_OTHER_KEY}\n")
    keys.chmod(0o600)
    options = ["--api-key-file", str(keys), "--threads", "1", "--parallel", "1"]
    figures, rows = Figures(), list[list[_Spent]]()

    def spent(served: servers.Served, text: str, key: str) -> _Spent:
        before_s = served.all_cpu_s()
        first_s = alone(served.port, chat(text, 1, temperature=0), key).first_s
        return _Spent(first_s, served.all_cpu_s() - before_s)

    def compare(served: servers.Served, pair: tuple[str, str]) -> None:
        found = {place: spent(served, pair[place], _OTHER_KEY) for place in draw.sample((0, 1), 2)}
        rows.append([found[0], found[1], spent(served, pair[0], _FIRST_KEY)])

    with servers.localchat("ours", ROOT, asked.model or _GUIDE, folder, options) as served:
        servers.wait_ready(served)
        for pair in in_ram:
            spent(served, pair[0], _FIRST_KEY)
            compare(served, pair)
        _tell_means(figures, "RAM", rows)
        for pair in on_disk:
            spent(served, pair[0], _FIRST_KEY)
        _wait_written(folder / "ours")
    rows.clear()
    with servers.localchat("ours", ROOT, asked.model or _GUIDE, folder, options) as served:
        servers.wait_ready(served)
        spent(served, "warm-up", _OTHER_KEY)
        for pair in on_disk:
            compare(served, pair)
    _tell_means(figures, "disk", rows)
    return figures


class _Spent(NamedTuple):
    """Seconds to a first token."""

    first: float
    cpu: float


def _tell_means(figures: Figures, where: str, rows: Sequence[Sequence[_Spent]]) -> None:
    """Print first tokens of texts that another key has asked, that nobody has, and that the same key has."""
    names = ("asked by another key", "asked by nobody", "asked by the same key")
    for clock in _Spent._fields:
        label = where if clock == "first" else f"{where}, CPU time"
        times = [[getattr(one, clock) for one in row] for row in rows]
        for place, name in enumerate(names):
            _tell(figures, f"{label}: {name}", [row[place] for row in times])
        for place, name in ((0, "another key"), (2, "the same key")):
            differences = [row[place] - row[1] for row in times]
            error_s = statistics.stdev(differences) / len(differences) ** 0.5
            mean_s = statistics.fmean(differences)
            _tell(figures, f"{label}: {name} less nobody, mean", [mean_s])
            _tell(figures, f"{label}: {name} less nobody, standard error", [error_s])


if __name__ == "__main__":
    sys.exit(main())
