"""Compares the figures of `localchat bench` with those of vLLM's formulas over timestamps taken outside.

    python -m scripts.tools.check_bench [MODEL|URL] [--shape 64+64] [--clients 1 4] [--requests 4] [--rounds 3]

A proxy between `bench` and the server notes when each request and each piece of an answer passes. From these
the figures are computed as `vllm bench serve` computes them (vllm/benchmarks/serve.py, calculate_metrics): by
arrivals of chunks with text, and as its chat client does, for which each chunk with choices is a token, also
one that holds only the role or the reason of the end.

The last line is JSON. Ends with 1 if a figure of `bench` is more than 3 % from that by chunks with text, in the
median of the rounds.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final
from urllib.parse import urlsplit

import numpy as np

from localchat.measure.server_process import ServerCommand, server_process
from localchat.measure.variants import is_running
from localchat.measure.workload import parse_shape

_WANTED: Final = 0.03
_TIMES: Final = ("ttft", "tpot", "itl", "e2el")
_OURS: Final = {"ttft": "ttft_ms", "tpot": "tpot_ms", "itl": "gap_ms", "e2el": "e2el_ms"}
_CUTS: Final = (50, 90, 99)


@dataclass(slots=True)
class Exchange:
    """A streamed request, and when the pieces of its answer passed."""

    longest: int
    """Tokens that it asked for."""
    began_s: float
    pieces: list[tuple[float, bytes]] = field(default_factory=list)

    @property
    def ended_s(self) -> float:
        """The moment of the last piece."""
        return self.pieces[-1][0]


@dataclass(frozen=True, slots=True)
class Output:
    """What vLLM's client notes of a request."""

    ttft: float
    latency: float
    itl: list[float]
    tokens: int
    prompt_tokens: int

    @property
    def tpot(self) -> float:
        """Time per token after the first; 0 for a single one."""
        return (self.latency - self.ttft) / (self.tokens - 1) if self.tokens > 1 else 0.0


class Proxy:
    """Passes requests on to a server, each over a connection of its own, and notes the streamed ones."""

    def __init__(self, url: str) -> None:
        self._to = urlsplit(url)
        self.seen: list[Exchange] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Handle one connection of a client.

        A request begins as it is accepted: the way through this proxy is part of what its client measures."""
        accepted_s = time.perf_counter()
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            head = await reader.readuntil(b"\r\n\r\n")
            names = [line for line in head.split(b"\r\n")[1:] if line]
            sizes = [line for line in names if line.lower().startswith(b"content-length:")]
            body = await reader.readexactly(int(sizes[0].split(b":")[1])) if sizes else b""
            kept = [line for line in names if not line.lower().startswith(b"connection:")]
            lines = [head.split(b"\r\n")[0], *kept, b"Connection: close", b"", b""]
            await self._pass_on(b"\r\n".join(lines) + body, body, writer, accepted_s)
        writer.close()

    async def _pass_on(
        self, request: bytes, body: bytes, writer: asyncio.StreamWriter, accepted_s: float
    ) -> None:
        asked = json.loads(body) if body.startswith(b"{") else {}
        exchange = Exchange(asked.get("max_tokens", 0), accepted_s)
        source, target = await asyncio.open_connection(self._to.hostname, self._to.port)
        target.write(request)
        if asked.get("stream"):
            self.seen.append(exchange)  # now: the client may end before this connection does
        while piece := await source.read(1 << 16):
            writer.write(piece)
            exchange.pieces.append((time.perf_counter(), piece))
        target.close()


def _lines(pieces: list[tuple[float, bytes]]) -> Iterator[tuple[float, dict[str, Any]]]:
    rest = b""
    for at_s, piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):
                yield at_s, json.loads(line[6:])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="guide", metavar="MODEL|URL")
    parser.add_argument("--shape", default="64+64")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--requests", type=int, default=4, help="of each client")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--parallel", type=int, default=8)
    parser.add_argument("--ttft", type=float, default=500.0, help="ms, target of the goodput")
    parser.add_argument("--tpot", type=float, default=50.0, help="ms, target of the goodput")
    asked = parser.parse_args()
    with _served(asked) as url:
        found = [
            asyncio.run(_point(url, clients, asked))
            for _ in range(asked.rounds)
            for clients in asked.clients
        ]
    off = {clients: _median_off(found, clients) for clients in asked.clients}
    for clients, names in off.items():
        most = max(names, key=lambda name: names[name])
        print(f"{clients} clients, median of the rounds: at most {names[most]:.1%} off, {most}")
    worst = max(share for names in off.values() for share in names.values())
    print(json.dumps({"worst": worst, "off": off, "points": found}))
    return 0 if worst <= _WANTED else 1


def _median_off(found: list[dict[str, Any]], clients: int) -> dict[str, float]:
    """By figures: how far those of bench are from those of the formulas."""
    rounds = [one for one in found if one["clients"] == clients]
    return {
        name: abs(
            statistics.median(one["bench"][name] / one["formulas"][name] for one in rounds) - 1
        )
        for name in rounds[0]["bench"]
        if all(one["formulas"][name] for one in rounds)
    }


@contextmanager
def _served(asked: argparse.Namespace) -> Iterator[str]:
    if is_running(asked.model):
        yield asked.model
        return
    with server_process(ServerCommand(asked.model, {}, asked.parallel), os.environ) as server:
        yield server.url


async def _point(url: str, clients: int, asked: argparse.Namespace) -> dict[str, Any]:
    """Measure a point through the proxy, and print its figures beside those of the formulas."""
    proxy = Proxy(url)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0, limit=1 << 22, backlog=1024)
    port = server.sockets[0].getsockname()[1]
    flags = {
        "--shape": asked.shape, "--clients": clients, "--requests": asked.requests,
        "--ttft": f"{asked.ttft}ms", "--tpot": f"{asked.tpot}ms",
    }  # fmt: skip
    command = ["-m", "localchat", "bench", f"http://127.0.0.1:{port}", "--json", "-q"]
    command += [str(word) for pair in flags.items() for word in pair]
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, stdout=asyncio.subprocess.PIPE, limit=1 << 24
    )
    told, _ = await process.communicate()
    server.close()
    (point,) = json.loads(told)["points"]
    longest = parse_shape(asked.shape).output_tokens
    exchanges = [one for one in proxy.seen if one.longest == longest]
    ours = _bench_figures(point["figures"])
    by_text = _formulas(exchanges, _has_text, asked)
    by_chunk = _formulas(exchanges, lambda choice: True, asked)
    print(f"{clients} clients, {len(exchanges)} requests: bench, vLLM's formulas, its chat client")
    for name, value in ours.items():
        print(f"  {name:16} {value:10.2f} {by_text[name]:10.2f} {by_chunk[name]:10.2f}", flush=True)
    return {"clients": clients, "bench": ours, "formulas": by_text, "chat_client": by_chunk}


def _bench_figures(found: dict[str, Any]) -> dict[str, float]:
    figures = {
        "output_tok_s": found["tokens_per_s"],
        "total_tok_s": found["total_tokens_per_s"],
        "requests_s": found["requests_per_s"],
        "goodput_s": found["good_requests_per_s"],
    }
    for name in _TIMES:
        times = found[_OURS[name]]
        figures[f"{name}_mean"] = times["mean"]
        figures |= {f"{name}_p{cut}": times[f"p{cut}"] for cut in _CUTS}
    return figures


def _has_text(choice: dict[str, Any]) -> bool:
    return bool(choice["delta"].get("content") or choice["delta"].get("reasoning_content"))


def _output(exchange: Exchange, counts: Callable[[dict[str, Any]], bool]) -> Output:
    """A request as vLLM's streaming client notes it. counts: whether a chunk with this choice is a token."""
    lines = list(_lines(exchange.pieces))
    at_s = [at_s for at_s, data in lines if data.get("choices") and counts(data["choices"][0])]
    usage = next(data["usage"] for _, data in lines if data.get("usage"))
    gaps = [later - earlier for earlier, later in pairwise(at_s)]
    first, last = at_s[0] - exchange.began_s, at_s[-1] - exchange.began_s
    return Output(first, last, gaps, usage["completion_tokens"], usage["prompt_tokens"])


def _formulas(
    exchanges: list[Exchange], counts: Callable[[dict[str, Any]], bool], asked: argparse.Namespace
) -> dict[str, float]:
    """Figures by the formulas of vLLM's calculate_metrics."""
    outputs = [_output(one, counts) for one in exchanges]
    began_s = min(one.began_s for one in exchanges)
    whole_s = max(one.ended_s for one in exchanges) - began_s
    made, read = sum(one.tokens for one in outputs), sum(one.prompt_tokens for one in outputs)
    good = sum(one.ttft * 1e3 <= asked.ttft and one.tpot * 1e3 <= asked.tpot for one in outputs)
    times = {
        "ttft": [one.ttft for one in outputs],
        "tpot": [one.tpot for one in outputs if one.tokens > 1],
        "itl": [gap for one in outputs for gap in one.itl],
        "e2el": [one.latency for one in outputs],
    }
    figures = {
        "output_tok_s": made / whole_s,
        "total_tok_s": (made + read) / whole_s,
        "requests_s": len(outputs) / whole_s,
        "goodput_s": good / whole_s,
    }
    for name, found_s in times.items():
        figures[f"{name}_mean"] = float(np.mean(found_s)) * 1e3
        figures |= {f"{name}_p{cut}": float(np.percentile(found_s, cut)) * 1e3 for cut in _CUTS}
    return figures


if __name__ == "__main__":
    sys.exit(main())
