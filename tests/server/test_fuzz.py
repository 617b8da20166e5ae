"""Whatever comes as a body: an answer or a refusal in the right shape, never a failure, never a hang."""

import json

import pytest

from tests.support.http_server import Stage, Wire, ask
from tests.support.request_fuzzer import GOOD, fuzzed, refusal


@pytest.mark.parametrize("path", GOOD)
def test_what_the_bodies_are_made_from_is_good(stage: Stage, path: str) -> None:
    assert ask(stage, path, GOOD[path]).status == 200


def test_no_body_breaks_the_server(stage: Stage) -> None:
    bad_request = 0
    with Wire(stage.port) as wire:
        for seed in range(400):
            path, body = fuzzed(seed)
            headers = {"content-type": "application/json", "content-length": str(len(body))}
            wire.ask(path, body, method="POST", headers=headers)
            reply = wire.reply()
            assert reply.status < 500, (seed, reply.body)
            if reply.status == 200:
                if reply.headers["content-type"] == "application/json":
                    json.loads(reply.body)
                continue
            bad_request += 1
            assert refusal(path, reply) == "invalid_request_error", seed
    assert 100 < bad_request < 400
