"""Gaps that a real model fills: the built-in guide knows how."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import localchat
from localchat.engine.events import Text
from localchat.engine.interface import Engine
from localchat.engine.local.engine import LocalEngine
from localchat.engine.options import EngineOptions
from localchat.engine.request import GenerateRequest
from localchat.engine.request import TextPrompt as Prompt
from localchat.fit.load_options import LoadOptions
from tests.support.http_server import Wire, running
from tests.support.llamavim import VIM, VIM_CHECK, VIM_WARM

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def guide() -> Iterator[tuple[Engine, int]]:
    file = Path(localchat.__file__).with_name("guide") / "guide.gguf"
    load = LoadOptions(context_tokens=1024, threads=1)
    engine = LocalEngine(EngineOptions(file, load, name="guide"), notify=lambda _: None)
    with running(engine) as (port, _):
        yield engine, port
    engine.close()


def test_a_warm_up_spares_the_next_gap_its_prompt(guide: tuple[Engine, int]) -> None:
    _, port = guide
    extra = [{"filename": "k.py", "text": "the KV cache keeps keys and values. " * 12}]
    with Wire(port) as wire:
        wire.ask("/infill", {**VIM_WARM, "input_extra": extra})
        assert wire.reply().body == b"{}"
        wire.ask("/infill", {**VIM, "input_extra": extra, "n_predict": 4, "response_fields": None})
        whole = wire.reply().json
    assert isinstance(whole["content"], str)
    assert whole["timings"]["cache_n"] > whole["timings"]["prompt_n"] > 0
    assert 0 < whole["timings"]["predicted_n"] <= 4


def test_far_more_than_the_context_holds_is_answered_from_what_is_near(
    guide: tuple[Engine, int],
) -> None:
    engine, port = guide
    context = engine.info().context_tokens
    extra = [{"filename": f"{at}.txt", "text": "word " * (context // 4)} for at in range(8)]
    with Wire(port) as wire:
        wire.ask("/infill", {**VIM, "input_extra": extra, "n_predict": 2})
        reply = wire.reply()
    assert reply.status == 200, reply.body
    assert reply.json["truncated"] is True
    assert VIM_CHECK.search(reply.body)


def test_a_prompt_that_leaves_no_room_for_the_answer_is_shortened_too(
    guide: tuple[Engine, int],
) -> None:
    engine, port = guide
    context = engine.info().context_tokens
    each = len(engine.tokenize("word " * 100)) / 100
    text = "word " * int((context - 100) / each)
    asked = {**VIM, "input_extra": [{"text": text}], "response_fields": ["truncated"]}
    with Wire(port) as wire:
        wire.ask("/infill", {**asked, "n_predict": 1})
        assert wire.reply().json == {"truncated": False}
        wire.ask("/infill", {**asked, "n_predict": 400, "stop": ["e"]})
        assert wire.reply().json == {"truncated": True}


def test_a_request_of_no_tokens_is_answered_by_a_chat_too(guide: tuple[Engine, int]) -> None:
    engine, _ = guide
    events = list(engine.generate(GenerateRequest(Prompt("a cache"), max_tokens=0)))
    assert not any(isinstance(event, Text) for event in events)
