"""Sends many bodies that no client should send: no 5xx, no hang, every refusal in the right format.

    PYTHONPATH=.:backends python scripts/tools/fuzz_server.py [COUNT] [FIRST SEED] [PORT]

Uses the server on this port of 127.0.0.1, otherwise starts one with scripted answers.
"""

import json
import sys
from collections import Counter
from contextlib import ExitStack

from tests.support.http_server import Wire, serving
from tests.support.request_fuzzer import fuzzed, refusal


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 5000
    first = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    with ExitStack() as stack:
        port = int(sys.argv[3]) if len(sys.argv) > 3 else stack.enter_context(serving()).port
        statuses = _fuzz(port, count, first)
    for name, times in sorted(statuses.items()):
        print(f"{times:6} {name}")
    print(json.dumps({"bodies": count, "first_seed": first, "by_route_and_status": statuses}))


def _fuzz(port: int, count: int, first: int) -> Counter[str]:
    statuses: Counter[str] = Counter()
    with Wire(port) as wire:
        for seed in range(first, first + count):
            path, body = fuzzed(seed)
            headers = {"content-type": "application/json", "content-length": str(len(body))}
            wire.ask(path, body, method="POST", headers=headers)
            reply = wire.reply()
            # Where a model is only looked up, a name that it does not have is no bad body.
            expected = (200, 400, 404, 415, 501) if path == "/api/show" else (200, 400, 415, 501)
            assert reply.status in expected, (seed, path, body[:500], reply.body)
            if reply.status == 200 and reply.headers["content-type"] == "application/json":
                json.loads(reply.body)
            elif reply.status != 200:
                assert refusal(path, reply) == "invalid_request_error", seed
            statuses[f"{path} {reply.status}"] += 1
    return statuses


if __name__ == "__main__":
    main()
