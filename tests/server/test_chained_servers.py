"""Two localchats, one behind the other: what the first answers is what a client of the second reads."""

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import localchat
from localchat.config.parameters import SAMPLERS
from localchat.engine.events import Done, Event, Reasoning, Text
from localchat.engine.local.engine import LocalEngine
from localchat.engine.options import EngineOptions
from localchat.engine.remote.engine import RemoteEngine, RemoteOptions
from localchat.engine.request import (
    CalledTool,
    GenerateRequest,
    Grammar,
    Infill,
    Message,
    Messages,
    Sampling,
    TextPrompt,
)
from localchat.errors import ContextExceeded
from localchat.fit.load_options import LoadOptions
from localchat.server.token_counts import estimated_tokens
from tests.support.http_server import Stage, running

pytestmark = pytest.mark.usefixtures("one_thread")

GUIDE = Path(localchat.__file__).with_name("guide") / "guide.gguf"


def silent(_: str) -> None:
    """Sentences of an engine are of no interest here."""


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[LocalEngine, RemoteEngine]]:
    """The guide, and a remote of a server of a remote of a server that runs it."""
    local = LocalEngine(EngineOptions(GUIDE, LoadOptions(threads=1), name="guide"), notify=silent)
    with running(local) as (near, _):
        first = RemoteEngine(RemoteOptions(f"http://127.0.0.1:{near}"), notify=silent)
        with running(first) as (far, _):
            second = RemoteEngine(RemoteOptions(f"http://127.0.0.1:{far}/v1"), notify=silent)
            yield local, second
            second.close()
        first.close()
    local.close()


def said(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Text | Reasoning))


@pytest.mark.parametrize("question", ["How do I pull a model?", "What is a KV cache?"])
def test_the_chain_gives_the_same_greedy_text_and_usage(
    pair: tuple[LocalEngine, RemoteEngine], question: str
) -> None:
    local, chained = pair
    request = GenerateRequest(
        Messages((Message("user", question),)), Sampling(temperature=0), max_tokens=80
    )
    alone, through = list(local.generate(request)), list(chained.generate(request))
    assert said(through) == said(alone) != ""
    end, expected = through[-1], alone[-1]
    assert isinstance(end, Done) and isinstance(expected, Done)
    assert end.usage.completion_tokens == expected.usage.completion_tokens
    assert end.usage.prompt_tokens == expected.usage.prompt_tokens


def test_a_prompt_that_is_too_long_is_refused_with_its_numbers_through_the_chain(
    pair: tuple[LocalEngine, RemoteEngine],
) -> None:
    request = GenerateRequest(Messages((Message("user", "word " * 9000),)))
    with pytest.raises(ContextExceeded) as caught:
        list(pair[1].generate(request))
    assert caught.value.details["context_tokens"] == 4096


def test_what_a_server_knows_of_its_model_passes(pair: tuple[LocalEngine, RemoteEngine]) -> None:
    assert pair[1].info().backend == "remote"
    assert pair[1].detokenize(pair[1].tokenize("pull a model")) == "pull a model"


def test_a_gap_is_filled_alike_through_the_chain(pair: tuple[LocalEngine, RemoteEngine]) -> None:
    local, chained = pair
    gap = Infill("The KV cache ", " keeps keys.")
    request = GenerateRequest(gap, Sampling(temperature=0), max_tokens=12)
    assert said(list(chained.generate(request))) == said(list(local.generate(request))) != ""


def test_figures_of_the_engine_come_through_the_chain(
    pair: tuple[LocalEngine, RemoteEngine],
) -> None:
    request = GenerateRequest(Messages((Message("user", "Hello"),)), max_tokens=4)
    end = list(pair[1].generate(request))[-1]
    assert isinstance(end, Done)
    assert end.kv_total_tokens > 0 and end.fingerprint


def test_a_stage_is_reached_like_any_server(stage: Stage) -> None:
    word = stage.plays("ping", Text(0, "pong"))
    engine = RemoteEngine(RemoteOptions(stage.base), notify=silent)
    stream = engine.generate(GenerateRequest(Messages((Message("user", word),))))
    assert said([event for event in stream if isinstance(event, Text)]) == "pong"
    engine.close()


def test_a_client_of_messages_learns_the_prompt_s_length_at_once_and_exactly_at_the_end(
    pair: tuple[LocalEngine, RemoteEngine],
) -> None:
    words = "Tell me all about models, contexts and caches, please. " * 20
    request = GenerateRequest(
        Messages((Message("user", words),)), Sampling(temperature=0), max_tokens=2
    )
    end = list(pair[0].generate(request))[-1]
    assert isinstance(end, Done)
    body = {
        "messages": [{"role": "user", "content": words}],
        "max_tokens": 2,
        "stream": True,
        "model": "",
    }
    asked = urllib.request.Request(
        pair[1].info().path + "/messages",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(asked) as answer:
        lines = [line[6:] for line in answer.read().splitlines() if line.startswith(b"data: ")]
    events = {event["type"]: event for event in map(json.loads, lines)}
    first = events["message_start"]["message"]["usage"]["input_tokens"]
    last = events["message_delta"]["usage"]
    assert 0.6 < first / end.usage.prompt_tokens < 1.6
    assert last["input_tokens"] + last["cache_read_input_tokens"] == end.usage.prompt_tokens


def test_a_guess_counts_all_that_is_sent() -> None:
    plain = estimated_tokens(Messages((Message("user", "x" * 360),)))
    assert plain == 108
    tool = {"type": "function", "function": {"name": "look", "description": "y" * 360}}
    assert estimated_tokens(Messages((Message("user", "x" * 360),), tools=(tool,))) > plain + 100
    assert estimated_tokens(None) == 0


OFF: dict[str, Any] = {key: sampler.off for key, sampler in SAMPLERS.items()}
REQUESTS = {
    "continued": GenerateRequest(
        Messages((Message("user", "x"), Message("assistant", "It is")), continue_last=True)
    ),
    "not continued": GenerateRequest(
        Messages((Message("user", "x"), Message("assistant", "It is.")))
    ),
    "reasoning": GenerateRequest(
        Messages(
            (Message("user", "x"), Message("assistant", "y", reasoning="hm"), Message("user", "z")),
            thinking="off",
            think_budget=9,
            template_options={"reasoning_effort": "low", "thinking_budget": 9},
        )
    ),
    "sampling": GenerateRequest(
        Messages((Message("user", "x"),)),
        Sampling(
            **OFF,
            logit_bias={5: -1e9, 6: -2.0},
            text_bias={"a b": 3.0},
            dry_sequence_breakers=("none",),
            seed=7,
        ),
        n=2,
        min_tokens=2,
        max_tokens=9,
        stop=("END",),
        stop_tokens=(3,),
        keep_stop=True,
        bad_words=("no",),
        logprobs=3,
        ignore_eos=True,
        lora=((0, 0.5),),
    ),
    "tools": GenerateRequest(
        Messages(
            (
                Message("user", "x"),
                Message("assistant", tool_calls=(CalledTool("look", '{"a":1}', "c1"),)),
                Message("tool", "42", tool_call_id="c1", name="look"),
            ),
            tools=(
                {
                    "type": "function",
                    "function": {
                        "name": "look",
                        "parameters": {"type": "object", "properties": {}},
                    },
                },
            ),
            tool_choice="look",
            parallel_tool_calls=False,
        )
    ),
    "schema": GenerateRequest(
        Messages((Message("user", "x"),)), grammar=Grammar("json_schema", '{"type":"object"}')
    ),
    "text": GenerateRequest(TextPrompt("x", special=True), max_tokens=5),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_a_request_reaches_the_engine_of_the_next_server_unchanged(stage: Stage, name: str) -> None:
    request = REQUESTS[name]
    engine = RemoteEngine(RemoteOptions(stage.base), notify=silent)
    list(engine.generate(request))
    engine.close()
    arrived = stage.last
    for field in ("prompt", "sampling", "n", "min_tokens", "stop", "stop_tokens", "keep_stop"):
        assert getattr(arrived, field) == getattr(request, field), field
    for field in ("bad_words", "logprobs", "ignore_eos", "lora"):
        assert getattr(arrived, field) == getattr(request, field), field


def test_a_continued_answer_is_rendered_through_the_chain(
    pair: tuple[LocalEngine, RemoteEngine],
) -> None:
    local, chained = pair
    begun = (Message("user", "What is a KV cache?"), Message("assistant", "It is"))
    messages = Messages(begun, continue_last=True)
    assert chained.render(messages) == local.render(messages)
    assert chained.render(messages).endswith("It is")
    whole = Messages(begun)
    assert chained.render(whole) == local.render(whole)
