"""Screens, and what must outlive the program."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from textual.pilot import Pilot
from textual.widgets import Input, OptionList, Static

from localchat.errors import HistoryUnusable, LocalchatError
from localchat.history.autosave import Autosave
from localchat.history.store import History
from localchat.models.index import Model
from localchat.models.onboarding import FirstRun
from localchat.session.blocks import NoticeBlock
from localchat.session.commands import COMMANDS
from localchat.tui.screens import history as history_screen
from localchat.tui.screens.list_dialog import ListDialog
from localchat.tui.themes import textual_name
from localchat.tui.widgets.welcome import Welcome, first_greeting
from tests.support.tui_scenes import FIRST, suggestion
from tests.support.tui_stage import Stage, app_of, play, say, until


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


def dialog(pilot: Pilot[int]) -> ListDialog[Any]:
    screen = pilot.app.screen
    assert isinstance(screen, ListDialog)
    return screen


def listed(pilot: Pilot[int]) -> int:
    """How many entries the dialog lists, without headings."""
    return sum(not option.disabled for option in dialog(pilot).entries.options)


def test_keys_that_do_not_fit_on_the_frame_stand_below_the_list(tmp_path: Path) -> None:
    async def what(pilot: Pilot[int]) -> None:
        await pilot.press("ctrl+r")
        await until(pilot, lambda: app_of(pilot).screen is not app_of(pilot).chat)
        screen = dialog(pilot)
        keys = screen.query_one("#keys")
        await until(pilot, lambda: "Del delete" in str(screen.query_one("#dialog").border_subtitle))
        assert not keys.display
        await pilot.resize_terminal(40, 24)
        await until(pilot, lambda: keys.display)
        lines = str(keys.render()).split("\n")
        assert " · ".join(lines) == screen.KEYS_TEXT
        assert max(map(len, lines)) <= keys.size.width

    play(Stage(tmp_path), what)


def test_history_is_searched_renamed_deleted_and_taken_back(tmp_path: Path) -> None:
    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        await say(pilot, "about rivers")
        await command(pilot, "/new")
        await pilot.pause()
        await say(pilot, "about hills")
        await until(pilot, lambda: len(app.recorder.history.list()) == 2)  # type: ignore[union-attr]
        await pilot.press("ctrl+r")
        await until(pilot, lambda: app.screen is not app.chat)
        assert listed(pilot) == 2
        assert dialog(pilot).query_one("#filter", Input).placeholder == "Search titles and messages"
        assert "Today" in str(dialog(pilot).entries.get_option_at_index(0).prompt)
        about = dialog(pilot).query_one("#about")
        await pilot.press(*"rivers")
        assert listed(pilot) == 1
        await pilot.press("ctrl+s")
        dialog(pilot).query_one("#filter", Input).value = "Waters"
        await pilot.press("enter")
        assert any("Waters" in str(each.prompt) for each in dialog(pilot).entries.options)
        await pilot.press("down", "down", "ctrl+x")
        assert listed(pilot) == 1
        await pilot.press("ctrl+z")
        assert listed(pilot) == 2
        assert "Restored " in str(about.render())
        await pilot.press(*"rivers", "enter")
        await until(pilot, lambda: app.screen is app.chat)
        await until(pilot, lambda: app.session.last_question().message.content == "about rivers")  # type: ignore[union-attr]
        await pilot.press("up")
        assert app.chat.composer.text == "about rivers"

    play(Stage(tmp_path), what)


def test_the_history_lists_what_is_on_its_way_to_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = threading.Event()
    write = Autosave._write

    def write_late(self: Autosave, *what: Any) -> HistoryUnusable | None:
        written.wait()
        return write(self, *what)

    async def what(pilot: Pilot[int]) -> None:
        monkeypatch.setattr(Autosave, "_write", write_late)
        await say(pilot, "about rivers")
        await pilot.press("ctrl+r")
        await until(pilot, lambda: "no conversations yet" in str(_rows(pilot)))
        written.set()
        await until(pilot, lambda: "about rivers" in str(_rows(pilot)))

    play(Stage(tmp_path), what)


def _rows(pilot: Pilot[int]) -> list[str]:
    """The lines of the dialog, once it has any."""
    return [str(row.prompt) for one in pilot.app.screen.query(OptionList) for row in one.options]


def test_the_shown_conversation_chosen_from_the_history_keeps_its_last_answer(
    tmp_path: Path,
) -> None:
    """A second after its question, an answer is not on the disk yet."""

    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        await say(pilot, "about rivers")
        answer = app.session.last_answer()
        assert answer is not None
        app.chat.open_conversation(app.session.conversation.id)
        before = app.session.conversation
        await until(pilot, lambda: app.session.conversation is not before)
        shown = app.session.last_answer()
        assert shown is not None
        assert (shown.id, shown.message, shown.state) == (answer.id, answer.message, answer.state)

    play(Stage(tmp_path), what)


def test_a_history_that_is_longer_than_its_list_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("localchat.tui.screens.history._MAX_SHOWN", 1)

    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        await say(pilot, "about rivers")
        await command(pilot, "/new")
        await pilot.pause()
        await say(pilot, "about hills")
        await until(pilot, lambda: len(app.recorder.history.list()) == 2)  # type: ignore[union-attr]
        await pilot.press("ctrl+r")
        await until(pilot, lambda: app.screen is not app.chat)
        box = dialog(pilot).query_one("#dialog")
        assert listed(pilot) == 1
        assert str(box.border_title) == "Conversations, the newest 1: search for older ones"
        await pilot.press(*"rivers")
        await until(pilot, lambda: str(box.border_title) == "Conversations")
        await pilot.press(*["backspace"] * len("rivers"), "pagedown")
        assert listed(pilot) == 2, "the end of the list loads older conversations"
        assert str(box.border_title) == "Conversations"

    play(Stage(tmp_path), what)


def test_settings_are_written_with_their_comments(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    stage.environ["LOCALCHAT_CONFIG"] = str(tmp_path / "settings.toml")
    file = tmp_path / "settings.toml"
    file.write_text("# mine\n[defaults]\ntemperature = 0.5 # warm\n")

    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        await pilot.press("f2")
        await until(pilot, lambda: app.screen is not app.chat)
        shown = [str(each.prompt) for each in dialog(pilot).entries.options]
        assert any(each.split() == ["Quiet", "command", "line", "no"] for each in shown)
        assert any(each.split() == ["Sampling", "Temperature", "0.5"] for each in shown)
        assert not any("dummy" in each.lower() for each in shown)
        await pilot.press(*"temp", "enter", *"hot", "enter")
        assert "a number from 0 to 10" in str(dialog(pilot).query_one("#about").render())
        await pilot.press(*["backspace"] * 3, *"0.3", "enter")
        assert file.read_text() == "# mine\n[defaults]\ntemperature = 0.3 # warm\n"
        await pilot.press(*"theme", "enter", *"light", "enter", "escape")
        await until(pilot, lambda: app.theme == "light")
        await until(pilot, lambda: app.session.setup.settings.temperature == 0.3)
        await pilot.press("f2")
        await until(pilot, lambda: app.screen is not app.chat)
        await pilot.press(*"theme", "ctrl+x", "escape")
        await until(pilot, lambda: app.theme == textual_name("dark"))
        assert "theme" not in file.read_text()

    play(stage, what)


def test_a_draft_comes_back(tmp_path: Path) -> None:
    stage = Stage(tmp_path)

    async def write(pilot: Pilot[int]) -> None:
        await pilot.press(*"half a th")
        await pilot.pause()

    async def find(pilot: Pilot[int]) -> None:
        await until(pilot, lambda: app_of(pilot).chat.composer.text == "half a th")

    play(stage, write)
    play(Stage(tmp_path), find)


def test_an_engine_that_cannot_be_opened_is_a_notice_with_its_hint(tmp_path: Path) -> None:
    async def what(pilot: Pilot[int]) -> None:
        await until(pilot, lambda: notices(pilot))
        assert "no room" in notices(pilot)[0]
        assert "close something" in notices(pilot)[0]

    play(Stage(tmp_path, refuse=LocalchatError("no room", hint="close something")), what)


def test_the_own_editor_writes_the_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "editor.sh"
    script.write_text('#!/bin/sh\nprintf "from outside" > "$1"\n')
    script.chmod(0o755)
    stage = Stage(tmp_path, environ={"EDITOR": str(script)})
    from contextlib import contextmanager

    from localchat.tui.app import ChatApp

    monkeypatch.setattr(ChatApp, "suspend", contextmanager(lambda self: iter([None])))

    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        await pilot.press(*"draft", "ctrl+g")
        await until(pilot, lambda: app.chat.composer.text == "from outside")

    play(stage, what)


def test_an_editor_that_is_not_there_leaves_the_screen_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from contextlib import contextmanager

    from localchat.tui.app import ChatApp

    told: list[str] = []

    def suspend(app: ChatApp) -> Iterator[None]:
        told.append("given away")
        yield
        told.append("taken back")  # as Textual does it: not after an error

    monkeypatch.setattr(ChatApp, "suspend", contextmanager(suspend))

    async def what(pilot: Pilot[int]) -> None:
        await pilot.press(*"draft", "ctrl+g")
        await until(pilot, lambda: notices(pilot))
        assert "cannot start the editor no-such-editor: No such file" in notices(pilot)[0]
        assert told == ["given away", "taken back"]
        assert app_of(pilot).chat.composer.text == "draft"

    play(Stage(tmp_path, environ={"EDITOR": "no-such-editor"}), what)


def test_what_was_said_is_there_after_a_restart(tmp_path: Path) -> None:
    async def talk(pilot: Pilot[int]) -> None:
        await say(pilot, "remember me")

    async def again(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        assert [getattr(block, "text", "") for block in app.chat.transcript.blocks] == [
            "remember me",
            "Hello there.",
        ]

    play(Stage(tmp_path), talk)
    with History.open(tmp_path / "history.sqlite3") as history:
        summary = history.last()
        assert summary is not None
        conversation = history.load(summary.id)
    play(Stage(tmp_path, conversation=conversation), again)


def test_an_offer_of_a_download_keeps_its_speed_on_a_screen_of_60_columns(tmp_path: Path) -> None:
    fast = suggestion("fast", "qwen2.5:0.5b-q4_k_m", 491_400_032, 41.0)
    found = FirstRun("2 cores", (), (fast,))

    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        shown = "qwen2.5:0.5b-q4_k_m · quick answers"
        await until(pilot, lambda: shown in str(app.chat.query_one(Welcome).render()))

    play(Stage(tmp_path, models=("guide",), first_run=found), what, 60, 24)


def test_models_of_other_programs_come_first_on_a_first_run_and_are_used_where_they_lie(
    tmp_path: Path,
) -> None:
    external = tuple(
        Model(name, "adopted", origin, tmp_path / f"{name}.gguf")
        for name, origin in (("ollama/tiny", "Ollama"), ("other", "LM Studio"), ("third", "Ollama"))
    )
    found = FirstRun("2 cores", external, FIRST.recommendations)
    greeted = [(offer.label, offer.action) for offer in first_greeting(found).models]
    assert greeted[:2] == [
        ("ollama/tiny, here already (Ollama)", "model ollama/tiny"),
        ("other, here already (LM Studio)", "model other"),
    ]
    assert [action.partition(" ")[0] for _, action in greeted[2:]] == ["fetch", "fetch"]

    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        await until(pilot, lambda: "here already" in str(app.chat.query_one(Welcome).render()))
        await pilot.press("alt+5")
        await until(pilot, lambda: app.session.setup.model.name == "other")

    play(Stage(tmp_path, models=("guide", "other"), first_run=found), what)


def test_a_notice_of_the_load_hides_no_offer_of_a_first_run(tmp_path: Path) -> None:
    """A llama.cpp that crashes in its first load says so before anybody has asked."""
    external = (Model("other", "adopted", "LM Studio", tmp_path / "other.gguf"),)
    found = FirstRun("2 cores", external, FIRST.recommendations)

    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        welcome = app.chat.query_one(Welcome)
        await until(pilot, lambda: "here already" in str(welcome.render()))
        app.session.notice("it crashed: starting again in safe mode")
        await until(pilot, lambda: app.chat.transcript.display)
        assert welcome.display
        await pilot.press("alt+4")
        await until(pilot, lambda: app.session.setup.model.name == "other")
        await say(pilot, "hello")
        await until(pilot, lambda: not welcome.display)

    play(Stage(tmp_path, models=("guide", "other"), first_run=found), what)


@pytest.mark.parametrize("width", [80, 62, 40])
def test_the_usage_is_whole_where_there_is_room_for_more_rows(tmp_path: Path, width: int) -> None:
    async def what(pilot: Pilot[int]) -> None:
        welcome = app_of(pilot).chat.query_one(Welcome)
        await until(
            pilot, lambda: "F1 explains the keys." in " ".join(str(welcome.render()).split())
        )

    play(Stage(tmp_path, models=("other",)), what, width=width)


def test_no_row_of_the_greeting_begins_with_a_dot(tmp_path: Path) -> None:
    found = FirstRun("AMD EPYC 9R14, 2 cores · 25 GB of memory · no GPU", (), FIRST.recommendations)

    async def what(pilot: Pilot[int]) -> None:
        welcome = app_of(pilot).chat.query_one(Welcome)
        await until(pilot, lambda: "no GPU" in str(welcome.render()))
        shown = str(welcome.render())
        assert "25 GB of memory ·" in " ".join(shown.split())
        assert not any(row.strip().startswith("·") for row in shown.splitlines())

    play(Stage(tmp_path, models=("guide",), first_run=found), what, width=40, height=40)


def test_the_greeting_is_whole_on_a_narrow_screen(tmp_path: Path) -> None:
    async def what(pilot: Pilot[int]) -> None:
        await pilot.resize_terminal(36, 20)
        welcome = app_of(pilot).chat.query_one(Welcome)
        await until(
            pilot, lambda: welcome.size.width <= 36 and "talking to" in str(welcome.render())
        )
        assert "talking to the built-in guide." in " ".join(str(welcome.render()).split())
        await pilot.resize_terminal(36, 7)
        await until(pilot, lambda: welcome.size.height <= 5)
        assert "talking to the built-in gu…" in str(welcome.render()), "a cut sentence shows it"

    play(Stage(tmp_path, models=("guide",)), what)


def test_the_help_wraps_anew_in_a_window_of_another_width(tmp_path: Path) -> None:
    async def what(pilot: Pilot[int]) -> None:
        await pilot.press("f1")
        await until(pilot, lambda: pilot.app.screen.query("#help-lines"))
        text = pilot.app.screen.query_one("#help-text")
        lines = pilot.app.screen.query_one("#help-lines", Static)

        def longest() -> int:
            return max(map(cell_len, str(lines.content).split("\n")))

        whole = "stop the answer, clear the input; twice: quit"
        for width in (40, 80, 120, 80):
            await pilot.resize_terminal(width, 30)
            await until(pilot, lambda: width // 2 < longest() <= text.size.width < width)  # noqa: B023
            await until(pilot, lambda: (whole in str(lines.content)) == (width == 120))  # noqa: B023

    play(Stage(tmp_path), what, width=120)


@pytest.mark.parametrize("width", [40, 64, 100])
def test_the_help_keeps_its_words_whole_at_any_width(tmp_path: Path, width: int) -> None:
    async def what(pilot: Pilot[int]) -> None:
        await pilot.resize_terminal(width, 20)
        await pilot.press("f1")
        await until(pilot, lambda: pilot.app.screen.query("#help-lines"))
        await pilot.pause()
        lines = pilot.app.screen.query_one("#help-lines", Static)
        shown = str(lines.content)
        wide = [line for line in shown.split("\n") if cell_len(line) > lines.size.width]
        assert not wide
        told = " ".join(shown.split())
        assert all(command.about.split()[-1] in told for command in COMMANDS)
        assert all("EnterBegin" not in line for line in shown.split("\n")), "keys and words apart"

    play(Stage(tmp_path), what)


@pytest.mark.parametrize("seconds", [4e11, 1e20, -1e9])
def test_a_conversation_of_any_time_has_a_day(seconds: float) -> None:
    assert history_screen._day(seconds) in ("Today", "April 1938")


@pytest.mark.parametrize("key", ["f1", "f2", "f3", "f4", "ctrl+r", "ctrl+o", "slash"])
@pytest.mark.parametrize("size", [(10, 5), (5, 30), (1, 1)])
def test_a_window_of_a_few_cells_ends_nothing(
    tmp_path: Path, key: str, size: tuple[int, int]
) -> None:
    async def what(pilot: Pilot[int]) -> None:
        await say(pilot, "hello")
        await pilot.resize_terminal(*size)
        await pilot.press(key)
        await pilot.pause()
        await pilot.press("escape")
        await say(pilot, "again")

    play(Stage(tmp_path), what)
