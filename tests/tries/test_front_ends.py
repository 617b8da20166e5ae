"""The command line, the server and the session answer alike for the same tries."""

import io
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import pytest

from localchat.cli.context import AppContext
from localchat.cli.main import run as run_command
from localchat.engine.events import Event, Finished, FinishReason, Reasoning, Text
from localchat.engine.request import GenerateRequest, Messages
from localchat.errors import ContextExceeded
from localchat.session.blocks import ReasoningBlock, TriesBlock
from localchat.session.tries import parse_tries
from tests.support.chat_sessions import Chat, run
from tests.support.http_server import chat, serving
from tests.support.scripted_engine import ScriptedAnswer, ScriptedEngine
from tests.support.tui_stage import Stage

Kind = Literal["critique", "judge"]
NO_VERDICT = "the judge gave no verdict"


def _reply(text: str, reason: FinishReason = "stop", reasoning: str = "") -> ScriptedAnswer:
    thoughts: tuple[Event, ...] = (Reasoning(0, reasoning),) if reasoning else ()
    return ScriptedAnswer(events=(*thoughts, Text(0, text), Finished(0, reason)))


@dataclass
class Model:
    """Answers a prompt, and the questions of the judge."""

    tries: tuple[str, ...] = ("first", "second")
    reason: FinishReason = "stop"
    """How each try ends."""
    faults: ScriptedAnswer = field(default_factory=lambda: _reply('{"faults": ["too short"]}'))
    correction: ScriptedAnswer = field(default_factory=lambda: _reply("corrected", reasoning="hm"))
    best: ScriptedAnswer | None = None
    """The reply to a comparison. None prefers the corrected answer, or else the second one."""

    def __call__(self, request: GenerateRequest) -> ScriptedAnswer:
        assert isinstance(request.prompt, Messages)
        question = request.prompt.messages[-1].content
        if "Check your answer" in question:
            return self.faults
        if "has these faults" in question:
            return self.correction
        if "Which one is the best" in question:
            return self.best or _reply(f'{{"best": {_corrected_place(question)}}}')
        events = [
            event
            for choice, text in enumerate(self.tries[: request.n])
            for event in (Text(choice, text), Finished(choice, self.reason))
        ]
        return ScriptedAnswer(events=tuple(events))


def _corrected_place(question: str) -> int:
    return 1 if "Answer 1:\ncorrected" in question else 2


@dataclass
class Result:
    """What a front end shows of an answer."""

    text: str
    reasoning: str
    report: dict[str, Any] | str
    """The JSON object, or the label of the card."""
    usage_tokens: int
    notices: str = ""

    @property
    def has_verdict(self) -> bool:
        if isinstance(self.report, str):
            return NO_VERDICT not in self.report
        return bool(self.report["judged"])


class FrontEnd(Protocol):
    def __call__(self, model: Model, kind: Kind) -> Result: ...


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> FrontEnd:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"GGUF")
    monkeypatch.setenv("LOCALCHAT_MODEL", str(path))

    def answer(model: Model, kind: Kind) -> Result:
        flags = ("--critique",) if kind == "critique" else ("--best-of", "2", "--judge")
        engine = ScriptedEngine(model)
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
        run_command(
            [*flags, "--json", "hi"], AppContext(open_engine=lambda options, notify: engine)
        )
        out, err = capfd.readouterr()
        fields = json.loads(out)
        return Result(
            fields["text"],
            fields["reasoning"],
            fields["tries"],
            fields["usage"]["completion_tokens"],
            err,
        )

    return answer


@pytest.fixture
def endpoint() -> FrontEnd:
    def answer(model: Model, kind: Kind) -> Result:
        fields: dict[str, Any] = {"x_localchat": {"critique": True}}
        if kind == "judge":
            fields = {"best_of": 2, "x_localchat": {"judge": True}}
        with serving() as stage:
            stage.engine.script = model
            body = chat(stage, "hi", **fields).json
        message = body["choices"][0]["message"]
        return Result(
            message["content"],
            message.get("reasoning_content") or "",
            body["x_localchat"]["tries"],
            body["usage"]["completion_tokens"],
        )

    return answer


@pytest.fixture
def session(tmp_path: Path) -> FrontEnd:
    def answer(model: Model, kind: Kind) -> Result:
        results: list[Result] = []

        async def play(chat: Chat) -> None:
            words = "critique" if kind == "critique" else "best 2 judge"
            chat.session.tries.next = parse_tries(words)
            await chat.session.ask("hi")
            node = chat.session.last_answer()
            assert node is not None and node.metrics is not None and node.metrics.done is not None
            blocks = list(chat.page.blocks.values())
            (card,) = (block for block in blocks if isinstance(block, TriesBlock))
            thoughts = (block.text for block in blocks if isinstance(block, ReasoningBlock))
            usage = node.metrics.done.usage.completion_tokens
            results.append(Result(node.message.content, "".join(thoughts), card.label, usage))

        run(Stage(tmp_path, script=model), play)
        return results[0]

    return answer


@pytest.fixture(params=["command", "endpoint", "session"])
def front_end(request: pytest.FixtureRequest) -> FrontEnd:
    answer: FrontEnd = request.getfixturevalue(request.param)
    return answer


@pytest.mark.parametrize(
    "verdict", [_reply('{"best": 2}', "length"), _reply("the second"), _reply('{"best": 3}')]
)
def test_a_pick_without_a_verdict_keeps_the_first_try_and_says_so(
    front_end: FrontEnd, verdict: ScriptedAnswer
) -> None:
    result = front_end(Model(best=verdict), "judge")
    assert result.text == "first"
    assert not result.has_verdict


def test_a_pick_with_a_verdict_keeps_that_try(front_end: FrontEnd) -> None:
    result = front_end(Model(), "judge")
    assert (result.text, result.has_verdict, result.usage_tokens) == ("second", True, 3)


@pytest.mark.parametrize("verdict", [_reply('{"faults": ["too', "length"), _reply("fine")])
def test_a_critique_without_a_verdict_keeps_the_answer_and_says_so(
    front_end: FrontEnd, verdict: ScriptedAnswer
) -> None:
    result = front_end(Model(faults=verdict), "critique")
    assert result.text == "first"
    assert not result.has_verdict


def test_a_correction_comes_with_its_reasoning(front_end: FrontEnd) -> None:
    result = front_end(Model(), "critique")
    assert (result.text, result.reasoning) == ("corrected", "hm")
    assert result.has_verdict
    assert result.usage_tokens == 1 + 1 + 2 + 1 + 1, "usage counts every question to the judge"


def test_an_answer_that_was_cut_off_is_not_reviewed(front_end: FrontEnd) -> None:
    result = front_end(Model(reason="length"), "critique")
    assert result.text == "first"
    assert result.usage_tokens == 1
    assert "cut off" in result.report or not result.has_verdict


@pytest.mark.parametrize("kind", ["critique", "judge"])
def test_a_question_that_exceeds_the_context_counts_as_no_verdict(
    front_end: FrontEnd, kind: Kind
) -> None:
    refused = ScriptedAnswer(error=ContextExceeded("too long"), events=(Text(0, ""),))
    result = front_end(Model(faults=refused, best=refused), kind)
    assert result.text == "first"
    assert not result.has_verdict


@pytest.mark.parametrize("kind", ["critique", "judge"])
def test_a_missing_verdict_is_a_notice_of_the_command(command: FrontEnd, kind: Kind) -> None:
    assert NO_VERDICT in command(Model(faults=_reply("hm"), best=_reply("hm")), kind).notices
    assert NO_VERDICT not in command(Model(), kind).notices
