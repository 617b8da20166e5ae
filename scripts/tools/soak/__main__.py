"""Soaks one server with many clients, and reads the engine's own counts. Three parts:

1. All clients stream for the whole time: no error, no silence, memory flat, shares even, and the tokens a
   second compared with those of the same engine without HTTP.
2. The same with a tenth of the clients vanishing in the middle of answers: no step computes for them.
3. The engine is killed under all streams: each ends with an error event, and the next request is served.

The last line is JSON. Ends with 1 if a check fails.
"""

import argparse
import asyncio
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

from localchat.engine.events import Done
from localchat.engine.local.engine import LocalEngine
from localchat.engine.options import EngineOptions
from localchat.engine.request import GenerateRequest, Message, Messages, Sampling
from localchat.fit.load_options import LoadOptions
from scripts.tools.soak.clients import QUESTIONS, Plan, Report
from scripts.tools.soak.server import Watched, clients, serving

GUIDE = Path(__file__).parents[3] / "localchat/guide/guide.gguf"
_FLAT_AFTER = 1 / 6
_FLAT_SHARE = 1.05
_FLAT_BYTES = 8_000_000
_SILENCE_S = 30.0
_LEAST_SHARE = 0.5
_LEAST_RATE = 0.8


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=GUIDE)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--parallel", type=int, default=16)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        environ = {**os.environ, "LOCALCHAT_DATA_DIR": folder}
        log = Path(folder) / "server.log"
        bare = asyncio.run(_bare(asked.model, asked.clients, asked.seconds / 4, asked.parallel))
        with serving(asked.model, environ, log, parallel=asked.parallel) as server:
            found = _soak(server, asked.clients, asked.seconds) | {"bare_tokens_per_s": bare}
            found["rate_share"] = found["tokens_per_s"] / bare
            found |= _vanish(server, asked.clients, asked.seconds / 4)
            found |= _kill(server, 16)
        sys.stderr.write(log.read_text(errors="replace")[-4000:])
    wrong = _wrong(found)
    for name, value in found.items():
        print(f"{name:24} {value if not isinstance(value, float) else round(value, 3)}")
    print("\n".join(wrong) or "all well")
    print(msgspec.json.encode(found).decode())
    return int(bool(wrong))


async def _bare(model: Path, count: int, seconds: float, parallel: int) -> float:
    """Tokens a second of the same load on the engine itself, over its pipe."""
    engine = LocalEngine(
        EngineOptions(model, load=LoadOptions(max_slots=parallel)), notify=lambda text: None
    )
    tokens = 0
    until_s = 0.0

    async def client(number: int) -> None:
        nonlocal tokens
        turn = number
        while time.monotonic() < until_s:
            turn += 1
            text = f"{QUESTIONS[turn % len(QUESTIONS)]} ({number})"
            request = GenerateRequest(
                Messages((Message("user", text),)),
                sampling=Sampling(temperature=1.0),
                max_tokens=64,
            )
            async for event in engine.generate(request):
                if isinstance(event, Done):
                    tokens += event.usage.completion_tokens

    try:
        await asyncio.to_thread(engine.info)
        list(engine.generate(GenerateRequest(Messages((Message("user", "Hello"),)))))
        begun_s = time.monotonic()
        until_s = begun_s + seconds
        await asyncio.gather(*(client(number) for number in range(count)))
        return tokens / (time.monotonic() - begun_s)
    finally:
        engine.close()


def _soak(server: Watched, count: int, seconds: float) -> dict[str, Any]:
    process = clients(Plan(server.port, count, seconds))
    begun_s = time.monotonic()
    time.sleep(seconds * _FLAT_AFTER)
    # On a busy machine swapped prefixes fill their limit later than that.
    while not server.stats().evictions and time.monotonic() < begun_s + seconds / 2:
        time.sleep(0.2)
    early = server.memory_bytes()
    time.sleep(max(0.0, begun_s + seconds * 0.95 - time.monotonic()))
    late = server.memory_bytes()
    report = _report(process)
    shares = sorted(one.tokens for one in report.clients)
    median = statistics.median(shares)
    return {
        "clients": count,
        "seconds": report.seconds,
        "answers": sum(one.answers for one in report.clients),
        "errors": sum(len(one.errors) for one in report.clients),
        "first_error": next((one.errors[0] for one in report.clients if one.errors), ""),
        "stuck": sum(not one.answers for one in report.clients),
        "longest_silence_s": max(one.gap_s for one in report.clients),
        "tokens_per_s": sum(shares) / report.seconds,
        "slowest_share": shares[0] / median if median else 0.0,
        "early_bytes": early,
        "late_bytes": late,
    }


def _vanish(server: Watched, count: int, seconds: float) -> dict[str, Any]:
    before = server.idle_counts()
    vanishing = max(1, count // 10)
    report = _report(clients(Plan(server.port, count, seconds, vanishing=vanishing, seed=1000)))
    after = server.idle_counts()
    return {
        "vanished": sum(one.vanished for one in report.clients),
        "cancelled": after.cancelled - before.cancelled,
        "errors_beside": sum(len(one.errors) for one in report.clients),
    }


def _kill(server: Watched, count: int) -> dict[str, Any]:
    """Kill the engine: every stream ends with an error; the next answers come from a new engine."""
    process = clients(Plan(server.port, count, 6.0, seed=2000))
    time.sleep(2.0)
    os.kill(server.engine_pid(), signal.SIGKILL)
    report = _report(process)
    errors = [error for one in report.clients for error in one.errors]
    return {
        "killed_errors": len(errors),
        "killed_other": sum("engine stopped unexpectedly" not in error for error in errors),
        "killed_answers": sum(one.answers for one in report.clients),
        "killed_silent": sum(not one.answers for one in report.clients),
    }


def _report(process: "Any") -> Report:  # noqa: ANN401 - a Popen of bytes
    out, _ = process.communicate()
    return msgspec.json.decode(out, type=Report)


def _wrong(found: dict[str, Any]) -> list[str]:
    """The failed checks, in sentences."""
    checks = {
        f"{found['errors']} errors: {found['first_error']}": not found["errors"],
        f"{found['stuck']} clients got no answer": not found["stuck"],
        "a stream was silent for long": found["longest_silence_s"] < _SILENCE_S,
        "the slowest client got too little": found["slowest_share"] >= _LEAST_SHARE,
        "HTTP costs too much": found["rate_share"] >= _LEAST_RATE,
        "clients that vanished were not cancelled": found["cancelled"] >= found["vanished"] / 2,
        "others were disturbed": not found["errors_beside"],
        "a stream of the killed engine ended without an error": found["killed_other"] == 0,
        "no stream saw the kill": found["killed_errors"] > 0,
        "nothing was served after the kill": found["killed_silent"] == 0,
    }
    for name, late in found["late_bytes"].items():
        most = found["early_bytes"][name] * _FLAT_SHARE + _FLAT_BYTES
        checks[f"the memory of the {name} grows"] = late <= most
    return [sentence for sentence, well in checks.items() if not well]


if __name__ == "__main__":
    sys.exit(main())
