"""Every slash command does what its line of help says."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from textual.pilot import Pilot

from localchat.engine.events import Text
from localchat.engine.request import Messages
from localchat.errors import ModelMissing, NetworkError, UsageError
from localchat.session.blocks import AnswerBlock, NoticeBlock
from localchat.session.commands import COMMANDS, Command, matching, parse
from localchat.session.tool_calls import SessionTools
from localchat.tui.attachments import attachment_of_file
from localchat.tui.background_pull import BackgroundPull
from localchat.tui.screens.history import HistoryScreen
from localchat.tui.screens.list_dialog import ListDialog
from localchat.tui.widgets.banner import Banner
from tests.support.tui_scenes import held
from tests.support.tui_stage import Stage, app_of, play, say, sent, told, until


async def command(pilot: Pilot[int], line: str) -> None:
    """Write a command and send it, past its completions."""
    app = app_of(pilot)
    app.chat.composer.write(line)
    await pilot.pause()
    await pilot.press("enter")
    await pilot.pause()


def notices(pilot: Pilot[int]) -> list[str]:
    blocks = app_of(pilot).chat.transcript.blocks
    return [block.text for block in blocks if isinstance(block, NoticeBlock)]


def offered(pilot: Pilot[int]) -> list[str]:
    """Actions that the latest notice offers."""
    blocks = app_of(pilot).chat.transcript.blocks
    latest = [block for block in blocks if isinstance(block, NoticeBlock)][-1]
    return [offer.action for offer in latest.offers]


def dialog(pilot: Pilot[int]) -> ListDialog[Any]:
    screen = pilot.app.screen
    assert isinstance(screen, ListDialog)
    return screen


def test_the_table_is_complete_and_finds_the_nearest() -> None:
    assert " ".join(each.name for each in COMMANDS) == (
        "model new clear system set think tools regen edit undo compact everything copy export "
        "history stats fit pull help quit"
    )
    assert parse("/SET temperature  0.2 ") == (COMMANDS[4], "temperature  0.2")
    assert parse("/?").command.name == "help"
    assert [each.name for each in matching("s")] == ["system", "set", "stats"]
    with pytest.raises(UsageError, match="did you mean /regen"):
        parse("/regn")
    with pytest.raises(UsageError, match="NAME"):
        parse("/pull")


def test_completion_shows_the_commands_with_a_line_of_help(tmp_path: Path) -> None:
    async def what(pilot: Pilot[int]) -> None:
        composer = app_of(pilot).chat.composer
        await pilot.press("slash", "s")
        assert composer.completions.option_count == 3
        await pilot.press("down", "tab")
        assert composer.text == "/set "
        assert not composer.completions.display
        await pilot.press(*["backspace"] * 5, *"/he", "enter")
        assert composer.text == "/help ", "what is half written is completed first"
        await pilot.press(*["backspace"] * 6, *"/xyz", "escape", "enter")
        await pilot.pause()
        assert "there is no command /xyz" in notices(pilot)[-1]

    play(Stage(tmp_path), what)


def test_files_are_found_by_their_letters_and_sent_whole(tmp_path: Path) -> None:
    stage = Stage(tmp_path / "data")
    tree = tmp_path / "tree"
    (tree / "deep").mkdir(parents=True)
    (tree / "deep" / "notes.md").write_text("# secret\n```\ncode\n```\n")
    (tree / "other.txt").write_text("no")
    (tree / "picture.bin").write_bytes(b"\0\1")

    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        composer = app.chat.composer
        composer.root = tree
        await until(pilot, lambda: composer.count_tokens is not None)
        await pilot.press(*"see ", "at", *"nts")
        await until(pilot, lambda: composer.completions.option_count == 1)
        await pilot.press("enter")
        await until(pilot, lambda: composer.attachments)
        assert composer.text == "see ⟦deep/notes.md⟧ "
        attached = composer.query_one("#attached")
        await until(pilot, lambda: "tokens" in str(attached.render()))
        assert "deep/notes.md · " in str(attached.render())
        await pilot.press("enter")
        await until(pilot, lambda: stage.engine.requests and not app.session.busy)
        node = app.session.last_question()
        assert node is not None
        assert node.message.content == ("see deep/notes.md:\n````\n# secret\n```\ncode\n```\n```` ")
        assert node.inclusions[0].path == str(tree / "deep" / "notes.md")
        await pilot.press("at", *"pictu")
        await until(pilot, lambda: composer.completions.option_count == 1)
        await pilot.press("enter")
        await until(pilot, lambda: notices(pilot))
        assert "picture.bin is a binary file" in notices(pilot)[-1]

    play(stage, what)


def test_a_file_of_windows_is_attached_by_its_mark(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_bytes("Grüße\r\n".encode("utf-16"))
    attached = attachment_of_file(file, "notes.txt")
    assert ("Grüße\n" in attached.text, attached.note) == (True, "")


def test_new_and_clear_keep_the_old_conversation(tmp_path: Path) -> None:
    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        await command(pilot, "/system Be brief.")
        assert app.session.conversation.system == "Be brief."
        await say(pilot, "one")
        first = app.session.conversation.id
        await command(pilot, "/clear")
        await until(pilot, lambda: app.session.conversation.id != first)
        assert app.session.conversation.system == "Be brief."
        assert app.chat.transcript.blocks == ()
        await command(pilot, "/new")
        await until(pilot, lambda: app.session.conversation.system == "")
        assert app.recorder.history is not None
        assert [one.id for one in app.recorder.history.list()] == [first]
        await command(pilot, "/system")
        assert notices(pilot)[-1] == "There are no instructions."

    play(Stage(tmp_path), what)


def test_the_screen_goes_on_in_a_folder_that_was_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()

    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        await say(pilot, "one")
        await command(pilot, "/export a.md")
        assert notices(pilot)[-1].startswith("cannot write a.md")
        await command(pilot, "/tools read")
        await until(pilot, lambda: "the current folder cannot be used" in notices(pilot)[-1])
        await command(pilot, "/tools off")
        await until(pilot, lambda: app.session.setup.settings.tools == "off")
        await say(pilot, "@notes.txt")
        await pilot.press("enter")
        await until(pilot, lambda: len(app.session.conversation.nodes) == 4)

    play(Stage(tmp_path), what)


def test_parameters_by_command(tmp_path: Path) -> None:
    stage = Stage(tmp_path)

    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        await command(pilot, "/set temperature 0.2")
        await until(pilot, lambda: app.session.setup.settings.temperature == 0.2)
        assert len(stage.opened) == 1, "sampling needs no other engine"
        await command(pilot, "/set temperature hot")
        await until(pilot, lambda: notices(pilot))
        assert notices(pilot)[-1].startswith("/set temperature must be a number from 0 to 10")
        banner = str(app.chat.query_one(Banner).render())
        assert "temperature = hot" not in banner, "a value that is refused is not said to be taken"
        await command(pilot, "/set tempreature 1")
        assert "did you mean temperature" in notices(pilot)[-1]
        assert "must be" not in " ".join(notices(pilot)), "an error goes with the next input"
        await command(pilot, "/set remote box")
        assert "no model 'remote:box'" in notices(pilot)[-1]
        await command(pilot, "/set ctx 8k")
        await until(pilot, lambda: len(stage.opened) == 2 and not app.session.busy)
        assert stage.opened[-1][0].load.context_tokens == 8192
        for line in ("/set top_p = 0.5", "/set parameter min_p 0.1"):
            await command(pilot, line)
        await until(pilot, lambda: app.session.setup.settings.min_p == 0.1)
        assert app.session.setup.settings.top_p == 0.5
        await command(pilot, "/set history false")
        assert "cannot change in a conversation" in notices(pilot)[-1]
        assert app.session.setup.settings.history, "it would not be true"
        await command(pilot, "/set system Be brief.")
        assert app.session.conversation.system == "Be brief."
        await command(pilot, "/system off")
        assert app.session.conversation.system == ""
        await command(pilot, "/think off")
        await until(pilot, lambda: app.session.setup.settings.think == "off")
        await command(pilot, "/think hard")
        assert "on, off or auto" in notices(pilot)[-1]
        await say(pilot, "q")
        assert stage.engine.requests[-1].sampling.temperature == 0.2

    play(stage, what)


def test_the_parameter_screen_takes_a_value_for_this_conversation(tmp_path: Path) -> None:
    stage = Stage(tmp_path)

    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        await command(pilot, "/set")
        await until(pilot, lambda: app.screen is not app.chat)
        about = dialog(pilot).query_one("#about")
        await pilot.press(*"context", "enter")
        await until(pilot, lambda: "It takes" in str(about.render()))
        assert str(about.render()).count("It takes") == 1
        await pilot.press(*"hot")
        await until(pilot, lambda: str(about.render()).startswith("context_length must be"))
        await pilot.press(*["backspace"] * 3)
        await pilot.press(*"5000", "enter")
        await until(pilot, lambda: len(stage.opened) == 2)
        assert stage.opened[-1][0].load.context_tokens == 5000

    play(stage, what)


def test_models_are_listed_with_their_verdict_and_changed(tmp_path: Path) -> None:
    stage = Stage(tmp_path)

    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        await say(pilot, "one")
        await command(pilot, "/model")
        await until(pilot, lambda: app.screen is not app.chat)
        await until(pilot, lambda: dialog(pilot).entries.option_count > 10)
        await pilot.press(*"qwen2.5:7b")
        await until(pilot, lambda: "fit" in str(dialog(pilot).entries.options[0].prompt))
        await pilot.press("escape")
        await command(pilot, "/model other")
        await until(pilot, lambda: app.session.setup.model.name == "other")
        assert app.session.conversation.model == "other"
        await say(pilot, "two")
        assert len(stage.engine.requests[-1].prompt.messages) == 3  # type: ignore[union-attr]
        await command(pilot, "/model nothing")
        await until(pilot, lambda: "no model" in "".join(notices(pilot)))
        assert app.session.setup.model.name == "other"

    play(stage, what)


def test_history_opens_as_its_key_does_and_everything_is_sent_again(tmp_path: Path) -> None:
    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        await say(pilot, "one")
        question, answer = app.session.conversation.path()
        summary = msgspec.structs.replace(answer, replaces=(question.id,))
        app.session.conversation.put(summary)
        await command(pilot, "/everything")
        assert not any(node.replaces for node in app.session.conversation.path())
        assert "All messages are sent again." in notices(pilot)
        await command(pilot, "/history")
        assert isinstance(dialog(pilot), HistoryScreen)

    play(Stage(tmp_path), what)


def test_regen_edit_undo_and_compact(tmp_path: Path) -> None:
    stage = Stage(tmp_path)

    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        await command(pilot, "/regen")
        await until(pilot, lambda: "no question" in "".join(notices(pilot)))
        await say(pilot, "one")
        await command(pilot, "/regen")
        await until(pilot, lambda: len(stage.engine.requests) == 2 and not app.session.busy)
        assert len(app.session.conversation.siblings(app.session.last_answer().id)) == 2  # type: ignore[union-attr]
        await command(pilot, "/edit")
        assert app.chat.composer.text == "one"
        await pilot.press("escape")
        await say(pilot, "two")
        await say(pilot, "three " + "x" * 70_000)
        await command(pilot, "/compact")
        await until(
            pilot,
            lambda: any(node.replaces for node in app.session.conversation.nodes.values()),
        )
        await command(pilot, "/undo")
        assert app.chat.composer.text.startswith("three ")

    play(stage, what)


def test_copying_exporting_and_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    stage = Stage(tmp_path, script=lambda request: told("See:\n\n```sh\nls\n```\n"))

    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        copied: list[str] = []
        app.chat.copy = lambda text, what: copied.append(text)  # type: ignore[method-assign]
        await say(pilot, "q")
        await command(pilot, "/copy")
        await command(pilot, "/copy 2")
        await command(pilot, "/copy code")
        assert [text.strip() for text in copied] == [
            "See:\n\n```sh\nls\n```",
            "q\n\nSee:\n\n```sh\nls\n```",
            "ls",
        ]
        await command(pilot, "/copy code 1")
        assert copied.pop().strip() == "ls"
        await command(pilot, "/copy code 2")
        assert "has blocks 1 to 1" in notices(pilot)[-1]
        for words in ("nothing", "²", "0"):
            await command(pilot, f"/copy {words}")
            assert f"/copy {words}: expected a number of messages" in notices(pilot)[-1]
        await command(pilot, f"/export {tmp_path / 'talk.md'}")
        assert "See:" in (tmp_path / "talk.md").read_text()
        await command(pilot, f"/export {tmp_path / 'talk.json'}")
        assert json.loads((tmp_path / "talk.json").read_text())
        await command(pilot, f"/export {tmp_path / 'talk.md'}")
        assert "already exists" in notices(pilot)[-1]
        await command(pilot, f"/export {'x' * 300}")
        assert "cannot write" in notices(pilot)[-1]
        await command(pilot, "/export ~nobody-of-this-name.md")
        assert "See:" in (tmp_path / "~nobody-of-this-name.md").read_text()
        for name in ("q.md", "q-2.md"):
            await command(pilot, "/export")
            assert "See:" in (tmp_path / name).read_text()
        await command(pilot, "/stats")
        assert app.chat.panel.display
        assert notices(pilot)[-1].startswith("load 1.20 s · TTFT 0.41 s · 62.0 tok/s")

    play(stage, what)


def test_a_marked_answer_stands_for_its_question(tmp_path: Path) -> None:
    stage = Stage(tmp_path)

    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        for words in ("first", "second"):
            await say(pilot, words)
        await pilot.press("tab", "up", "up")
        assert isinstance(app.chat.transcript.blocks[1], AnswerBlock)
        assert app.chat.transcript.focused_id == app.chat.transcript.blocks[1].id
        await pilot.press("e")
        assert app.chat.composer.text == "first"
        await pilot.press("escape", "tab", "up", "up", "r")
        await until(pilot, lambda: len(stage.engine.requests) == 3 and not app.session.busy)
        assert sent(stage.engine.requests[-1]) == [("user", "first")]

    play(stage, what)


def test_fit_help_and_quit(tmp_path: Path) -> None:
    stage = Stage(tmp_path, script=lambda request: told("a needle in hay, a needle"))

    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        await say(pilot, "q")
        await command(pilot, "/fit other")
        await until(pilot, lambda: notices(pilot))
        assert "Fits: needs 6.7 GB of the 11.0 GB that are free" in notices(pilot)[-1]
        await command(pilot, "/fit qwen2.5:7b")  # in the catalogue, and not here
        await until(pilot, lambda: notices(pilot)[-1].startswith("qwen2.5:7b\nFits: "))
        await command(pilot, "/fit nobody:7b")
        await until(pilot, lambda: "no model 'nobody:7b'" in notices(pilot)[-1])
        await command(pilot, "/help")
        await until(pilot, lambda: app.screen is not app.chat)
        await pilot.press("escape")
        await command(pilot, "/quit")
        await until(pilot, lambda: app.return_code == 0)

    play(stage, what)


def test_a_pull_is_shown_while_the_chat_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BackgroundPull, "begin", lambda self, name, *, offline: None)

    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        await command(pilot, "/pull other")
        pulls = app.chat.pulls

        async def from_thread(callback: Callable[..., None], *arguments: object) -> None:
            await asyncio.to_thread(pulls._call, callback, *arguments)

        await from_thread(pulls._show_progress, "pull other 1.0/4.0 GB, 20 s left")
        await until(pilot, lambda: "1.0/4.0 GB" in app.session.status.pulling)
        await say(pilot, "meanwhile")
        await from_thread(pulls._show_progress, "")
        await from_thread(pulls.finished, "other")
        await until(pilot, lambda: notices(pilot))
        await pilot.press("alt+1")
        await until(pilot, lambda: app.session.setup.model.name == "other")
        await from_thread(pulls.failed, "other", NetworkError("no way", hint="try again"))
        await until(pilot, lambda: "no way" in notices(pilot)[-1])
        assert offered(pilot) == ["pull other"]
        await from_thread(pulls.failed, "nosuch", ModelMissing("nobody knows it"))
        await until(pilot, lambda: "nobody knows it" in notices(pilot)[-1])
        assert offered(pilot) == [], "to try once more would help nobody"

    play(Stage(tmp_path), what)


def test_a_pull_without_the_network_is_refused(tmp_path: Path) -> None:
    async def what(pilot: Pilot[int]) -> None:
        await command(pilot, "/pull other")
        assert "offline" in notices(pilot)[-1]

    play(Stage(tmp_path, changes={"offline": True}), what)


def test_a_command_that_must_wait_returns_to_the_input(tmp_path: Path) -> None:
    async def steps(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        app.chat.composer.write("go")
        await pilot.press("enter")
        await until(pilot, lambda: app.session.status.state == "writing")
        await command(pilot, "/undo")
        assert app.chat.composer.text == "/undo"
        await pilot.press("escape")
        await until(pilot, lambda: not app.session.busy)
        await pilot.press("enter")
        await until(pilot, lambda: not app.session.conversation.path())

    play(Stage(tmp_path, script=held(Text(0, "so "))), steps)


def test_a_prompt_of_a_server_is_completed_and_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = Command("mcp__demo__greet", "WHOM", "Greet.")

    async def prompt(tools: SessionTools, command: str, arguments: str) -> str:
        return f"{command}: Hello, {arguments}"

    monkeypatch.setattr(SessionTools, "prompt_commands", lambda tools: [row])
    monkeypatch.setattr(SessionTools, "prompt", prompt)
    stage = Stage(tmp_path)

    async def steps(pilot: Pilot[int]) -> None:
        composer = app_of(pilot).chat.composer
        await pilot.press(*"/mcp")
        await until(pilot, lambda: composer.editor.completing)
        assert composer.completions.option_count == 1
        await pilot.press("enter")
        assert composer.text == "/mcp__demo__greet "
        await pilot.press(*"Ada")
        await pilot.press("enter")
        await until(pilot, lambda: stage.engine.requests)
        sent_prompt = stage.engine.requests[-1].prompt
        assert isinstance(sent_prompt, Messages)
        assert sent_prompt.messages[-1].content == "mcp__demo__greet: Hello, Ada"

    play(stage, steps)


def test_what_must_wait_for_an_answer_is_a_hint_and_no_notice(tmp_path: Path) -> None:
    async def steps(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        app.chat.composer.write("go")
        await pilot.press("enter")
        await until(pilot, lambda: app.session.status.state == "writing")
        await pilot.press("f5")
        assert "an answer is under way; Esc stops it" in str(app.chat.query_one("#banner").render())
        assert not notices(pilot)
        await pilot.press("escape")
        await until(pilot, lambda: not app.session.busy)

    play(Stage(tmp_path, script=held(Text(0, "so "))), steps)
