"""Kills `localchat batch` at random moments, and compares its throughput with that of `bench`.

    python -m scripts.tools.check_batch [--lines 5000] [--kills 5] [--model guide] [--seed 1]
    python -m scripts.tools.check_batch --throughput [--shape 64+32] [--rounds 3]

1. A file of short prompts is answered; SIGKILL ends the program so many times at random moments, and the same
   command goes on. In the end every line must be answered exactly once, and none be an error.
2. `bench` sweeps the same shape with the same server settings, in rounds between those of `batch`, whose
   prompts and answers have the lengths of those of `bench`. Reported is the throughput of `batch` over the
   best point of `bench`.

The last line is JSON. Ends with 1 if a line is missing, doubled or an error, or if the ratio is below 0.95.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from localchat.measure.workload import TokenScale, prose

ROOT = Path(__file__).resolve().parents[2]
_QUESTIONS = (
    "How do I load model {0}?",
    "What does option number {0} of serve do?",
    "Name {0} keys of the screen.",
    "Which file holds setting {0}?",
)
_LAST_KILL = 0.9
"""Share of the lines before which the kills come: the last ends the program while it still answers."""
_WANTED_RATIO = 0.95
_PARALLEL = 16


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", type=int, default=5000)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--model", default="guide")
    parser.add_argument("--max-tokens", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--throughput", action="store_true")
    parser.add_argument("--shape", default="64+32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--clients", default="8,16,20,24", help="of bench, around the server's slots"
    )
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found = _compare(asked, folder) if asked.throughput else _kill(asked, folder)
    print(json.dumps(found))
    return 0 if found["ok"] else 1


# ---------------------------------------------------------------------------- kills


def _kill(asked: argparse.Namespace, folder: Path) -> dict[str, Any]:
    source, target = folder / "in.jsonl", folder / "out.jsonl"
    source.write_text("".join(_line(number) for number in range(1, asked.lines + 1)))
    chance = random.Random(asked.seed)
    command = ["batch", str(source), "-o", str(target), "-m", asked.model]
    command += ["--max-tokens", str(asked.max_tokens), "--quiet"]
    began_s = time.monotonic()
    done_at_kills: list[int] = []
    points = sorted(chance.sample(range(int(asked.lines * _LAST_KILL)), asked.kills))
    while len(done_at_kills) < asked.kills:
        process = _start(command, stdout=subprocess.DEVNULL)
        while _count(target) < points[len(done_at_kills)] and process.poll() is None:
            time.sleep(0.05)
        time.sleep(chance.random())
        if process.poll() is not None:
            process.wait()
            raise SystemExit(f"batch ended before kill {len(done_at_kills) + 1}: take more --lines")
        process.send_signal(signal.SIGKILL)
        process.wait()
        done_at_kills.append(_count(target))
        print(
            f"kill {len(done_at_kills)} at {done_at_kills[-1]} of {asked.lines} lines", flush=True
        )
    status = _start(command, stdout=subprocess.DEVNULL).wait()
    answers = [json.loads(line) for line in target.read_text().splitlines()]
    times = Counter(answer["custom_id"] for answer in answers)
    missing = [n for n in range(1, asked.lines + 1) if f"line-{n}" not in times]
    errors = [
        each for each in answers if not each["response"] or each["response"]["status_code"] != 200
    ]
    doubled = [name for name, count in times.items() if count > 1]
    return {
        "lines": asked.lines,
        "done_at_kills": done_at_kills,
        "answers": len(answers),
        "missing": len(missing),
        "doubled": len(doubled),
        "errors": len(errors),
        "exit": status,
        "seconds": round(time.monotonic() - began_s, 1),
        "ok": not (missing or doubled or errors or status) and len(answers) == asked.lines,
    }


def _line(number: int) -> str:
    prompt = _QUESTIONS[number % len(_QUESTIONS)].format(number)
    return json.dumps({"prompt": prompt, "temperature": 0}) + "\n"


def _count(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


# ---------------------------------------------------------------------------- throughput


def _compare(asked: argparse.Namespace, folder: Path) -> dict[str, Any]:
    prompt_tokens, answer_tokens = map(int, asked.shape.split("+"))
    running = "://" in asked.model
    common = ["--json"] if running else ["--parallel", str(_PARALLEL), "--json"]
    scale = _scale(asked.model, folder)
    batches, benches = [], []
    for number in range(asked.rounds):
        bench = ["bench", asked.model, "--shape", asked.shape, "--clients", asked.clients]
        report = json.loads(_output([*bench, "--quiet", *common]))
        benches.append(_best(report))
        source, target = folder / f"in{number}.jsonl", folder / f"out{number}.jsonl"
        words = scale.words(prompt_tokens)
        source.write_text(_bodies([words] * asked.lines, answer_tokens, seed=number))
        batch = ["batch", str(source), "-o", str(target), "-m", asked.model, "--quiet", *common]
        batches.append(json.loads(_output(batch))["tokens_per_s"])
        print(f"round {number + 1}: bench {benches[-1]}, batch {batches[-1]} tok/s", flush=True)
    ratio = statistics.median(batches) / statistics.median(benches)
    return {
        "shape": asked.shape,
        "bench": benches,
        "batch": batches,
        "ratio": round(ratio, 3),
        "ok": ratio >= _WANTED_RATIO,
    }


def _best(report: dict[str, Any]) -> float:
    return max(float(point["figures"]["tokens_per_s"]) for point in report["points"])


def _scale(model: str, folder: Path) -> TokenScale:
    """Tokens that the model makes of our words and of its template, as bench measures them."""
    lengths, source, target = [16, 144], folder / "scale.jsonl", folder / "scale-out.jsonl"
    source.write_text(_bodies(lengths, 1, seed=-1))
    _output(["batch", str(source), "-o", str(target), "-m", model, "--quiet", "--json"])
    answers = map(json.loads, target.read_text().splitlines())
    tokens = sorted(one["response"]["body"]["usage"]["prompt_tokens"] for one in answers)
    return TokenScale.of(zip(lengths, tokens, strict=True))


def _bodies(lengths: list[int], answer_tokens: int, seed: int) -> str:
    """Lines of prompts with so many words, and answers that are never shorter."""
    return "".join(
        json.dumps(
            {
                "prompt": prose(words, f"{seed} {number}"),
                "max_tokens": answer_tokens,
                "temperature": 0,
                "ignore_eos": True,
            }
        )
        + "\n"
        for number, words in enumerate(lengths)
    )


def _start(command: list[str], *, stdout: int) -> "subprocess.Popen[str]":
    environ = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'backends'}:{sys.path[0]}"}
    environ["PYTHONPATH"] += f":{os.environ.get('PYTHONPATH', '')}"
    words = [sys.executable, "-m", "localchat", *command]
    return subprocess.Popen(words, cwd=ROOT, env=environ, text=True, stdout=stdout)


def _output(command: list[str]) -> str:
    process = _start(command, stdout=subprocess.PIPE)
    found, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"{command[0]} ended with {process.returncode}")
    return found


if __name__ == "__main__":
    sys.exit(main())
