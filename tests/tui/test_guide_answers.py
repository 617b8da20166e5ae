"""Answers of the guide on the screen, where no shell is at hand."""

from pathlib import Path

import msgspec
import pytest
from textual.pilot import Pilot

from localchat.engine.guide.rules import OFFER, UNKNOWN
from localchat.engine.guide.topics import Topics, topics_file
from localchat.models.resolve import GUIDE
from localchat.session.blocks import AnswerBlock, NoticeBlock
from localchat.tui.guide_answers import OFFERS_ID, complete_part, for_screen
from tests.support.scripted_engine import ScriptedAnswer
from tests.support.tui_stage import INFO, Stage, app_of, play, say, until

GUIDE_INFO = msgspec.structs.replace(INFO, model=GUIDE)
LIST = f"{OFFER}\n\n1. What is a KV cache?\n2. How do I add a model?"


@pytest.mark.parametrize(
    ("answer", "shown"),
    [
        ("Use `localchat pull MODEL`, for example:", "Use `/pull MODEL`, for example:"),
        ("`localchat run qwen2.5:3b` fetches one.", "`/pull qwen2.5:3b` fetches one."),
        ("then `localchat run ./model.gguf`.", "then `/model ./model.gguf`."),
        ("`localchat list` shows them.", "`F3` shows them."),
        ("`localchat fit MODEL` says it.", "`/fit MODEL` says it."),
        ("In the shell it is `localchat history`.", "In the shell it is `localchat history`."),
        ("| `lms get` | `localchat pull MODEL` |", "| `lms get` | `localchat pull MODEL` |"),
        ("`localchat fit MODEL --ctx 32768` plans.", "`localchat fit MODEL --ctx 32768` plans."),
        ("`localchat serve` runs.", "`localchat serve` runs."),
    ],
)
def test_commands_of_the_shell_become_those_of_the_screen(answer: str, shown: str) -> None:
    assert for_screen(answer, {}).text == shown


def test_no_refusal_of_the_guide_names_a_shell() -> None:
    topics = Topics(topics_file(Path("localchat/guide/guide.gguf").resolve()))
    for text in topics.answers:
        answer = for_screen(text, {})
        if text.startswith(UNKNOWN):
            assert "localchat run " not in answer.text and answer.needs_model


def test_a_list_of_questions_becomes_offers() -> None:
    answer = for_screen(LIST, {})
    assert answer.text == "I do not know that. Did you mean one of these?"
    assert answer.questions == ("What is a KV cache?", "How do I add a model?")


def test_a_growing_answer_shows_no_half_command() -> None:
    assert complete_part("Use `localchat pu") == "Use "
    assert complete_part("Use `/pull X` or") == "Use `/pull X` or"


@pytest.mark.parametrize("model", [GUIDE, "tiny"])
def test_an_answer_that_needs_a_model_offers_one(tmp_path: Path, model: str) -> None:
    pieces = ("I do not know that. `localchat", " run` lists", " them.")
    stage = Stage(
        tmp_path,
        models=(model,),
        about=GUIDE_INFO if model == GUIDE else INFO,
        script=lambda request: ScriptedAnswer(pieces),
    )

    async def steps(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        await say(pilot, "What is the capital of France?")
        transcript = app.chat.transcript
        answer = next(block for block in transcript.blocks if isinstance(block, AnswerBlock))
        offers = transcript.block(OFFERS_ID)
        if model != GUIDE:
            assert "`localchat run` lists them" in answer.text and offers is None
            return
        assert answer.text == "I do not know that. `F3` lists them."
        assert isinstance(offers, NoticeBlock)
        assert [offer.label for offer in offers.offers] == ["choose a model"]
        await pilot.press("alt+1")
        await until(pilot, lambda: type(app.screen).__name__ == "ModelScreen")

    play(stage, steps)


def test_an_offered_question_is_asked_by_its_key(tmp_path: Path) -> None:
    stage = Stage(
        tmp_path,
        models=(GUIDE,),
        about=GUIDE_INFO,
        script=lambda request: ScriptedAnswer((LIST,)),
    )

    async def steps(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        await say(pilot, "cache?")
        await pilot.press("alt+2")
        await until(pilot, lambda: len(stage.engine.requests) == 2 and not app.session.busy)
        assert app.session.conversation.path()[2].message.content == "How do I add a model?"

    play(stage, steps)
