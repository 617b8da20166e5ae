"""More tries at the next message: one answer stays, the others are in a card below it."""

import json
from pathlib import Path

import pytest
from textual.pilot import Pilot

from localchat.engine.events import Event, Finished, Text
from localchat.engine.request import GenerateRequest
from localchat.errors import UsageError
from localchat.session.blocks import AnswerBlock, NoticeBlock, TriesBlock
from localchat.session.tries import parse_tries
from tests.support.scripted_engine import ScriptedAnswer
from tests.support.tui_stage import Stage, app_of, play, say


def tries(*texts: str) -> tuple[Event, ...]:
    return tuple(
        event for n, text in enumerate(texts) for event in (Text(n, text), Finished(n, "stop"))
    )


def votes(request: GenerateRequest) -> ScriptedAnswer:
    return ScriptedAnswer(events=tries("It is 7.", "8", "So 8.")[: 2 * request.n])


def test_a_vote_shows_one_answer_and_folds_the_tries_into_a_card(tmp_path: Path) -> None:
    stage = Stage(tmp_path, script=votes)

    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        app.chat.run_command("/tries vote 3")
        await say(pilot, "how many?")
        assert stage.engine.requests[-1].n == 3
        answer, card = app.chat.transcript.blocks[-2:]
        assert isinstance(answer, AnswerBlock) and answer.text == "8"
        assert isinstance(card, TriesBlock)
        assert card.label.startswith("3 tries: 2 say 8, 1 say 7")
        assert "Try 1:\nIt is 7." in card.text
        assert "Try 2, kept:\n8" in card.text
        shown = app.session.last_answer()
        assert shown is not None and shown.message.content == "8"
        await say(pilot, "and now?")
        assert stage.engine.requests[-1].n == 1, "the next message is one try again"
        assert not isinstance(app.chat.transcript.blocks[-1], TriesBlock)

    play(stage, what)


def test_a_critique_keeps_the_mended_answer(tmp_path: Path) -> None:
    def script(request: GenerateRequest) -> ScriptedAnswer:
        asked = repr(request.prompt)
        if "has these faults" in asked:
            return ScriptedAnswer(events=tries("mended"))
        if "Check your answer" in asked:
            return ScriptedAnswer(events=tries('{"faults": ["too short"]}'))
        if "Which one is the best" in asked:
            best = 2 if asked.index("first") < asked.index("mended") else 1
            return ScriptedAnswer(events=tries(json.dumps({"best": best})))
        return ScriptedAnswer(events=tries("first"))

    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        app.chat.run_command("/tries critique")
        await say(pilot, "write")
        answer, card = app.chat.transcript.blocks[-2:]
        assert isinstance(answer, AnswerBlock) and answer.text == "mended"
        assert isinstance(card, TriesBlock)
        assert "1 fault found, answer corrected" in card.label
        assert "- too short" in card.text and "First answer:\nfirst" in card.text

    play(Stage(tmp_path, script=script), what)


@pytest.mark.parametrize(
    "words", ["", "vote", "vote 1", "vote 99", "best x", "most 3", "best 3 number"]
)
def test_what_makes_no_sense_is_refused(words: str) -> None:
    with pytest.raises(UsageError):
        parse_tries(words)


def test_a_refused_command_is_a_notice(tmp_path: Path) -> None:
    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        app.chat.run_command("/tries most 3")
        await pilot.pause()
        notice = app.chat.transcript.blocks[-1]
        assert isinstance(notice, NoticeBlock) and "vote N" in notice.text

    play(Stage(tmp_path), what)
