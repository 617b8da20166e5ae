"""Everyday prompts: no answer loops up to a limit, and none is cut without a word."""

import json
import os
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from localchat.engine.events import Finished
from localchat.engine.local.engine import LocalEngine
from localchat.engine.repetition import LoopDetector, without_repeats
from localchat.engine.request import GenerateRequest, Grammar, Message, Messages, Sampling
from localchat.server.config import ServerConfig
from tests.support.answers import Answer, ask
from tests.support.http_server import running

FRANCE = "What is the capital of France?"
PROMPTS = (FRANCE, "Write a short poem about autumn.")
PEOPLE = json.dumps(
    {
        "type": "object",
        "properties": {
            "title": {"type": "string"},
            "people": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["title", "people"],
    }
)


@pytest.fixture(scope="module")
def everyday_answers(smollm2_engine: LocalEngine) -> list[Answer]:
    """Answers to PROMPTS, asked at the same time."""
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return list(pool.map(partial(answered, smollm2_engine), PROMPTS))


def end_of(answer: Answer) -> Finished:
    (end,) = answer.of(Finished)
    assert isinstance(end, Finished)
    return end


def answered(engine: LocalEngine, prompt: str, **options: object) -> Answer:
    request = GenerateRequest(
        Messages((Message("user", prompt),)),
        sampling=Sampling(temperature=0),
        **{"max_tokens": 300, **options},  # type: ignore[arg-type]
    )
    return ask(engine, request)


def run(model: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "localchat", "-m", str(model), "--no-attach", "--temp", "0"]
    # The catalog's penalty ends the loop that this test needs.
    command += ["-o", "frequency_penalty", "0"]
    # The variables of this process name the folders of the test, not those of a person.
    return subprocess.run(
        [*command, *arguments],
        capture_output=True,
        text=True,
        input="",
        env=os.environ,
        check=False,
    )


def test_no_answer_loops_up_to_its_limit(everyday_answers: list[Answer]) -> None:
    ends = [end_of(answer) for answer in everyday_answers]
    assert [end.reason for end in ends].count("repetition") >= 1
    for answer, end in zip(everyday_answers, ends, strict=True):
        if end.reason == "repetition":
            assert end.repetition is not None
            kept = without_repeats(answer.text, end.repetition)
            assert end.repetition.times >= 4
            assert LoopDetector().find(kept) is None
        elif end.reason == "length":
            assert end.limit == "max_tokens"
            assert LoopDetector().find(answer.text) is None


def test_without_the_guard_the_same_answer_reaches_the_limit(
    smollm2_engine: LocalEngine, everyday_answers: list[Answer]
) -> None:
    guarded = everyday_answers[PROMPTS.index(FRANCE)]
    free = answered(smollm2_engine, FRANCE, loop_guard=False)
    assert end_of(guarded).reason == "repetition"
    assert end_of(free).reason == "length"
    assert len(free.text) > len(guarded.text)


def test_a_shortened_value_is_no_success(smollm2_engine: LocalEngine) -> None:
    prompt = "Describe a meeting of Anna, Bob, Carla and David as JSON."
    grammar = Grammar("json_schema", PEOPLE)
    for most in (8, 32):
        answer = answered(smollm2_engine, prompt, grammar=grammar, max_tokens=most)
        end = end_of(answer)
        assert end.reason in ("stop", "length")
        assert answer.done.usage.completion_tokens <= most
        if end.reason == "stop":
            # The guard had no reason to act: the value ended itself before the last tokens.
            assert answer.done.usage.completion_tokens < most - 1
            assert set(json.loads(answer.text)) == {"title", "people"}
        if most == 8:
            assert end.reason == "length"


def test_the_command_line_says_why_an_answer_ended(smollm2: Path) -> None:
    cut = run(smollm2, "--ctx", "1024", "--max-tokens", "8", FRANCE)
    assert cut.returncode == 0
    assert cut.stderr.count("cut at 8 tokens (--max-tokens 8)") == 1
    full = run(smollm2, "--ctx", "128", FRANCE)
    assert "the context of 128 tokens is full" in full.stderr
    loop = run(smollm2, "--ctx", "1024", FRANCE)
    assert loop.returncode == 0
    assert "The answer repeated" in loop.stderr
    assert "-o frequency_penalty 0.3" in loop.stderr
    data = run(smollm2, "--schema", PEOPLE, "--max-tokens", "12", "Describe a meeting.")
    assert (data.returncode, data.stdout) == (1, "")
    assert "The JSON was not complete after 12 tokens" in data.stderr


def test_the_server_ends_a_loop_and_names_it(smollm2_engine: LocalEngine) -> None:
    body = {"messages": [{"role": "user", "content": FRANCE}], "temperature": 0, "max_tokens": 300}
    with running(smollm2_engine, ServerConfig()) as (port, _):
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as response:
            reply = json.load(response)
    choice = reply["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", "repetition")
    assert reply["usage"]["completion_tokens"] < 300
