"""Each slash command once on the screen and once in the line mode."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from textual.pilot import Pilot

from localchat.cli.chat.repl import _LINE_HELP
from localchat.session.blocks import AnswerBlock, NoticeBlock
from localchat.session.commands import COMMANDS, LINE_COMMANDS
from localchat.tui.app import ChatApp
from localchat.tui.screens.help import HelpScreen
from localchat.tui.screens.history import HistoryScreen
from localchat.tui.screens.models import ModelScreen
from localchat.tui.screens.parameters import ParameterScreen
from localchat.tui.widgets.banner import Banner
from tests.support.line_mode import talk_by_lines
from tests.support.tui_stage import Stage, app_of, play, say, until

ANSWER = "Hello."


def notice(text: str) -> Callable[[ChatApp], bool]:
    """Return whether a notice of the transcript contains a text."""

    def is_shown(app: ChatApp) -> bool:
        blocks = app.chat.transcript.blocks
        return any(isinstance(block, NoticeBlock) and text in block.text for block in blocks)

    return is_shown


def hint(text: str) -> Callable[[ChatApp], bool]:
    """Return whether the banner shows a text."""
    return lambda app: text in str(app.chat.query_one(Banner).render())


def answers(count: int) -> Callable[[ChatApp], bool]:
    """Return whether the engine has answered so often."""

    def has_answered(app: ChatApp) -> bool:
        nodes = app.session.conversation.nodes.values()
        return count == sum(node.message.role == "assistant" for node in nodes)

    return has_answered


class Case(NamedTuple):
    """A command after one question and its answer."""

    arguments: str
    on_screen: Callable[[ChatApp], object]
    in_lines: str = "is a command of the screen"
    """What the line mode prints."""


CASES = {
    "model": Case("", lambda app: isinstance(app.screen, ModelScreen)),
    "new": Case("", lambda app: not app.session.conversation.nodes, "the conversation is empty"),
    "clear": Case("", lambda app: not app.session.conversation.nodes, "the conversation is empty"),
    "system": Case("Be brief.", hint("the instructions are set"), "the instructions are set"),
    "set": Case("", lambda app: isinstance(app.screen, ParameterScreen)),
    "think": Case("off", hint("reasoning: off")),
    "tools": Case("", notice("Tools are off."), "Tools are off."),
    "regen": Case("", answers(2), f"{ANSWER}\n{ANSWER}"),
    "edit": Case("", lambda app: app.chat.composer.text == "one"),
    "undo": Case(
        "",
        hint("back before the last question; 0 messages left"),
        "back before the last question; 0 messages left",
    ),
    "compact": Case("", notice("there is nothing to summarize"), "there is nothing to summarize"),
    "everything": Case("", notice("All messages are sent again."), "All messages are sent again."),
    "copy": Case("", hint("Copied last answer")),
    "export": Case("talk.md", notice("Written to "), "Written to "),
    "history": Case(
        "", lambda app: isinstance(app.screen, HistoryScreen), "--conversation ID continues one"
    ),
    "stats": Case("", notice("TTFT "), "TTFT "),
    "fit": Case("", notice("Fits: ")),
    "pull": Case("other", notice("cannot be downloaded: the setting offline is on")),
    "help": Case("", lambda app: isinstance(app.screen, HelpScreen), "/export [FILE]"),
    "quit": Case("", lambda app: app.return_code == 0, ANSWER),
    "send": Case("", notice("there is no command /send"), "there is no unsent question"),
}


@pytest.fixture
def _cwd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_every_command_has_a_case() -> None:
    assert CASES.keys() == {command.name for command in (*COMMANDS, *LINE_COMMANDS)}


@pytest.mark.usefixtures("_cwd")
@pytest.mark.parametrize("name", CASES)
def test_the_screen_runs_the_command(name: str, tmp_path: Path) -> None:
    case = CASES[name]

    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        await say(pilot, "one")
        assert isinstance(app.chat.transcript.blocks[-1], AnswerBlock)
        app.chat.run_command(f"/{name} {case.arguments}")
        await until(pilot, lambda: case.on_screen(app))

    play(Stage(tmp_path, changes={"offline": True}), what)


@pytest.mark.usefixtures("_cwd")
@pytest.mark.parametrize("name", CASES)
def test_the_line_mode_runs_the_command(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    talk = talk_by_lines(["one", f"/{name} {CASES[name].arguments}"], capfd)
    talk.history.close()
    assert CASES[name].in_lines in talk.shown


@pytest.mark.usefixtures("_cwd")
def test_the_line_mode_lists_its_commands(capfd: pytest.CaptureFixture[str]) -> None:
    talk = talk_by_lines(["/help"], capfd)
    talk.history.close()
    for command in LINE_COMMANDS:
        assert f"/{command.name} " in talk.shown
        assert _LINE_HELP.get(command.name, command.about) in talk.shown
