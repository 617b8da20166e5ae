"""Measures the cost of HTTP: the same engine directly and through the server, alternating.

    PYTHONPATH=.:backends python scripts/bench/bench_server.py MODEL.gguf [ROUNDS] [TOKENS]

One engine serves both, in turn, so that a busy machine slows both alike. The HTTP client is a separate
process. Budget: through HTTP at least 97 % of the tokens a second, and at most 5 ms more to the first
token (medians). Prints a table; the last line is JSON.
"""

import asyncio
import json
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

from localchat.engine.events import Text
from localchat.engine.local.engine import LocalEngine
from localchat.engine.options import EngineOptions
from localchat.engine.request import GenerateRequest, Message, Messages, Sampling
from localchat.fit.load_options import LoadOptions
from localchat.server.app import create_app
from localchat.server.config import ServerConfig
from localchat.server.uvicorn_server import UvicornServer, bind_sockets
from tests.support.single_engine import SingleEngine

PROMPT = "Tell me about the sea, round {}."

CLIENT = """
import json, socket, sys, time
port = int(sys.argv[1])
wire = socket.create_connection(("127.0.0.1", port))
for line in sys.stdin:
    body = line.strip().encode()
    head = f"POST /v1/chat/completions HTTP/1.1\\r\\nhost: localhost\\r\\ncontent-type: application/json\\r\\n"
    asked = time.perf_counter()
    wire.sendall(head.encode() + f"content-length: {len(body)}\\r\\n\\r\\n".encode() + body)
    times, held = [], b""
    while b"data: [DONE]" not in held:
        more = wire.recv(65536)
        now = time.perf_counter()
        times += [now] * more.count(b'"delta":{"content"')
        held = held[-64:] + more
    print(json.dumps([times[0] - asked, len(times), times[-1] - times[0]]), flush=True)
"""


class Round(NamedTuple):
    """cpu_ms: of this process (engine's parent and server, not its child), a token."""

    ttft_s: float
    tokens_per_s: float
    cpu_ms: float


def main() -> None:
    model = Path(sys.argv[1])
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 15
    tokens = int(sys.argv[3]) if len(sys.argv) > 3 else 64
    engine = LocalEngine(
        EngineOptions(model, load=LoadOptions(context_tokens=4096)), notify=lambda text: None
    )
    sockets = bind_sockets("127.0.0.1", 0)
    server = UvicornServer(
        create_app(SingleEngine(engine, "m"), ServerConfig(loop_guard=True)), 0.0
    )
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets)), daemon=True)
    thread.start()
    port = str(sockets[0].getsockname()[1])
    client = subprocess.Popen(
        [sys.executable, "-c", CLIENT, port],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    direct, http = [], []
    try:
        _directly(engine, "warm up", tokens)
        _over_http(client, "warm up", tokens)
        for number in range(rounds):
            direct.append(_directly(engine, PROMPT.format(2 * number), tokens))
            http.append(_over_http(client, PROMPT.format(2 * number + 1), tokens))
    finally:
        client.kill()
        server.stop()
        thread.join()
        engine.close()
    _print(direct, http)


def _directly(engine: LocalEngine, prompt: str, tokens: int) -> Round:
    request = GenerateRequest(
        Messages((Message("user", prompt),)),
        Sampling(temperature=1.0),
        max_tokens=tokens,
        ignore_eos=True,
        speculation=False,
    )
    cpu_s, asked_s = time.process_time(), time.perf_counter()
    with engine.generate(request) as stream:
        times = [time.perf_counter() for event in stream if isinstance(event, Text) and event.text]
    spent_ms = (time.process_time() - cpu_s) * 1000
    rate = (len(times) - 1) / (times[-1] - times[0])
    return Round(times[0] - asked_s, rate, spent_ms / len(times))


def _over_http(client: "subprocess.Popen[str]", prompt: str, tokens: int) -> Round:
    body = {
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 1.0,
        "max_tokens": tokens,
        "ignore_eos": True,
        "speculation": False,
        "stream": True,
    }
    assert client.stdin is not None and client.stdout is not None
    cpu_s = time.process_time()
    client.stdin.write(json.dumps(body) + "\n")
    client.stdin.flush()
    ttft_s, count, spent_s = json.loads(client.stdout.readline())
    spent_ms = (time.process_time() - cpu_s) * 1000
    return Round(ttft_s, (count - 1) / spent_s, spent_ms / count)


def _print(direct: list[Round], http: list[Round]) -> None:
    pairs = list(zip(direct, http, strict=True))
    ratio = statistics.median(h.tokens_per_s / d.tokens_per_s for d, h in pairs)
    added_ms = statistics.median((h.ttft_s - d.ttft_s) * 1000 for d, h in pairs)
    for name, rounds in (("directly", direct), ("over HTTP", http)):
        ttft = statistics.median(one.ttft_s for one in rounds) * 1000
        rate = statistics.median(one.tokens_per_s for one in rounds)
        best = max(one.tokens_per_s for one in rounds)
        cpu = statistics.median(one.cpu_ms for one in rounds)
        print(
            f"{name:10} TTFT {ttft:7.1f} ms   {rate:6.1f} tok/s   best {best:6.1f}   "
            f"{cpu:.3f} ms CPU a token"
        )
    best_ratio = max(h.tokens_per_s for h in http) / max(d.tokens_per_s for d in direct)
    least_ms = (min(h.ttft_s for h in http) - min(d.ttft_s for d in direct)) * 1000
    result = {
        "rounds": len(pairs),
        "tokens_ratio_median_of_pairs": round(ratio, 4),
        "tokens_ratio_of_bests": round(best_ratio, 4),
        "ttft_added_ms_median_of_pairs": round(added_ms, 2),
        "ttft_added_ms_of_bests": round(least_ms, 2),
        "cpu_added_ms_a_token": round(
            statistics.median(h.cpu_ms for h in http) - statistics.median(d.cpu_ms for d in direct),
            4,
        ),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
