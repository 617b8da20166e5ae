"""Typed text is never lost: while a sent message is edited, by the key for the previous message, in a
command, and behind an `@`."""

from contextlib import nullcontext
from pathlib import Path

import pytest
from textual.pilot import Pilot
from textual.widget import Widget

from localchat.chat.conversation import Conversation, Question
from localchat.engine.events import Text
from localchat.engine.request import Message
from localchat.errors import NetworkError, UsageError
from localchat.history.store import History
from localchat.session.blocks import NoticeBlock
from localchat.session.commands import is_command
from localchat.tui.app import ChatApp
from localchat.tui.attachments import attachment_of_file, expand
from localchat.tui.widgets.banner import Banner
from localchat.tui.widgets.composer import Composer
from localchat.tui.widgets.editor import Editor
from tests.support.conversations import kept
from tests.support.media import png
from tests.support.scripted_engine import ScriptedAnswer
from tests.support.tui_stage import HOLD, Stage, StagedEngine, app_of, play, say, sent, until

PASTE = "line\n" * 500
SIGN = "⟦paste 1, 500 lines⟧"


def attached(pilot: Pilot[int]) -> str:
    return str(app_of(pilot).chat.composer.query_one("#attached").render())


def banner(app: ChatApp) -> str:
    return str(app.chat.query_one(Banner).render())


async def answered(pilot: Pilot[int], stage: Stage, count: int) -> str:
    """The last message of the request with this number, once it is answered."""
    app = app_of(pilot)
    await until(pilot, lambda: len(stage.engine.requests) == count and not app.session.busy)
    return sent(stage.engine.requests[-1])[-1][1]


def test_a_draft_waits_while_a_sent_message_is_changed(tmp_path: Path) -> None:
    stage = Stage(tmp_path)

    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        composer = app.chat.composer
        await say(pilot, "question")
        composer.editor.insert_paste(PASTE)
        await pilot.press("f6")
        assert composer.text == "question"
        await pilot.press("f6", "escape")
        assert composer.text == f"{SIGN} "
        assert len(composer.attachments) == 1
        await pilot.press("f6", "s", "enter")
        assert await answered(pilot, stage, 2) == "questions"
        await until(pilot, lambda: composer.text == f"{SIGN} ")
        await pilot.press("enter")
        assert (await answered(pilot, stage, 3)).startswith(PASTE)

    play(stage, what)


def test_during_an_answer_the_banner_says_that_escape_stops_the_answer(tmp_path: Path) -> None:
    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        await pilot.press(*"question", "enter")
        await until(pilot, lambda: app.session.status.state == "writing")
        await pilot.press("f6")
        assert "Esc stops the answer" in banner(app)
        await pilot.press("escape")
        await until(pilot, lambda: not app.session.busy and "Esc leaves it" in banner(app))
        assert app.chat.composer.text == "question"
        await pilot.press("escape")
        assert banner(app) == ""

    play(Stage(tmp_path, script=lambda request: HELD), what)


def test_a_message_that_is_being_changed_is_kept_with_the_draft(tmp_path: Path) -> None:
    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)

        def stored() -> str:
            app.recorder.flush()
            return app.recorder.kept_draft()

        await say(pilot, "question")
        await pilot.press(*"draft", "f6")
        await pilot.pause()
        assert stored() == "draft"
        await pilot.press("s")
        await pilot.pause()
        assert stored() == "draft\n\nquestions"
        await pilot.press("escape")
        await pilot.pause()
        assert stored() == "draft"

    play(Stage(tmp_path), what)


def test_a_draft_is_not_lost_to_a_message_that_is_recalled(tmp_path: Path) -> None:
    stage = Stage(tmp_path)

    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        await say(pilot, "question")
        await pilot.press(*"draft", "up")
        await pilot.pause()
        assert app.chat.composer.text == "question"
        app.recorder.flush()
        assert app.recorder.kept_draft() == "draft"
        await pilot.press("enter")
        assert await answered(pilot, stage, 2) == "question"
        assert app.chat.composer.text == "draft"
        await pilot.press("up", *"?", "up")
        assert app.chat.composer.text == "question"
        app.recorder.flush()
        assert app.recorder.kept_draft() == "draft"
        await pilot.press("down", *"!", "down")
        assert app.chat.composer.text == "question?"
        await pilot.press("down")
        assert app.chat.composer.text == "draft"
        await pilot.press("up", "up")
        assert app.chat.composer.text == "question!"
        await pilot.press(*"!")
        app.recorder.flush()
        assert app.recorder.kept_draft() == "draft\n\nquestion!!"

    play(stage, what)


def test_an_undo_that_takes_lines_away_in_a_low_window_ends_nothing(tmp_path: Path) -> None:
    async def what(pilot: Pilot[int]) -> None:
        editor = app_of(pilot).chat.composer.editor
        editor.history.checkpoint()
        editor.insert("\n" * 4)
        await until(pilot, lambda: editor.show_vertical_scrollbar)
        await pilot.press("ctrl+underscore")
        assert editor.text == ""

    play(Stage(tmp_path), what, 30, 8)


def test_the_up_key_works_in_a_conversation_with_fewer_messages(tmp_path: Path) -> None:
    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        for words in ("one", "two", "three"):
            await say(pilot, words)
        await pilot.press("up")
        short = Conversation()
        short.add(Message("user", "only"), parent=None)
        app.chat.resume(short)
        await pilot.press("up")
        assert app.chat.composer.text == "only"

    play(Stage(tmp_path), what)


def test_a_kept_draft_is_not_lost_to_what_is_typed_before_the_history_opens(
    tmp_path: Path,
) -> None:
    with History.open(tmp_path / "history.sqlite3") as history:
        history.put_draft(None, "kept")
    stage = Stage(tmp_path)

    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        await until(pilot, lambda: app.chat.composer.text == "kept")
        app.chat.composer.write("early")
        await app._open_history()
        assert app.chat.composer.text == "early"
        await pilot.press("up")
        assert app.chat.composer.text == "kept"

    play(stage, what)


@pytest.mark.parametrize("way", ["/new", "/clear"])
def test_a_new_conversation_ends_the_change_of_a_message(tmp_path: Path, way: str) -> None:
    stage = Stage(tmp_path)

    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        await say(pilot, "question")
        await pilot.press("f6")
        app.chat.run_command(way)
        await until(pilot, lambda: not app.session.conversation.nodes)
        assert app.chat.composer.text == ""
        await say(pilot, "another")
        assert sent(stage.engine.requests[-1]) == [("user", "another")]

    play(stage, what)


def test_an_opened_conversation_ends_the_change_of_a_message(tmp_path: Path) -> None:
    stage = Stage(tmp_path)

    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        await say(pilot, "first")
        await pilot.press("ctrl+n")
        await until(pilot, lambda: not app.session.conversation.nodes)
        await say(pilot, "second")
        await pilot.press("f6", "ctrl+r")
        await until(pilot, lambda: app.screen is not app.chat)
        await pilot.press(*"first")
        await until(pilot, lambda: app.screen.query_one("OptionList").option_count == 1)  # type: ignore[attr-defined]
        await pilot.press("enter")
        await until(pilot, lambda: app.session.conversation.path()[0].message.content == "first")
        await say(pilot, "more")
        assert sent(stage.engine.requests[-1])[0] == ("user", "first")
        assert sent(stage.engine.requests[-1])[-1] == ("user", "more")

    play(stage, what)


def test_the_message_of_before_comes_back_with_what_it_included(tmp_path: Path) -> None:
    stage = Stage(tmp_path)

    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        composer = app.chat.composer
        composer.editor.insert_paste(PASTE)
        await pilot.press("enter")
        first = await answered(pilot, stage, 1)
        await pilot.press("d", "up")
        assert composer.text == f"{SIGN} "
        await pilot.press("enter")
        assert await answered(pilot, stage, 2) == first
        app.chat.resume(app.session.conversation)
        await pilot.press("up", "up")
        assert composer.text.startswith(SIGN)
        composer.editor.insert_paste(PASTE)
        assert len({one.sign for one in composer.attachments}) == 2, (
            "another paste has another sign"
        )

    play(stage, what)


def test_messages_written_while_an_answer_comes_wait_for_it(tmp_path: Path) -> None:
    stage = Stage(tmp_path, script=lambda request: ScriptedAnswer(events=(Text(0, "so"), HOLD)))

    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        composer = app.chat.composer
        composer.write("first")
        await pilot.press("enter")
        await until(pilot, lambda: app.session.busy)
        for key in ("a", "enter", "b", "enter", "c"):  # no pause: as a terminal pastes lines
            app.simulate_key(key)
        await pilot.pause()
        assert composer.text == "c"
        assert str(app.chat.query_one("#banner").render()) == "next: a\nthen: b"
        assert len(app.session.conversation.nodes) == 2
        assert app.recorder.kept_draft() in ("", "a\n\nb\n\nc")
        with pytest.raises(UsageError, match="under way"):
            await app.session.ask(Question("another"))
        assert len(app.session.conversation.nodes) == 2
        await pilot.press("backspace", "up")
        assert composer.text == "b", "the newest can be changed"
        await pilot.press("escape")
        await until(pilot, lambda: not app.session.busy)
        assert composer.text == "a\n\nb", "a stopped answer sends nothing"

    play(stage, what)


HELD = ScriptedAnswer(events=(Text(0, "so"), HOLD))


@pytest.mark.parametrize("leave", ["new", "open"])
def test_messages_that_wait_stay_with_the_conversation_that_is_left(
    tmp_path: Path, leave: str
) -> None:
    with History.open(tmp_path / "history.sqlite3") as history:
        other = kept(history, "earlier", "answer")

    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        composer = app.chat.composer
        first = app.session.conversation
        for text in ("first", "waits"):
            composer.write(text)
            await pilot.press("enter")
            await until(pilot, lambda: app.session.busy)
        composer.write("typed")
        if leave == "new":
            app.chat.run_command("/new")
        else:
            app.chat.open_conversation(other.id)
        await until(pilot, lambda: app.session.conversation is not first)
        await until(pilot, lambda: "The answer was stopped" in banner(app))
        assert composer.text == "typed", "what is typed goes along"
        app.recorder.flush()
        assert app.recorder.history is not None
        assert app.recorder.history.draft(first.id) == "waits"
        composer.write("")
        await pilot.pause()
        app.chat.open_conversation(first.id)
        await until(pilot, lambda: app.session.conversation.id == first.id)
        assert composer.text == "waits"
        assert app.recorder.kept_draft() == "waits"

    play(Stage(tmp_path, script=lambda request: HELD), what)


def test_a_draft_of_an_earlier_run_comes_back_with_its_conversation(tmp_path: Path) -> None:
    with History.open(tmp_path / "history.sqlite3") as history:
        other = kept(history, "earlier", "answer")
        history.put_draft(other.id, "begun")

    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        app.chat.open_conversation(other.id)
        await until(pilot, lambda: app.session.conversation.id == other.id)
        assert app.chat.composer.text == "begun"

    play(Stage(tmp_path), what)


def test_a_change_of_the_model_reports_that_it_stopped_the_answer(tmp_path: Path) -> None:
    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        app.chat.composer.write("first")
        await pilot.press("enter")
        await until(pilot, lambda: len(app.session.conversation.nodes) == 2)
        app.chat.run_command("/model other")
        await until(pilot, lambda: "Switched to other" in banner(app))
        assert banner(app) == "The answer was stopped; its text is kept. Switched to other"

    play(Stage(tmp_path, script=lambda request: HELD), what)


def test_pastes_of_messages_that_wait_keep_their_own_text(tmp_path: Path) -> None:
    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        composer = app.chat.composer
        composer.write("first")
        await pilot.press("enter")
        for letter in ("a", "b"):
            composer.editor.insert_paste(f"{letter}\n" * 120)
            await pilot.press("enter")
        composer.editor.insert_paste("c\n" * 120)
        app.session.stop()
        await until(pilot, lambda: len(composer.attachments) == 3)
        text = expand(composer.text, composer.attachments).text
        assert [text.count(letter) for letter in "abc"] == [120] * 3

    play(Stage(tmp_path, script=lambda request: HELD), what)


@pytest.mark.parametrize("command", ["true", "sh -c 'echo more >> \"$0\"'"])
def test_the_external_editor_keeps_pictures(
    tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.png").write_bytes(png())
    monkeypatch.setattr(
        "localchat.tui.external_editor.terminal_released", lambda app: nullcontext()
    )

    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        composer = app.chat.composer
        composer.editor.insert_attachment(attachment_of_file(tmp_path / "a.png", "a.png"))
        composer.editor.insert("look")
        await pilot.press("ctrl+g")
        await until(pilot, lambda: command == "true" or "more" in composer.text)
        await pilot.pause()
        question = expand(composer.text, composer.attachments)
        assert [item.name for item in question.attachments] == ["a.png"]

    play(Stage(tmp_path, environ={"EDITOR": command}), what)


def test_two_messages_at_once_are_answered_one_after_the_other(tmp_path: Path) -> None:
    stage = Stage(tmp_path)

    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        app.chat.on_composer_sent(Composer.Sent(Question("one")))
        app.chat.on_composer_sent(Composer.Sent(Question("two")))
        await until(pilot, lambda: len(stage.engine.requests) == 2 and not app.session.busy)
        assert [text for _, text in sent(stage.engine.requests[-1])][::2] == ["one", "two"]

    play(stage, what)


def test_messages_that_wait_are_sent_one_after_another(tmp_path: Path) -> None:
    gate = ScriptedAnswer(("one ", *("." for _ in range(20))), gap_s=0.01)
    stage = Stage(tmp_path, script=lambda request: gate)

    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        for text in ("first", "second", "/bogus", "third"):
            app.chat.composer.write(text)
            await pilot.press("enter")
        await until(pilot, lambda: len(stage.engine.requests) == 3 and not app.session.busy)
        assert [text for role, text in sent(stage.engine.requests[-1]) if role == "user"] == [
            "first",
            "second",
            "third",
        ]
        assert not app.chat.query_one("#banner").display
        app.recorder.flush()
        assert app.recorder.kept_draft() == "", "what was sent is no draft"

    play(stage, what)


def test_a_long_message_that_waits_has_one_row(tmp_path: Path) -> None:
    stage = Stage(tmp_path, script=lambda request: ScriptedAnswer(events=(Text(0, "so"), HOLD)))

    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        for text in ("first", "word " * 60, "last"):
            app.chat.composer.write(text)
            await pilot.press("enter")
        banner = app.chat.query_one("#banner")
        await until(pilot, lambda: banner.size.height == 2)
        row, last = (strip.text.rstrip() for strip in banner.render_lines(banner.outer_size.region))
        assert row.endswith("…") and len(row) >= banner.content_size.width
        assert last.strip() == "then: last"
        await pilot.press("escape")

    play(stage, what)


@pytest.mark.parametrize("gone", [Editor, Banner])
def test_an_answer_that_ends_while_the_app_does_gives_nothing_back(
    tmp_path: Path, gone: type[Widget]
) -> None:
    stage = Stage(tmp_path, script=lambda request: ScriptedAnswer(events=(Text(0, "so"), HOLD)))

    async def what(pilot: Pilot[int]) -> None:
        chat = app_of(pilot).chat
        for text in ("first", "waits"):
            chat.composer.write(text)
            await pilot.press("enter")
        await until(pilot, lambda: chat.session.busy)
        pilot.app._running = False  # as Textual has it while it takes the widgets away
        await chat.query_one(gone).remove()
        chat.session.stop()
        await until(pilot, lambda: not chat.session.busy)
        pilot.app._running = True

    play(stage, what)


def test_a_paste_whose_deletion_is_undone_is_sent(tmp_path: Path) -> None:
    stage = Stage(tmp_path)

    async def what(pilot: Pilot[int]) -> None:
        editor = app_of(pilot).chat.composer.editor
        editor.insert_paste(PASTE)
        await pilot.press("backspace", "backspace")
        assert editor.text == ""
        editor.insert_paste("other\n" * 500)
        while editor.text.rstrip() != SIGN and editor.history.undo_stack:
            left = len(editor.history.undo_stack)
            await pilot.press("ctrl+underscore")
            assert len(editor.history.undo_stack) < left
        assert editor.text.rstrip() == SIGN
        await pilot.press("enter")
        assert (await answered(pilot, stage, 1)).startswith(PASTE)

    play(stage, what)


def test_a_paste_in_a_command_is_part_of_it(tmp_path: Path) -> None:
    stage = Stage(tmp_path)

    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        await pilot.press(*"/system ")
        app.chat.composer.editor.insert_paste(PASTE)
        await pilot.press("enter")
        await until(pilot, lambda: app.session.conversation.system == PASTE.strip())
        assert not stage.engine.requests

    play(stage, what)


def test_a_completed_command_keeps_what_stands_behind_it(tmp_path: Path) -> None:
    async def what(pilot: Pilot[int]) -> None:
        composer = app_of(pilot).chat.composer
        composer.write("one\ntwo")
        composer.editor.move_cursor((0, 0))
        await pilot.press(*"/sy", "tab")
        assert composer.text == "/system one\ntwo"
        composer.write("/system one")
        composer.editor.move_cursor((0, 3))
        await pilot.press("backspace", "y", "tab")
        assert composer.text == "/system one"

    play(Stage(tmp_path), what)


def test_another_word_for_a_command_needs_one_enter(tmp_path: Path) -> None:
    async def what(pilot: Pilot[int]) -> None:
        await pilot.press(*"/exit", "enter")
        await until(pilot, lambda: not pilot.app.is_running)

    play(Stage(tmp_path), what)


def test_a_path_at_the_beginning_is_text(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    assert is_command("/help") and is_command("/") and is_command("/system a/b")
    assert not is_command("see /help") and not is_command("")

    async def what(pilot: Pilot[int]) -> None:
        await say(pilot, "/usr/lib/x.py:3: error: it broke")
        assert await answered(pilot, stage, 1) == "/usr/lib/x.py:3: error: it broke"

    play(stage, what)


def test_a_file_whose_name_is_written_out_is_included(tmp_path: Path) -> None:
    stage = Stage(tmp_path / "data")
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "notes.md").write_text("# secret\n")
    (tree / "bin.dat").write_bytes(b"\0\1")
    (tree / "two words.md").write_text("# two")

    async def what(pilot: Pilot[int]) -> None:
        composer = app_of(pilot).chat.composer
        composer.root = tree
        await pilot.press("at", *"notes.md")
        await until(pilot, lambda: composer.completions.option_count == 1)
        await pilot.press("enter")
        await until(pilot, lambda: composer.text == "⟦notes.md⟧ ")
        composer.write("")
        await pilot.press(*"see ", "at", *"notes.md ", *"now")
        await until(pilot, lambda: composer.text == "see ⟦notes.md⟧ now")
        composer.write("read @notes.md, @@notes.md and @nobody")
        await pilot.press("enter")
        await until(pilot, lambda: composer.text == "read ⟦notes.md⟧, @@notes.md and @nobody")
        await pilot.press("enter")
        assert "# secret" in await answered(pilot, stage, 1)
        composer.write('read @"two words.md"')
        await pilot.press("enter")
        await until(pilot, lambda: composer.text == "read ⟦two words.md⟧")
        composer.write("run @bin.dat")
        await pilot.press("enter")
        await until(pilot, lambda: app_of(pilot).chat.transcript.blocks[-1].id == "input-error")
        await pilot.press("enter")
        assert await answered(pilot, stage, 2) == "run @bin.dat"

    play(stage, what)


@pytest.mark.parametrize("with_folder", [True, False])
def test_a_name_of_no_file_is_held_back_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_folder: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    stage = Stage(tmp_path)
    name = f"{tmp_path}/late.txt" if with_folder else "late.txt"
    line = f"read @{name} and ask @ann"

    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        app.chat.composer.write(line)
        await pilot.press("enter")
        await until(pilot, lambda: app.chat.transcript.blocks)
        (notice,) = app.chat.transcript.blocks
        assert isinstance(notice, NoticeBlock)
        assert notice.text.startswith(f"there is no file {name}\n")
        assert (app.chat.composer.text, app.session.conversation.nodes) == (line, {})
        await pilot.press("enter")
        assert await answered(pilot, stage, 1) == line
        (tmp_path / "late.txt").write_text("it is here now")
        app.chat.composer.write(line)
        await pilot.press("enter")
        await until(pilot, lambda: app.chat.composer.attachments)

    play(stage, what)


def test_a_command_is_not_held_back_for_a_path(tmp_path: Path) -> None:
    async def what(pilot: Pilot[int]) -> None:
        app_of(pilot).chat.composer.write("/system answer of @/nowhere")
        await pilot.press("enter")
        await until(pilot, lambda: app_of(pilot).session.conversation.system)

    play(Stage(tmp_path), what)


def test_a_file_that_is_not_utf8_says_so(tmp_path: Path) -> None:
    stage = Stage(tmp_path / "data")
    (tmp_path / "latin.txt").write_bytes("café".encode("latin-1"))

    async def what(pilot: Pilot[int]) -> None:
        composer = app_of(pilot).chat.composer
        composer.root = tmp_path
        await pilot.press("at", *"latin.txt ")
        await until(pilot, lambda: "not UTF-8" in attached(pilot))

    play(stage, what)


class _Mute(StagedEngine):
    def tokenize(self, text: str, *, special: bool = False) -> list[int]:
        raise NetworkError("this server does not count")


def test_tokens_that_nobody_counts_are_unknown_and_another_model_counts_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Stage(tmp_path, script=lambda request: ScriptedAnswer())

    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        with monkeypatch.context() as patch:
            patch.setattr(StagedEngine, "tokenize", _Mute.tokenize)
            app.chat.composer.editor.insert_paste(PASTE)
            await until(pilot, lambda: "tokens unknown" in attached(pilot))
        app.chat.run_command("/model other")
        await until(pilot, lambda: "625 tokens" in attached(pilot))

    play(stage, what)


def test_documents_are_completed_anywhere_and_win_over_a_file_only_if_asked_twice(
    tmp_path: Path,
) -> None:
    stage = Stage(tmp_path / "data")
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "home").write_text("of the file")
    with stage.app().session.context.library.open("home", create=True) as collection:
        collection.learn([str(tmp_path / "tree" / "home")])

    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        composer = app.chat.composer
        composer.root = tmp_path / "tree"
        await pilot.press("a", "space", "at", "h", "o")
        await until(pilot, lambda: composer.completions.option_count == 2)
        await pilot.press("tab")
        assert composer.text == "a @home "
        await pilot.press(*"b", "enter")
        await until(pilot, lambda: app.chat.transcript.blocks)
        (notice,) = app.chat.transcript.blocks
        assert isinstance(notice, NoticeBlock)
        assert notice.text.startswith("@home is the name of documents and of a file here\n")
        assert stage.engine.requests == []
        await pilot.press("enter")
        text = await answered(pilot, stage, 1)
        assert text.startswith("Documents: home. ")
        assert text.endswith("\n\na home b")

    play(stage, what)


@pytest.mark.parametrize("question", ["@cat.png what is it?", "what is @cat.png"])
def test_a_message_whose_file_is_refused_waits_for_a_second_enter(
    tmp_path: Path, question: str
) -> None:
    stage = Stage(tmp_path)
    (tmp_path / "cat.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0")

    async def steps(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        app.chat.composer.root = tmp_path
        await pilot.press(*question)
        app.chat.composer.close_completions()
        await pilot.press("enter")

        def errors() -> list[str]:
            blocks = app.chat.transcript.blocks
            return [block.text for block in blocks if isinstance(block, NoticeBlock)]

        await until(pilot, lambda: any("Enter again" in text for text in errors()))
        assert "cat.png is damaged or incomplete" in errors()[-1]
        assert app.chat.composer.text == question
        assert not stage.engine.requests
        # A search for files that was slow may have opened the list again.
        app.chat.composer.close_completions()
        await pilot.press("enter")
        assert await answered(pilot, stage, 1) == question

    play(stage, steps)
