"""The session without a screen: what is asked, shown, kept, and survived."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from localchat.chat.conversation import Inclusion, Question
from localchat.engine.events import Finished, MetricsSnapshot, Reasoning, Text, ToolCall
from localchat.engine.interface import EngineInfo
from localchat.engine.request import Attachment, GenerateRequest, Messages
from localchat.engine.stats_line import brief_stats_line
from localchat.errors import ContextExceeded, EngineDied, UsageError
from localchat.history.store import History
from localchat.session.answer_builder import AnswerBuilder
from localchat.session.blocks import AnswerBlock, ReasoningBlock, ToolCallBlock, UserBlock
from localchat.session.engine_holder import EngineHolder
from tests.support.chat_sessions import Chat, run
from tests.support.media import png
from tests.support.scripted_engine import ScriptedAnswer, ScriptedEngine
from tests.support.tui_stage import DONE, INFO, STATS, Stage, sent, told


def test_a_question_is_answered_and_its_figures_are_those_of_the_engine(tmp_path: Path) -> None:
    async def play(chat: Chat) -> None:
        await chat.session.wait_until_ready()
        await chat.session.ask(Question("What is it?"))
        node = chat.session.last_answer()
        assert node is not None
        assert node.metrics is not None
        assert (node.message.content, node.state) == ("a cache", "whole")
        assert node.metrics.done == DONE
        shown = chat.page.blocks[node.id]
        assert isinstance(shown, AnswerBlock)
        assert shown.footer == brief_stats_line(DONE)
        assert chat.page.pieces == [(node.id, "a "), (node.id, "cache")]
        assert chat.session.status.decode_tokens_per_s == DONE.timings.decode_tokens_per_s
        assert chat.stage.remembered == [("tiny", INFO, DONE)]

    run(Stage(tmp_path, script=lambda request: told("a ", "cache")), play)


def test_a_question_before_the_engine_is_opened_waits_for_it(tmp_path: Path) -> None:
    async def play() -> None:
        stage = Stage(tmp_path)
        engines = EngineHolder()
        asked = asyncio.create_task(engines.engine())
        await asyncio.sleep(0)
        assert not asked.done()
        engines.open(stage.resolve(None, {}).open_engine)
        assert await asked is stage.engine
        engines.close()
        EngineHolder().close()  # never opened: there is nothing to wait for

    asyncio.run(play())


def test_the_whole_path_is_sent_with_the_instructions_first(tmp_path: Path) -> None:
    async def play(chat: Chat) -> None:
        chat.session.set_instructions("Be brief.")
        await chat.session.ask(Question("one"))
        await chat.session.ask(Question("two"))
        assert sent(chat.stage.engine.requests[-1]) == [
            ("system", "Be brief."),
            ("user", "one"),
            ("assistant", "yes"),
            ("user", "two"),
        ]

    run(Stage(tmp_path, script=lambda request: told("yes")), play)


def test_stopping_keeps_the_text_and_continuing_prolongs_it(tmp_path: Path) -> None:
    def script(request: Any) -> ScriptedAnswer:
        if isinstance(request.prompt, Messages) and request.prompt.continue_last:
            return told(" and the end")
        return ScriptedAnswer(("begun", *("." for _ in range(20_000))), gap_s=0.01)

    async def play(chat: Chat) -> None:
        task = asyncio.create_task(chat.session.ask(Question("go")))
        await chat.until(lambda: len(chat.page.pieces) > 3)
        assert chat.session.stop()
        await task
        node = chat.session.last_answer()
        assert node is not None
        assert node.state == "stopped"
        assert node.message.content.startswith("begun.")
        assert chat.stage.engine.cancelled == 1
        before = node.message.content
        await chat.session.continue_answer()
        node = chat.session.last_answer()
        assert node is not None
        assert (node.message.content, node.state) == (f"{before} and the end", "whole")
        assert sent(chat.stage.engine.requests[-1])[-1] == ("assistant", before)
        metrics = node.metrics
        with pytest.raises(UsageError, match="no stopped answer"):
            await chat.session.continue_answer()
        after = chat.session.last_answer()
        assert after is not None
        assert after.metrics is metrics

    run(Stage(tmp_path, script=script), play)


def test_a_continued_answer_is_not_shown_as_stopped_while_it_grows(tmp_path: Path) -> None:
    def script(request: Any) -> ScriptedAnswer:
        word = "on" if sent(request)[-1][0] == "assistant" else "begun"
        return ScriptedAnswer((word, *("." for _ in range(20_000))), gap_s=0.01)

    async def play(chat: Chat) -> None:
        task = asyncio.create_task(chat.session.ask(Question("go")))
        await chat.until(lambda: len(chat.page.pieces) > 3)
        chat.session.stop()
        await task
        node = chat.session.last_answer()
        assert node is not None
        assert block_of(chat, node.id).ended == "stopped"
        text = node.message.content
        pieces = len(chat.page.pieces)
        going_on = asyncio.create_task(chat.session.continue_answer())
        await chat.until(lambda: len(chat.page.pieces) > pieces)
        assert (block_of(chat, node.id).text, block_of(chat, node.id).ended) == (text, "")
        chat.session.stop()
        await going_on
        assert block_of(chat, node.id).ended == "stopped"

    run(Stage(tmp_path, script=script), play)


def block_of(chat: Chat, id_: str) -> AnswerBlock:
    block = chat.page.blocks[id_]
    assert isinstance(block, AnswerBlock)
    return block


def test_a_question_stopped_before_its_first_word_is_asked_again(tmp_path: Path) -> None:
    answers = iter((ScriptedAnswer(("late",), gap_s=600.0), told("an answer")))

    async def play(chat: Chat) -> None:
        task = asyncio.create_task(chat.session.ask(Question("go")))
        await chat.until(lambda: chat.stage.engine.requests)
        assert chat.session.stop()
        await task
        await chat.session.continue_answer()
        node = chat.session.last_answer()
        assert node is not None
        assert (node.message.content, node.state) == ("an answer", "whole")

    run(Stage(tmp_path, script=lambda _: next(answers)), play)


def test_regenerating_and_editing_make_branches_that_can_be_walked(tmp_path: Path) -> None:
    answers = iter(("first", "second", "third"))

    async def play(chat: Chat) -> None:
        session = chat.session
        await session.ask(Question("q"))
        await session.regenerate()
        answer, question = session.last_answer(), session.last_question()
        assert answer is not None
        assert question is not None
        shown = chat.page.blocks[answer.id]
        assert isinstance(shown, AnswerBlock)
        assert (shown.text, shown.branch) == ("second", (2, 2))
        assert session.switch_version(answer.id, -1) is not None
        assert chat.page.texts() == ["q", "first"]
        assert session.switch_version(session.last_answer().id, -1) is None  # type: ignore[union-attr]
        await session.edit(question.id, Question("other"))
        assert chat.page.texts() == ["other", "third"]
        session.switch_version(session.last_question().id, -1)  # type: ignore[union-attr]
        assert chat.page.texts() == ["q", "second"]

    run(Stage(tmp_path, script=lambda request: told(next(answers))), play)


def test_undo_takes_the_last_exchange_off_and_the_tree_keeps_it(tmp_path: Path) -> None:
    async def play(chat: Chat) -> None:
        await chat.session.ask(Question("one"))
        await chat.session.ask(Question("two"))
        assert chat.session.undo().message.content == "two"
        assert chat.page.texts() == ["one", "yes"]
        assert len(chat.session.conversation.nodes) == 4
        chat.session.undo()
        with pytest.raises(UsageError):
            chat.session.undo()

    run(Stage(tmp_path, script=lambda request: told("yes")), play)


def test_reasoning_and_tool_calls_are_blocks_of_their_own(tmp_path: Path) -> None:
    events = (
        Reasoning(0, "hm "),
        Reasoning(0, "so"),
        Text(0, "Look:"),
        ToolCall(0, 0, "c1", "weather", '{"city": '),
        ToolCall(0, 0, arguments='"Oslo"}'),
        Finished(0, "tool_calls"),
    )

    async def play(chat: Chat) -> None:
        await chat.session.ask(Question("q"))
        kinds = [type(block) for block in chat.page.blocks.values()]
        assert kinds == [UserBlock, ReasoningBlock, AnswerBlock, ToolCallBlock]
        reasoning, call = list(chat.page.blocks.values())[1], list(chat.page.blocks.values())[3]
        assert isinstance(reasoning, ReasoningBlock)
        assert isinstance(call, ToolCallBlock)
        assert reasoning.text == "hm so"
        assert reasoning.seconds is not None
        assert (call.name, call.arguments) == ("weather", '{"city": "Oslo"}')
        node = chat.session.last_answer()
        assert node is not None
        assert node.message.tool_calls[0].id == "c1"

    run(Stage(tmp_path, script=lambda request: ScriptedAnswer(events=events)), play)


def test_a_dead_engine_is_a_notice_and_the_next_question_is_answered(tmp_path: Path) -> None:
    answers = iter(
        (
            ScriptedAnswer(
                ("half an ans",), error=EngineDied("the engine died: SIGKILL", hint="its words")
            ),
            told("whole"),
        )
    )

    async def play(chat: Chat) -> None:
        session = chat.session
        await session.ask(Question("q"))
        node = session.last_answer()
        assert node is not None
        assert (node.message.content, node.state) == ("half an ans", "failed")
        notice = chat.page.notices()[-1]
        assert notice.kind == "error"
        assert "its words" in notice.text
        assert notice.offers[0].action == "retry"
        assert session.status.label == "engine stopped"
        await session.retry()
        assert chat.page.texts() == ["q", "whole"]
        assert session.status.label == "ready"

    run(Stage(tmp_path, script=lambda request: next(answers)), play)


def test_what_outgrows_the_context_is_not_sent_until_a_way_is_chosen(tmp_path: Path) -> None:
    def script(request: Any) -> ScriptedAnswer:
        if len(request.prompt.messages) > 4:
            refusal = ContextExceeded("too long", prompt_tokens=30_000, context_tokens=24_000)
            return ScriptedAnswer((), error=refusal)
        return told("yes")

    async def play(chat: Chat) -> None:
        session = chat.session
        await session.wait_until_ready()
        for n in range(3):
            await session.ask(Question(f"question {n} " + "x" * 40_000))
        assert session.conversation.path()[-1].message.role == "user"
        notice = chat.page.notices()[-1]
        assert "nothing was sent" in notice.text
        actions = [offer.action for offer in notice.offers]
        assert "overflow/leave_out_oldest" in actions
        assert "overflow/compact" in actions
        await session.take_offer("overflow/leave_out_oldest")
        node = session.last_answer()
        assert node is not None
        assert node.message.content == "yes"
        dimmed = [
            block.dimmed for block in chat.page.blocks.values() if isinstance(block, UserBlock)
        ]
        assert dimmed[0] is True
        assert dimmed[-1] is False
        assert "not sent" in chat.page.notices()[0].text
        assert session.conversation.policy.kind == "leave_out_oldest"
        assert "question 0" not in str(sent(chat.stage.engine.requests[-1]))

    about = msgspec.structs.replace(INFO, context_tokens=24_000)
    run(Stage(tmp_path, script=script, about=about), play)


def test_an_offer_that_is_gone_is_refused(tmp_path: Path) -> None:
    async def play(chat: Chat) -> None:
        with pytest.raises(UsageError):
            await chat.session.take_offer("overflow/compact")

    run(Stage(tmp_path), play)


def test_a_summary_stands_for_what_came_before(tmp_path: Path) -> None:
    def script(request: Any) -> ScriptedAnswer:
        last = request.prompt.messages[-1].content
        return told("SUMMARY") if "Write a summary" in last else told("yes")

    async def play(chat: Chat) -> None:
        session = chat.session
        await session.wait_until_ready()
        for n in range(5):
            await session.ask(Question(f"question {n} " + "x" * 200))
        await session.compact()
        await session.ask(Question("and now?"))
        messages = sent(chat.stage.engine.requests[-1])
        assert "SUMMARY" in messages[0][1]
        assert "question 0" not in str(messages)
        assert messages[-1][1] == "and now?"
        assert not session.busy

    run(Stage(tmp_path, script=script), play)


def test_one_answer_at_a_time(tmp_path: Path) -> None:
    async def play(chat: Chat) -> None:
        task = asyncio.create_task(chat.session.ask(Question("q")))
        await chat.until(lambda: chat.session.busy)
        with pytest.raises(UsageError):
            await chat.session.answer("x")
        chat.session.stop()
        await task
        assert not chat.session.stop()

    run(Stage(tmp_path, script=lambda request: ScriptedAnswer(("a",) * 20_000, gap_s=0.01)), play)


def test_inclusions_become_folds(tmp_path: Path) -> None:
    async def play(chat: Chat) -> None:
        await chat.session.ask(Question("see FILE", (Inclusion("a.txt", 4, 8),)))
        block = next(iter(chat.page.blocks.values()))
        assert isinstance(block, UserBlock)
        assert block.folds == (("a.txt", 4, 8),)

    run(Stage(tmp_path), play)


def test_another_model_is_opened_and_the_conversation_goes_on(tmp_path: Path) -> None:
    async def play(chat: Chat) -> None:
        session = chat.session
        await session.ask(Question("one"))
        change = session.prepare_change("other", {})
        assert change.reload
        session.status.stats = STATS
        change.apply()
        assert session.status.state == "starting"
        assert session.status.ttft_s is None
        assert session.status.kv == (0, 0), "these are of the model before"
        await session.wait_until_ready()
        await session.ask(Question("two"))
        assert len(chat.stage.opened) >= 2
        assert chat.stage.opened[-1][0].name == "other"
        assert [role for role, _ in sent(chat.stage.engine.requests[-1])] == [
            "user",
            "assistant",
            "user",
        ]
        assert chat.stage.opened[-2][1].closed
        assert not session.prepare_change(None, {"temperature": "0.1"}).reload
        with pytest.raises(UsageError):
            session.prepare_change(None, {"temperature": "hot"})
        assert session.setup.settings.temperature is None

    run(Stage(tmp_path, script=lambda request: told("yes")), play)


def test_many_figures_are_shown_a_few_times_and_the_last_of_them_are(tmp_path: Path) -> None:
    async def play(chat: Chat) -> None:
        session = chat.session
        shown: list[int] = []

        def look() -> None:
            shown.append(session.status.kv[0])

        chat.page.status_changed = look  # type: ignore[method-assign]
        for tokens in range(1, 101):
            session.track(MetricsSnapshot("decode", kv_used_tokens=tokens))
        assert shown[0] == 1
        assert len(shown) < 50
        saving = asyncio.create_task(
            session._save(AnswerBuilder(session.conversation, chat.page, ""))
        )
        await chat.until(lambda: shown[-1] == 100)
        saving.cancel()
        session.track(MetricsSnapshot("decode", kv_used_tokens=101))
        session.track(Text(0, "a word"))
        assert shown[-1] == 101

    run(Stage(tmp_path), play)


def test_figures_on_the_way_are_those_of_the_events(tmp_path: Path) -> None:
    events = (MetricsSnapshot("decode", ttft_s=0.5, decode_tokens_per_s=10.0, kv_used_tokens=7),)

    async def play(chat: Chat) -> None:
        live = chat.session.status
        live.begin()
        for event in events:
            live.update(event)
        assert (live.ttft_s, live.decode_tokens_per_s, live.kv[0]) == (0.5, 10.0, 7)
        assert list(live.rates) == [10.0]

    run(Stage(tmp_path), play)


def test_an_unanswered_question_leaves_a_session_that_keeps_none(tmp_path: Path) -> None:
    answers = iter((told("yes"), ScriptedAnswer((), error=UsageError("bad template")), told("no")))

    async def play(chat: Chat) -> None:
        session = chat.session
        assert (await session.ask(Question("one"))).end == "complete"
        refused = await session.ask(Question("two"))
        assert (refused.end, refused.node) == ("failed", None)
        assert str(refused.error) == "bad template"
        assert [node.message.content for node in session.conversation.path()] == ["one", "yes"]
        await session.ask(Question("three"))
        assert sent(chat.stage.engine.requests[-1])[-1] == ("user", "three")
        assert len(session.conversation.nodes) == 4

    run(Stage(tmp_path, script=lambda request: next(answers)), play, keep_unanswered=False)


def test_a_regeneration_without_an_answer_shows_the_old_one(tmp_path: Path) -> None:
    answers = iter((told("yes"), ScriptedAnswer((), error=EngineDied("gone"))))

    async def play(chat: Chat) -> None:
        await chat.session.ask(Question("one"))
        assert (await chat.session.regenerate()).end == "failed"
        assert chat.session.conversation.path()[-1].message.content == "yes"

    run(Stage(tmp_path, script=lambda request: next(answers)), play, keep_unanswered=False)


def test_the_memory_of_an_engine_is_known_once_it_is_loaded(tmp_path: Path) -> None:
    before = msgspec.structs.replace(INFO, loaded=False, actual=None)
    stage = Stage(tmp_path, script=lambda request: told("yes"), about=before)

    async def play(chat: Chat) -> None:
        await chat.session.wait_until_ready()
        assert chat.session.status.info == before
        stage.engine.about = INFO
        await chat.session.ask(Question("q"))
        assert chat.session.status.info == INFO

    run(stage, play)


def test_the_engine_is_known_before_its_first_words(tmp_path: Path) -> None:
    async def play(chat: Chat) -> None:
        session = chat.session
        known: list[EngineInfo | None] = []
        append_text = chat.page.append_text

        def append(id_: str, text: str) -> None:
            known.append(session.status.info)
            append_text(id_, text)

        chat.page.append_text = append  # type: ignore[method-assign]
        await session.ask(Question("q"))
        assert known == [INFO]

    run(Stage(tmp_path, script=lambda request: told("yes")), play)


def test_a_remark_before_the_first_words_stands_below_the_answer(tmp_path: Path) -> None:
    chats: list[Chat] = []

    def script(request: Any) -> ScriptedAnswer:
        chats[0].session.remark("slower than usual")
        return told("yes")

    async def play(chat: Chat) -> None:
        chats.append(chat)
        await chat.session.ask(Question("q"))
        shown = [getattr(block, "text", "") for block in chat.page.blocks.values()]
        assert shown == ["q", "yes", "slower than usual"]
        chat.session.remark("faster again")
        assert chat.page.notices()[-1].text == "faster again"

    run(Stage(tmp_path, script=script), play)


def second_window(chat: Chat, file: Path) -> tuple[Chat, History]:
    """Open the conversation of a chat once more, with a history of its own."""
    chat.session.recorder.flush()
    other = Chat(chat.stage)
    history = History.open(file)
    other.session.recorder.attach(history)
    other.session.resume(history.load(chat.session.conversation.id))
    return other, history


def test_two_windows_on_one_conversation_lose_nothing_and_name_what_the_other_added(
    tmp_path: Path,
) -> None:
    file = tmp_path / "history.sqlite3"

    async def play(chat: Chat) -> None:
        chat.session.recorder.attach(History.open(file))
        await chat.session.ask(Question("one"))
        other, history = second_window(chat, file)
        await other.session.ask(Question("two"))
        other.session.recorder.flush()
        assert other.page.notices() == []
        await chat.session.ask(Question("three"))
        (notice,) = chat.page.notices()
        assert (notice.kind, "Another window added messages" in notice.text) == ("warning", True)
        await chat.session.ask(Question("four"))
        assert chat.page.notices() == []
        chat.session.recorder.flush()
        nodes = history.load(chat.session.conversation.id).nodes.values()
        questions = [node.message.content for node in nodes if node.message.role == "user"]
        assert (questions, len(nodes)) == (["one", "two", "three", "four"], 8)
        assert all(node.state == "whole" for node in nodes)
        chat.session.recorder.close()
        other.session.recorder.close()

    run(Stage(tmp_path), play)


def test_what_another_window_added_is_reported_before_the_next_question(tmp_path: Path) -> None:
    file = tmp_path / "history.sqlite3"

    async def play(chat: Chat) -> None:
        chat.session.recorder.attach(History.open(file))
        await chat.session.ask(Question("one"))
        other, _ = second_window(chat, file)
        await chat.session.report_other_windows()
        assert chat.page.notices() == []
        for _ in range(2):
            await other.session.ask(Question("two"))
            other.session.recorder.flush()
            await chat.session.report_other_windows()
            await chat.session.report_other_windows()
            (notice,) = chat.page.notices()
            assert "Another window added messages" in notice.text
        chat.session.recorder.close()
        other.session.recorder.close()

    run(Stage(tmp_path), play)


def test_after_the_end_of_its_server_a_session_opens_another_engine(tmp_path: Path) -> None:
    lost = EngineDied("the connection was lost", phase="serve", attached=True)
    answers = iter((ScriptedAnswer((), error=lost), told("yes")))

    async def play(chat: Chat) -> None:
        assert (await chat.session.ask(Question("one"))).end == "failed"
        (notice,) = chat.page.notices()
        assert "the next question loads the model" in notice.text
        await chat.session.retry()
        assert len(chat.stage.opened) == 2
        answer = chat.session.last_answer()
        assert answer is not None and answer.message.content == "yes"

    run(Stage(tmp_path, script=lambda request: next(answers)), play)


def without_eyes(request: GenerateRequest) -> ScriptedAnswer:
    """Refuse pictures, like a model that reads text only."""
    assert isinstance(request.prompt, Messages)
    if any(message.attachments for message in request.prompt.messages):
        error = UsageError("this model cannot see pictures", media_kind="image")
        return ScriptedAnswer((), error=error)
    return ScriptedAnswer()


def test_a_picture_that_the_model_cannot_see_stops_its_own_question_only(tmp_path: Path) -> None:
    picture = Attachment("image", png(), name="a.png")

    async def play(chat: Chat) -> None:
        refused = await chat.session.ask(Question("what?", (), (picture,)))
        assert refused.end == "failed"
        assert (await chat.session.ask(Question("", (), (picture,)))).end == "failed"
        for text in ("two", "three"):
            assert (await chat.session.ask(Question(text))).end == "complete"
        first = sent(chat.stage.engine.requests[-2])
        assert first == [("user", "what?\n\n(an attachment that is not sent)\n\ntwo")]
        notices = [notice.text for notice in chat.page.notices()]
        assert sum("of earlier questions" in text for text in notices) == 1
        assert chat.session.conversation.path()[0].message.attachments, "it is still kept"

    run(Stage(tmp_path, script=without_eyes), play)


def test_an_answer_that_another_window_continued_is_not_written_over(tmp_path: Path) -> None:
    file = tmp_path / "history.sqlite3"
    cut = ScriptedAnswer(events=(Text(0, "a cache"), Finished(0, "length"), DONE))

    async def play(chat: Chat) -> None:
        chat.session.recorder.attach(History.open(file))
        await chat.session.ask(Question("What is it?"))
        other, history = second_window(chat, file)
        await other.session.continue_answer()
        other.session.recorder.flush()
        with pytest.raises(UsageError, match="another window continues this answer"):
            await chat.session.continue_answer()
        await other.session.continue_answer()
        chat.session.recorder.close()
        other.session.recorder.flush()
        (_, answer) = history.load(chat.session.conversation.id).path()
        assert answer.message.content == "a cache" * 3
        other.session.recorder.close()

    run(Stage(tmp_path, script=lambda request: cut), play)


def test_a_holder_of_an_open_engine_closes_it() -> None:
    engine = ScriptedEngine()

    async def play() -> None:
        holder = EngineHolder.holding(engine)
        assert await holder.engine() is engine
        holder.close()

    asyncio.run(play())
    assert engine.closed
