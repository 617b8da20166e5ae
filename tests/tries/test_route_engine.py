"""A route: which model answers, what is shown of the small one, and the figures."""

from collections.abc import Callable
from typing import Any

import pytest

from localchat.config.routes import Route
from localchat.engine.events import Accepted, Done, Event, Finished, Text, TokenLogprob
from localchat.engine.request import GenerateRequest, Message, Messages
from localchat.errors import DoesNotFit, EngineClosed
from localchat.tries.route_engine import RouteEngine, RouteFigures
from tests.support.scripted_engine import ScriptedAnswer, ScriptedEngine

Script = Callable[[GenerateRequest], ScriptedAnswer]


def says(text: str, logprob: float = -0.1) -> Script:
    events = (Text(0, text, (TokenLogprob(1, b"x", logprob, ()),)), Finished(0, "stop"))
    return lambda request: ScriptedAnswer(events=events)


class Pair:
    """A route over two scripted engines."""

    def __init__(self, small: Script, **rules: Any) -> None:
        self.small = ScriptedEngine(script=small)
        self.large = ScriptedEngine(script=says("from the large one"))
        self.opened = 0
        route = Route("easy", "little", "big", **rules)
        self.engine = RouteEngine(route, self.small, self._open)

    def _open(self) -> ScriptedEngine:
        self.opened += 1
        return self.large

    def ask(self, text: str = "hi", **fields: Any) -> list[Event]:
        tools = fields.pop("tools", ())
        prompt = Messages((Message("user", text),), tools=tools)
        request = GenerateRequest(prompt=prompt, **fields)
        with self.engine.generate(request) as stream:
            return list(stream)


def text(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Text))


@pytest.mark.parametrize(
    ("rules", "asked", "fields"),
    [
        ({"longer_than": 20}, "a question of many words", {}),
        ({"regex": "prove|derive"}, "Prove that", {}),
        ({"code": True}, "what does\n```\nx = 1\n```\ndo", {}),
        ({"tools": True}, "hi", {"tools": ({"type": "function", "function": {"name": "f"}},)}),
    ],
)
def test_a_rule_sends_a_question_to_the_large_model_at_once(
    rules: dict[str, Any], asked: str, fields: dict[str, Any]
) -> None:
    pair = Pair(says("from the small one"), **rules)
    assert text(pair.ask("hi")) == "from the small one"
    assert pair.opened == 0, "the large model is loaded when it is needed"
    assert text(pair.ask(asked, **fields)) == "from the large one"
    assert len(pair.small.requests) == 1
    assert pair.engine.figures == RouteFigures(1, 1, 1, 1)


def test_doubt_of_the_small_model_is_never_shown() -> None:
    pair = Pair(says("perhaps", -2.0), doubt=-0.9)
    events = pair.ask()
    assert text(events) == "from the large one"
    assert sum(isinstance(event, Accepted) for event in events) == 1
    done = events[-1]
    assert isinstance(done, Done)
    assert done.usage.completion_tokens == 2, "both answers were generated"
    assert pair.engine.figures == RouteFigures(large=1, large_tokens=1, discarded_tokens=1)
    assert "mean log probability -2.00 is below -0.9" in pair.engine.info().why


def test_a_sure_answer_stays_and_has_no_log_probabilities_unless_asked() -> None:
    pair = Pair(says("surely"), doubt=-0.9)
    events = pair.ask()
    assert text(events) == "surely"
    assert pair.small.requests[0].logprobs == 0
    assert not any(event.logprobs for event in events if isinstance(event, Text))
    assert any(event.logprobs for event in pair.ask(logprobs=1) if isinstance(event, Text))


def test_the_share_of_the_small_model_is_reported() -> None:
    pair = Pair(says("x"), regex="hard")
    for question in ("a", "b", "c", "hard"):
        pair.ask(question)
    assert "3 of 4 answers (75%) by little" in pair.engine.info().why
    assert pair.engine.stats().routed["small"] == 3


def test_a_large_model_that_cannot_be_loaded_is_the_answers_error() -> None:
    pair = Pair(says("x"), regex="hard")

    def fails() -> ScriptedEngine:
        raise DoesNotFit("too big")

    pair.engine._open_large = fails
    with pytest.raises(DoesNotFit):
        pair.ask("hard")


def test_a_closed_answer_cancels_the_model_that_writes_it() -> None:
    pair = Pair(lambda request: ScriptedAnswer(("a ",) * 1000, gap_s=0.01), regex="hard")
    stream = pair.engine.generate(GenerateRequest(prompt=Messages((Message("user", "hi"),))))
    next(iter(stream))
    stream.close()
    with pytest.raises(EngineClosed):
        list(stream)
    assert pair.small.cancelled == 1
