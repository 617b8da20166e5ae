#!/usr/bin/env python3
"""Measures the server from outside: its own cost, and its speed beside llama.cpp's HTTP server.

    scripts/bench/bench_server.py wire [--against CHECKOUT]
    scripts/bench/bench_server.py host MODEL [--step-us N ...] [--streams N ...] [--against CHECKOUT]
    scripts/bench/bench_server.py model [MODEL ...] [--quick] [--long] [--rival PROGRAM] [--library LIBRARY]
                                    [--against CHECKOUT]

`wire` serves the scripted backend, so that the engine is not the limit: tokens a second over HTTP, CPU of the
server process a token and a request, the cost of a name that nobody knows, and latency and memory after 3,000
requests.

`host` serves MODEL's tokenizer over steps that compute nothing but take N microseconds, as a GPU would: CPU
per token of server and engine, with sampled answers of 200 or 512 tokens, drafts off and on.

`model` serves real models by localchat and by llama.cpp's own server in the wheel xllamacpp, with the same
library, threads, slots and context. It measures 1, 4 and 8 clients, greedy, and at temperature 0.8 with top-k
and top-p, drafts on and off; edits, time to first token of 500 and 2,000 tokens, a second turn at once and
after a pause for reading, memory, and CPU time per token. Prompts are natural and never repeat. MODEL is a GGUF
file. Without one, SmolLM2 and Qwen2.5-Coder of the folder LOCALCHAT_REAL_MODELS are measured. A round measures
everything once, with the
servers in turn. Answers are shortened and the longest prompt is left out where all rounds would otherwise take
longer than --minutes per model. No round starts that would end later, and --quick takes two rounds of fewer
cases. --long measures only eight clients with prompts of 2,000 tokens, once, and the preemptions. Sampling is
the same on both sides: what a model's settings add is set to no effect. PROGRAM is the interpreter of an
environment with xllamacpp, if this one has none, or a compiled llama-server; LIBRARY is then a folder with the
same libraries.

CHECKOUT is a second checkout of localchat, measured in the same rounds. Prints tables of medians; the last line
is JSON.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "backends")]

from scripts.bench.server import parts, prompts, servers  # noqa: E402 - found by the path above
from scripts.bench.server.client import alone, chat  # noqa: E402
from scripts.bench.server.echo_backend import STEP_US  # noqa: E402

_HOST_STREAMS = (1, 8, 64, 128)
_HOST_TOKENS = {1: 512, 8: 512}
"""Tokens of an answer of `host` by the number of streams. 200 for others."""
_STEP_MS = 20
"""A step of a GPU with 64 streams; in a step of 0 ms the engine runs ahead, and events come in batches."""
_PLAIN = {"repeat_penalty": 1.0, "min_p": 0}
_SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, **_PLAIN},
    "sampled": {"temperature": 0.8, "top_k": 40, "top_p": 0.95, **_PLAIN},
}
_READING_S = 3.0
_TURNS = (
    ("greedy", _SAMPLINGS["greedy"], _READING_S),
    ("greedy and at once", _SAMPLINGS["greedy"], 0.0),
    ("sampled", _SAMPLINGS["sampled"], _READING_S),
)
"""Second turns: name, sampling, and the pause before them."""
_ANSWER_TOKENS = {1: 96, 4: 64, 8: 48}
"""Length of an answer by the number of clients."""
_EDIT_WORDS = 90
_EDIT_TOKENS = 96
_CONTEXT = 8192
_LONG_CLIENTS = 8
_LONG_TOKENS = 2000
_LONG_CONTEXT = 20_480
_SHORT_PROMPT_TOKENS = 60
"""A question with the template around it."""
_SHARED_STEP = 0.6
"""Time of a token beside others over that of a lone one."""
_REAL = ("SmolLM2-135M-Instruct*.gguf", "qwen2.5-coder-1.5b-instruct*.gguf")


def main() -> int:
    """Measure and print the part that was asked for."""
    asked = _arguments()
    result: dict[str, Any] = {"load_average": round(os.getloadavg()[0], 2)}
    with tempfile.TemporaryDirectory(prefix="bench-server-") as folder:
        if asked.part == "wire":
            figures = _wire(asked, Path(folder))
            _print(figures)
            result |= {"rounds": asked.rounds, **figures}
        if asked.part == "host":
            figures = _host(asked, Path(folder))
            _print(figures)
            result |= {"rounds": asked.rounds, **figures}
        for model in asked.model if asked.part == "model" else ():
            result[model.name] = _model(asked, model, Path(folder))
    print(json.dumps(result))
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=("wire", "host", "model"))
    parser.add_argument("model", type=Path, nargs="*", help="GGUF files")
    parser.add_argument("--quick", action="store_true", help="two rounds of 1 and 4 clients")
    parser.add_argument("--long", action="store_true", help="only eight prompts of 2,000 tokens")
    parser.add_argument("--minutes", type=float, default=10.0, help="limit for each model")
    parser.add_argument("--rival", type=Path, metavar="PROGRAM")
    parser.add_argument("--library", default="xllamacpp", help="llama.cpp that localchat uses")
    parser.add_argument("--against", type=Path, metavar="CHECKOUT")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, nargs="+", metavar="N")
    parser.add_argument("--step-us", type=int, nargs="+", metavar="N", default=[0, 3000])
    parser.add_argument("--tokens", type=int, default=128, help="of each answer of `wire`")
    parser.add_argument("--requests", type=int, default=3000, help="of `wire`, 0: leave out")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    asked = parser.parse_args()
    folder = os.environ.get("LOCALCHAT_REAL_MODELS", "")
    if asked.part == "model" and not asked.model and folder:
        asked.model = [path for name in _REAL for path in sorted(Path(folder).glob(name))[:1]]
    if asked.part == "model" and not asked.model:
        parser.error("the part `model` needs GGUF files, or LOCALCHAT_REAL_MODELS")
    if asked.part == "host" and len(asked.model) != 1:
        parser.error("the part `host` needs one GGUF file")
    if asked.rival is None and find_spec("xllamacpp"):
        asked.rival = Path(sys.executable)
    if asked.quick:
        asked.rounds = 2
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


def _host(asked: argparse.Namespace, folder: Path) -> parts.Figures:
    """Measure what server and engine cost beside the steps of a model."""
    figures: parts.Figures = {}
    slots = str(_HOST_STREAMS[-1])
    options = ["--backend", servers.ECHO, "--parallel", slots, "--ctx", str(_CONTEXT)]
    for step_us in asked.step_us:
        os.environ[STEP_US] = str(step_us)
        with ExitStack() as stack:
            running = [
                stack.enter_context(
                    servers.localchat(name, root, asked.model[0], folder, options, asked.library)
                )
                for name, root in _checkouts(asked).items()
            ]
            for served in running:
                servers.wait_ready(served)
            for streams in asked.streams or _HOST_STREAMS:
                tokens = _HOST_TOKENS.get(streams, 200)
                for drafts in (False, True):
                    fields = {"temperature": 0.8, "speculation": drafts}
                    label = f"{streams} streams, {step_us} us, drafts {'on' if drafts else 'off'}"
                    measure = parts.host_streams(streams, tokens, label, fields)
                    parts.rounds(running, 1, measure)  # warm-up
                    figures |= parts.rounds(running, asked.rounds, measure)
    return figures


def _model(asked: argparse.Namespace, model: Path, folder: Path) -> parts.Figures:
    """Measure a real model, beside llama.cpp's own server."""
    began_s = time.monotonic()
    clients = asked.streams or ([1, 4] if asked.quick else [1, 4, 8])
    slots = max(clients)
    rival_context = _CONTEXT
    if asked.long:
        # localchat plans the KV cache for its clients. All clients of llama.cpp's server share one context.
        slots = _LONG_CLIENTS
        rival_context = _LONG_CONTEXT
    options = ["--parallel", str(slots), "--ctx", str(_CONTEXT), "--threads", str(asked.threads)]
    values: dict[str, dict[str, list[float]]] = {}
    with ExitStack() as stack:
        running = [
            stack.enter_context(
                servers.localchat(name, root, model, folder, options, asked.library)
            )
            for name, root in _checkouts(asked).items()
        ]
        if asked.rival:
            rival = servers.llamacpp(
                asked.rival,
                model,
                folder,
                slots=slots,
                context=rival_context,
                threads=asked.threads,
            )
            running.append(stack.enter_context(rival))
        for served in running:
            servers.wait_ready(served)
            alone(served.port, chat("Say hello.", 8))
        if asked.long:
            words = parts.words_for(running[0], [_LONG_TOKENS])[_LONG_TOKENS]
            figures = parts.model_long(words, _LONG_CLIENTS, running)
            _print(figures)
            return figures
        share, prompt_tokens = _fit(asked, clients, parts.model_speed(running[0]), len(running))
        lengths = parts.words_for(running[0], prompt_tokens)
        servers.settle(running)
        cases = _cases(clients, share)
        rounds = 0
        round_s = 0.0
        while rounds < asked.rounds:
            round_began_s = time.monotonic()
            if rounds and round_began_s + round_s > began_s + 60 * asked.minutes:
                break
            order = running if rounds % 2 == 0 else running[::-1]
            for case in cases:
                _record(values, parts.model_case(case, order))
            _record(values, parts.model_first_tokens(lengths, rounds, order))
            for name, sampling, pause_s in _TURNS:
                turns = parts.model_turns(lengths[500], rounds, name, sampling, pause_s, order)
                _record(values, turns)
            rounds += 1
            round_s = time.monotonic() - round_began_s
            print(f"round {rounds} of {asked.rounds}: {round_s:.0f} s", file=sys.stderr, flush=True)
        _record(values, parts.model_memory(running))
    figures = {
        name: {server: statistics.median(seen) for server, seen in by_server.items()}
        for name, by_server in values.items()
    }
    print(f"{model.name}, {asked.threads} threads, medians of {rounds} rounds")
    _print(figures)
    return figures


def _fit(
    asked: argparse.Namespace,
    clients: Sequence[int],
    speed: tuple[float, float],
    servers: int,
) -> tuple[float, list[int]]:
    """Return the part of the answers and the lengths of the prompts with which all rounds take --minutes.

    speed: seconds per prompt token and per answer token.
    """
    prompt_s, token_s = speed
    questions_s = sum(clients) * len(_SAMPLINGS) * _SHORT_PROMPT_TOKENS * prompt_s
    chosen: tuple[float, list[int]] = (1.0, [500])
    for share, lengths in (
        (1.0, [500, 2000]),
        (0.5, [500, 2000]),
        (0.5, [500]),
        (0.25, [500]),
    ):
        chosen = (share, lengths)
        if asked.quick and (share > 0.5 or len(lengths) > 1):
            continue
        answers_s = sum(
            _ANSWER_TOKENS.get(count, 48) * count * token_s * (_SHARED_STEP if count > 1 else 1)
            for count in clients
        )
        # Drafts on and off are two cases of ours.
        answers_s *= share * (len(_SAMPLINGS) + 1)
        prompts_s = (sum(lengths) + len(_TURNS) * 600 + 300) * prompt_s
        if asked.rounds * servers * (questions_s + answers_s + prompts_s) < 60 * asked.minutes:
            break
    print(f"answers of {share:.0%} of their length, prompts of {lengths} tokens", file=sys.stderr)
    return chosen


def _cases(clients: Sequence[int], share: float) -> list[parts.Case]:
    """Return the cases of a round. All draw from one list of prompts, so that none is repeated.

    Greedy requests have no drafts.
    """
    questions = prompts.questions()
    sampled = _SAMPLINGS["sampled"]
    cases = []
    for count in clients:
        name = "1 client" if count == 1 else f"{count} clients"
        tokens = round(_ANSWER_TOKENS.get(count, 48) * share)
        # llama.cpp's server has no drafts, but is measured twice: a machine may slow down between two cases.
        for label, fields in (
            ("greedy", _SAMPLINGS["greedy"]),
            ("sampled, drafts off", {**sampled, "speculation": False}),
            ("sampled, drafts on", {**sampled, "speculation": True}),
        ):
            cases.append(parts.Case(f"{name}, {label}", count, tokens, fields, questions))
    edits = prompts.edits(_EDIT_WORDS)
    tokens = round(_EDIT_TOKENS * max(share, 0.5))
    cases.append(parts.Case("1 client, edit", 1, tokens, sampled, edits))
    return cases


def _record(values: dict[str, dict[str, list[float]]], figures: parts.Figures) -> None:
    for name, by_server in figures.items():
        for server, value in by_server.items():
            values.setdefault(name, {}).setdefault(server, []).append(value)


def _print(figures: parts.Figures) -> None:
    for name, by_server in figures.items():
        values = "   ".join(f"{server} {value:10.2f}" for server, value in by_server.items())
        others = [value for server, value in by_server.items() if server != "ours"]
        ratios = "  ".join(f"{by_server['ours'] / other:.3f}" for other in others if other)
        print(f"{name:<48} {values}   {'ratio ' + ratios if ratios else ''}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
