"""An answer that repeats itself: what is offered below it, and what later prompts get of it."""

from pathlib import Path
from typing import Any

import pytest

from localchat.chat.conversation import Question
from localchat.engine.request import Messages
from localchat.errors import UsageError
from localchat.session.answer_end import take_way_on
from localchat.session.blocks import AnswerBlock
from tests.support.chat_sessions import Chat, run
from tests.support.scripted_engine import ScriptedAnswer
from tests.support.tui_stage import Stage

BEGUN = "The capital is Paris. "
PIECE = "It is a loyal animal. "


def script(request: Any) -> ScriptedAnswer:
    if request.sampling.frequency_penalty or len(request.prompt.messages) > 2:
        return ScriptedAnswer(("So it is.",))
    if isinstance(request.prompt, Messages) and request.prompt.continue_last:
        return ScriptedAnswer(("And the end.",))
    return ScriptedAnswer((BEGUN, *[PIECE] * 500))


async def looped(chat: Chat) -> str:
    """Ask a question whose answer loops. Returns its text."""
    outcome = await chat.session.ask(Question("go"))
    assert outcome.node is not None
    text = outcome.node.message.content
    assert len(text) < 800
    assert outcome.node.state == "length"
    return text


def test_a_loop_ends_says_so_and_offers_three_ways_on(tmp_path: Path) -> None:
    async def play(chat: Chat) -> None:
        await looped(chat)
        (block,) = [b for b in chat.page.blocks.values() if isinstance(b, AnswerBlock)]
        assert block.ended.startswith('ended: it repeated "It is a loyal animal."')
        (notice,) = [each for each in chat.page.notices() if each.offers]
        labels = [offer.label for offer in notice.offers]
        assert labels == [
            "answer again with a frequency penalty of 0.3",
            "drop the repeats",
            "go on",
        ]

    run(Stage(tmp_path, script=script), play)


@pytest.mark.parametrize("tokens", [(), (" ", "\n")])
def test_an_answer_without_text_says_so(tmp_path: Path, tokens: tuple[str, ...]) -> None:
    async def play(chat: Chat) -> None:
        await chat.session.ask(Question("go"))
        (notice,) = chat.page.notices()
        assert notice.text == "The answer has no text. Ask in other words."

    run(Stage(tmp_path, script=lambda _: ScriptedAnswer(tokens)), play)


def test_repeats_do_not_enter_the_next_prompt(tmp_path: Path) -> None:
    async def play(chat: Chat) -> None:
        text = await looped(chat)
        await chat.session.ask(Question("and now?"))
        prompt = chat.stage.engine.requests[-1].prompt
        assert isinstance(prompt, Messages)
        assert prompt.messages[-2].content == BEGUN + PIECE
        # The text itself stays as it was.
        path = chat.session.conversation.path()
        assert path[1].message.content == text

    run(Stage(tmp_path, script=script), play)


def test_an_answer_is_tried_again_with_a_penalty(tmp_path: Path) -> None:
    async def play(chat: Chat) -> None:
        await looped(chat)
        await take_way_on(chat.session, "end/penalty")
        assert chat.stage.engine.requests[-1].sampling.frequency_penalty == 0.3
        answer = chat.session.last_answer()
        assert answer is not None
        assert (answer.message.content, answer.end) == ("So it is.", None)
        with pytest.raises(UsageError, match="no longer open"):
            await take_way_on(chat.session, "end/drop")

    run(Stage(tmp_path, script=script), play)


@pytest.mark.parametrize(
    ("action", "text"), [("end/drop", BEGUN + PIECE), ("end/go on", BEGUN + PIECE + "And the end.")]
)
def test_repeats_are_dropped_alone_or_before_going_on(
    tmp_path: Path, action: str, text: str
) -> None:
    async def play(chat: Chat) -> None:
        await looped(chat)
        await take_way_on(chat.session, action)
        answer = chat.session.last_answer()
        assert answer is not None
        assert answer.message.content == text

    run(Stage(tmp_path, script=script), play)
