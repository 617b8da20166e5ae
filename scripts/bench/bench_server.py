#!/usr/bin/env python3
"""Measures the server from outside: its own cost, and its speed beside llama.cpp's HTTP server.

    scripts/bench/bench_server.py wire [--against CHECKOUT]
    scripts/bench/bench_server.py model --models DIR --vocabulary GGUF [--llamacpp PYTHON] [--against CHECKOUT]

`wire` serves the scripted backend, so that the engine is not the limit: tokens a second over HTTP, CPU of the
server process a token and a request, the cost of a name that nobody knows, and latency and memory after 3,000
requests. `model` serves the successor model of bench_llamacpp.py by localchat and by llama.cpp's own server
(PYTHON: of an environment with the wheel xllamacpp): 1, 4 and 8 clients, greedy and sampled, with and without
a seed, time to first token, a second turn, memory. CHECKOUT is a second checkout of localchat, measured in the
same rounds. All servers run at once and are asked in turn. Prints a table of medians; the last line is JSON.
"""

import argparse
import json
import os
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "backends")]

from scripts.bench.server import parts, servers  # noqa: E402 - found by the path above

_STEP_MS = 20
"""A step of a GPU with 64 streams; in a step of 0 ms the engine runs ahead, and events come in batches."""
_SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "greedy, drafts off": {"temperature": 0, "speculation": False},
    "temperature 0.8": {"temperature": 0.8},
    "temperature 0.8, seed": {"temperature": 0.8, "seed": 7},
}


def main() -> int:
    """Measure and print the part that was asked for."""
    asked = _arguments()
    with tempfile.TemporaryDirectory(prefix="bench-server-") as folder:
        figures = (_wire if asked.part == "wire" else _model)(asked, Path(folder))
    _print(figures)
    around = {"rounds": asked.rounds, "load_average": round(os.getloadavg()[0], 2)}
    print(json.dumps({**around, **figures}))
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=("wire", "model"))
    parser.add_argument("--models", type=Path, metavar="DIR")
    parser.add_argument("--vocabulary", type=Path, metavar="GGUF", help="to write missing models")
    parser.add_argument("--only", choices=("streams", "turns"), help="a half of `model`")
    parser.add_argument("--llamacpp", type=Path, metavar="PYTHON")
    parser.add_argument("--against", type=Path, metavar="CHECKOUT")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, nargs="+", metavar="N")
    parser.add_argument("--tokens", type=int, default=128, help="of each answer")
    parser.add_argument("--requests", type=int, default=3000, help="of `wire`, 0: leave out")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    asked = parser.parse_args()
    if asked.part == "model" and asked.models is None:
        parser.error("the part `model` needs --models DIR")
    return asked


def _checkouts(asked: argparse.Namespace) -> dict[str, Path]:
    checkouts = {"ours": ROOT}
    if asked.against:
        checkouts = {"before": asked.against.resolve(), **checkouts}
    return checkouts


def _wire(asked: argparse.Namespace, folder: Path) -> parts.Figures:
    """The server's own cost, with the scripted backend."""
    figures: parts.Figures = {}
    for step_ms in (0, _STEP_MS):
        with ExitStack() as stack:
            script = servers.write_script(folder / f"scripted-{step_ms}.script", step_ms)
            options = ["--backend", servers.SCRIPTED, "--parallel", "64"]
            running = [
                stack.enter_context(servers.localchat(name, root, script, folder, options))
                for name, root in _checkouts(asked).items()
            ]
            for served in running:
                servers.wait_ready(served)
            for streams in asked.streams or [8, 64]:
                label = f"{streams} streams, steps of {step_ms} ms"
                # As many tokens in all, whatever the number of streams, so that the clock is fine enough.
                tokens = asked.tokens * 64 // streams // (4 if step_ms and streams < 64 else 1)
                parts.rounds(running, 1, parts.wire_streams(streams, 16, label))  # warm-up
                measure = parts.wire_streams(streams, min(tokens, 4000), label)
                figures |= parts.rounds(running, asked.rounds, measure)
            if step_ms:
                continue
            names = {"without a name": None, "by its name": script.stem, "by an unknown name": "x"}
            figures |= parts.rounds(running, asked.rounds, parts.wire_requests(names, 100))
            for served in running if asked.requests else ():
                for name, value in parts.after_requests(served, asked.requests).items():
                    figures.setdefault(name, {})[served.name] = value
    return figures


def _model(asked: argparse.Namespace, folder: Path) -> parts.Figures:
    """Speed of a model of real shapes, beside llama.cpp's own server."""
    from scripts.bench.llamacpp.gguf_models import models

    model = models(asked.models, asked.vocabulary, seed=0).successor
    streams = asked.streams or [1, 4, 8]
    slots, context, threads = max(streams), 16_384, asked.threads
    options = ["--parallel", str(slots), "--ctx", str(context), "--threads", str(threads)]
    figures: parts.Figures = {}
    with ExitStack() as stack:
        running = [
            stack.enter_context(servers.localchat(name, root, model, folder, options))
            for name, root in _checkouts(asked).items()
        ]
        if asked.llamacpp:
            rival = servers.llamacpp(
                asked.llamacpp, model, folder, slots=slots, context=context, threads=threads
            )
            running.append(stack.enter_context(rival))
        for served in running:
            servers.wait_ready(served)
        parts.rounds(running, 1, parts.model_streams(1, 8, "warm-up", {}))
        for count in streams if asked.only != "turns" else ():
            for label, sampling in _SAMPLINGS.items():
                measure = parts.model_streams(count, asked.tokens, label, sampling)
                found = parts.rounds(running, asked.rounds, measure)
                _print(found)
                figures |= found
        if asked.only != "streams":
            figures |= parts.rounds(running, asked.rounds, parts.model_turns(245, 740))
        figures |= parts.rounds(running, 1, parts.model_memory)
    return figures


def _print(figures: parts.Figures) -> None:
    for name, by_server in figures.items():
        values = "   ".join(f"{server} {value:10.2f}" for server, value in by_server.items())
        others = [value for server, value in by_server.items() if server != "ours"]
        ratios = "  ".join(f"{by_server['ours'] / other:.3f}" for other in others if other)
        print(f"{name:<48} {values}   {'ratio ' + ratios if ratios else ''}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
