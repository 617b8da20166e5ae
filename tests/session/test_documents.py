"""Documents in a session: folded before the question, kept when it is asked again, told apart from files."""

from pathlib import Path

import pytest

from localchat.chat.conversation import Inclusion, Question
from localchat.chat.titles import title_for
from localchat.session.blocks import UserBlock
from tests.support.chat_sessions import Chat, run
from tests.support.tui_stage import Stage, sent, told


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    made = Stage(tmp_path, script=lambda request: told("In May [a.md:1]."))
    (tmp_path / "a.md").write_text("The lease ends in May.\n")
    library = made.app().session.context.library
    with library.open("home", create=True) as collection:
        collection.learn([str(tmp_path / "a.md")])
    return made


def test_documents_are_folded_before_the_question(stage: Stage) -> None:
    async def play(chat: Chat) -> None:
        await chat.session.ask(Question("@home When does the lease end?"))
        question = chat.session.last_question()
        assert question is not None
        ((_, text),) = sent(chat.stage.engine.requests[0])
        assert text == question.message.content
        (fold,) = question.inclusions
        assert fold.label.startswith("@home: 1 file, ")
        assert "[a.md:1]\nThe lease ends in May." in text[fold.start : fold.end]
        assert text[fold.end :] == "When does the lease end?"
        shown = chat.page.blocks[question.id]
        assert isinstance(shown, UserBlock)
        assert [one.label for one in shown.folds] == [fold.label]
        assert title_for(chat.session.conversation) == "When does the lease end?"

    run(stage, play)


def test_an_unknown_name_at_the_start_is_noticed(stage: Stage) -> None:
    async def play(chat: Chat) -> None:
        await chat.session.ask(Question("@lease, when does it end?"))
        notices = [notice.text for notice in chat.page.notices()]
        assert notices == ["there are no documents @lease, so the name is sent as text"]
        file = Inclusion("notes", 0, 6)
        for text in ("me@lease.org?", "@property\ndef f(): ...", "Ask @lease why"):
            await chat.session.ask(Question(text))
        await chat.session.ask(Question("@notes why?", (file,)))
        assert len(chat.page.notices()) == 1

    run(stage, play)


def test_a_question_that_is_asked_again_stays_as_it_was(stage: Stage, tmp_path: Path) -> None:
    async def play(chat: Chat) -> None:
        await chat.session.ask(Question("@home When?"))
        (tmp_path / "a.md").write_text("The lease ends in June.\n")
        await chat.session.regenerate()
        first, second = chat.stage.engine.requests
        assert sent(first) == sent(second)
        await chat.session.ask(Question("@home And now?"))
        assert "ends in June" in sent(chat.stage.engine.requests[-1])[-1][1]

    run(stage, play)


def test_included_files_keep_their_places_and_mention_nothing(stage: Stage) -> None:
    async def play(chat: Chat) -> None:
        text = "@home compare ⟨x @home y⟩ please"
        file = Inclusion("x.txt", text.index("⟨"), text.index("⟩") + 1)
        await chat.session.ask(Question(text, (file,)))
        question = chat.session.last_question()
        assert question is not None
        content = question.message.content
        documents, moved = question.inclusions
        assert content[moved.start : moved.end] == "⟨x @home y⟩"
        assert content[documents.end :] == "compare ⟨x @home y⟩ please"

    run(stage, play)


def test_a_collection_that_is_gone_is_text_and_an_empty_one_is_refused(stage: Stage) -> None:
    async def play(chat: Chat) -> None:
        library = chat.session.context.library
        library.forget("home")
        await chat.session.ask(Question("@home what?"))
        assert sent(chat.stage.engine.requests[0]) == [("user", "@home what?")]
        library.open("empty", create=True).close()
        outcome = await chat.session.ask(Question("@empty what?"))
        assert outcome.end == "failed"
        assert not chat.session.busy
        assert "@empty has no text" in chat.page.notices()[-1].text

    run(stage, play)
