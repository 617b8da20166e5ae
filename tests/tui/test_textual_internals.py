"""Private parts of Textual: each one exists, all uses stand in one folder, and what they draw is what Textual
draws."""

import ast
import importlib
import inspect
import random
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from textual._compositor import ChopsUpdate, Compositor
from textual.geometry import Region
from textual.pilot import Pilot
from textual.scrollbar import ScrollBar
from textual.widget import Widget

from localchat import tui
from localchat.engine.events import Event, Finished, MetricsSnapshot, Reasoning, Text, TokenLogprob
from localchat.session.answer_builder import joined
from localchat.session.blocks import AnswerBlock
from localchat.tui.screens.chat import ChatScreen
from localchat.tui.textual_internals.compositor import ChangedRegionsCompositor
from localchat.tui.transcript.widget import Transcript
from localchat.tui.widgets.status_bar import StatusBar
from tests.support.tui_stage import Stage, app_of, play, say, until

WIDTH, HEIGHT = 120, 30
TUI = Path(tui.__file__).parent
PRIVATE_NAMES = (
    "textual._ansi_sequences:ANSI_SEQUENCES_KEYS",
    "textual._compositor:ChopsUpdate.chops",
    "textual._compositor:ChopsUpdate.spans",
    "textual._compositor:ChopsUpdate.chop_ends",
    "textual._compositor:ChopsUpdate.render_segments",
    "textual._compositor:Compositor._dirty_regions",
    "textual._compositor:Compositor._get_renders",
    "textual._compositor:Compositor.render_partial_update",
    "textual._compositor:Compositor.visible_widgets",
    "textual.app:App._driver",
    "textual.driver:Driver._auto_restart",
    "textual.drivers.linux_driver:LinuxDriver._file",
    "textual.drivers.linux_driver:LinuxDriver._must_signal_resume",
    "textual.drivers.linux_driver:LinuxDriver._sigcont_application",
    "textual.drivers.linux_driver:LinuxDriver._writer_thread",
    "textual.drivers.linux_driver:LinuxDriver.exit_event",
    "textual.drivers.linux_driver:LinuxDriver.run_input_thread",
    "textual.drivers.linux_driver:XTermParser.feed",
    "textual.drivers.linux_driver:XTermParser.tick",
    "textual.drivers._writer_thread:WriterThread._queue",
    "textual.screen:Screen._compositor",
    "rich._unicode_data:load",
)
_OF_NAMED_TUPLES = {"_replace", "_fields", "_asdict", "_make"}
_IDLE_MOVES = re.compile(r"(\x1b\[\d+;\d+H)+(?=\x1b\[\d+;\d+H|\n|$)")


@pytest.mark.parametrize("where", PRIVATE_NAMES)
def test_a_private_name_that_is_used_exists(where: str) -> None:
    module, _, path = where.partition(":")
    owner: Any = importlib.import_module(module)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    sources = [inspect.getsource(each) for each in getattr(owner, "__mro__", ())[:-1]]
    assert hasattr(owner, name) or any(f"self.{name}" in source for source in sources), (
        f"{where} is gone: look at localchat/tui/textual_internals"
    )


def foreign_private_names(path: Path) -> Iterator[str]:
    """Private names in a module that belong to other objects than its own, and private modules of Textual."""
    tree = ast.parse(path.read_text("utf-8"))
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    own |= {node.name for node in ast.walk(tree) if isinstance(node, ast.AsyncFunctionDef)}
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                own.add(name)
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name) if re.match("_[a-z]", name):
                of_self = ast.unparse(node.value) in ("self", "cls", "super()") and name in own
                if not of_self and name not in _OF_NAMED_TUPLES:
                    yield f"{path.name}:{node.lineno} {ast.unparse(node)}"
            case ast.ImportFrom(module=str() as module):
                names = [module, *(f"{module}.{each.name}" for each in node.names)]
                if any(re.match(r"textual\b.*\._", each) for each in names):
                    yield f"{path.name}:{node.lineno} {module}"


def test_private_names_are_used_in_one_folder() -> None:
    modules = [path for path in TUI.rglob("*.py") if "textual_internals" not in path.parts]
    assert len(modules) > 30
    assert [name for path in modules for name in foreign_private_names(path)] == []


def drawn(screen: ChatScreen, regions: Iterable[Region], way: type[Compositor]) -> str:
    """The bytes of a drawing of these regions, without line ends, after which a place is named anyway; a cursor
    that is moved without a letter behind is left out."""
    compositor = screen._compositor
    compositor._dirty_regions = set(regions)
    update = way.render_partial_update(compositor)
    assert isinstance(update, ChopsUpdate)
    return _IDLE_MOVES.sub("", update.render_segments(screen.app.console).replace("\n", ""))


@pytest.mark.parametrize("keys", [(), ("ctrl+o",), ("ctrl+o", "/"), ("ctrl+f",)])
def test_a_change_is_drawn_as_textual_draws_it(tmp_path: Path, keys: tuple[str, ...]) -> None:
    async def what(pilot: Pilot[int]) -> None:
        await say(pilot, "a question\n\nin two parts")
        await pilot.press(*keys)
        await pilot.pause()
        screen, chance = app_of(pilot).chat, random.Random(7)
        assert isinstance(screen._compositor, ChangedRegionsCompositor)
        whole = [region for region, _ in screen._compositor.visible_widgets.values()]
        for _ in range(40):
            changed = {chance.choice(whole).intersection(Region(0, 0, WIDTH, HEIGHT))}
            for _ in range(chance.randrange(3)):
                x, y = chance.randrange(WIDTH), chance.randrange(HEIGHT)
                size = chance.randint(1, WIDTH - x), chance.randint(1, HEIGHT - y)
                changed.add(Region(x, y, *size))
            changed = {region for region in changed if region}
            if changed:
                ours = drawn(screen, changed, ChangedRegionsCompositor)
                assert ours == drawn(screen, changed, Compositor)

    play(Stage(tmp_path), what, WIDTH, HEIGHT)


def test_only_the_widgets_that_are_seen_where_it_changed_are_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def what(pilot: Pilot[int]) -> None:
        await say(pilot, "a question")
        screen = app_of(pilot).chat
        asked: list[tuple[str | None, int]] = []

        def noted(draw: Callable[[Any, Region], Any]) -> Callable[[Any, Region], Any]:
            def noting(self: Widget, crop: Region) -> Any:
                asked.append((self.id, crop.height))
                return draw(self, crop)

            return noting

        for kind in (Widget, Transcript, StatusBar):
            monkeypatch.setattr(kind, "render_lines", noted(kind.render_lines))
        drawn(screen, [screen.status.region], ChangedRegionsCompositor)
        assert asked == [("status", 1)]

    play(Stage(tmp_path), what, WIDTH, HEIGHT)


def test_a_text_that_grows_and_shrinks_is_drawn_where_it_differs_and_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def what(pilot: Pilot[int]) -> None:
        await say(pilot, "a question")
        view, chance = app_of(pilot).chat.transcript, random.Random(3)
        area = view.scrollable_content_region.size.region
        changed: list[Region] = []
        refresh = view.refresh

        def noting(*regions: Region, **kinds: bool) -> Any:
            changed.extend(regions or [area])
            return refresh(*regions, **kinds)

        def rows(part: Region) -> dict[int, str]:
            return {y: view.render_lines(area)[y].text for y in part.line_range}

        monkeypatch.setattr(view, "refresh", noting)
        text, picture, drawn_rows = "", rows(area), 0
        for number in range(60):
            if number % 12 == 11:  # a newer state of it, shorter than what stands there
                text = text[: len(text) // 3]
                view.put(AnswerBlock("new", text))
            else:
                piece = chance.choice(
                    ["word ", "\n\n", "- one\n- two\n", "```\ncode\n```\n", "x" * 90]
                )
                text += piece
                view.append_text("new", piece) if number else view.put(AnswerBlock("new", piece))
            await until(pilot, lambda: not view._changed_ids)
            for part in changed:
                assert part.right <= area.right, "the scroll bar is drawn by itself"
                picture |= rows(part)
                drawn_rows += part.height
            changed.clear()
            assert picture == rows(area)
        assert drawn_rows < 60 * area.height / 2

    play(Stage(tmp_path), what, WIDTH, HEIGHT)


def test_a_text_that_grows_is_laid_out_for_another_width_as_a_whole(tmp_path: Path) -> None:
    async def what(pilot: Pilot[int]) -> None:
        await say(pilot, "a question")
        view = app_of(pilot).chat.transcript
        parts = [f"{'many words ' * 20}\n\n- {'one ' * 30}\n\n" for _ in range(4)]
        view.show([AnswerBlock("new", parts[0])])
        for number, part in enumerate(parts[1:]):
            view.append_text("new", part)
            await until(pilot, lambda: not view._changed_ids)
            await pilot.resize_terminal(WIDTH - 30 * number, HEIGHT)
            await until(pilot, lambda: view.is_idle)
        grown = [row.text for row in view._block_layout.rows(0).rows]
        view.finish("new")
        assert grown == [row.text for row in view._block_layout.rows(0).rows]

    play(Stage(tmp_path), what, WIDTH, HEIGHT)


def test_the_scroll_bar_looks_as_textual_draws_it(tmp_path: Path) -> None:
    async def what(pilot: Pilot[int]) -> None:
        await say(pilot, "a question")
        view = app_of(pilot).chat.transcript
        view.show([AnswerBlock("long", "a line\n\n" * 90)])
        await until(pilot, lambda: view.is_idle)
        bar, whole = view.vertical_scrollbar, Region(0, 0, 1, view.size.height)
        assert whole.height > 10
        for position in (0, 7, 33.5, 120):
            bar.position = position
            textual = ScrollBar.render_lines(bar, whole)
            assert [list(strip) for strip in bar.render_lines(whole)] == [
                list(strip) for strip in textual
            ]
            bar._styles_cache.clear()

    play(Stage(tmp_path), what, WIDTH, HEIGHT)


def test_another_theme_gives_status_and_footer_other_colours(tmp_path: Path) -> None:
    async def what(pilot: Pilot[int]) -> None:
        await say(pilot, "a question")
        app = app_of(pilot)
        widgets: tuple[Widget, ...] = (app.chat.status, app.chat.query_one("#footer"))

        def looks() -> list[set[str]]:
            return [{str(part.style) for part in one.render_line(0)} for one in widgets]

        dark = looks()
        app.theme = "light"
        await pilot.pause()
        light = looks()
        assert all(one.isdisjoint(other) for one, other in zip(dark, light, strict=True))

    play(Stage(tmp_path), what, WIDTH, HEIGHT)


def test_pieces_of_one_text_are_joined_and_nothing_else_moves() -> None:
    figures = MetricsSnapshot(phase="decode")
    logprob = TokenLogprob(1, b"d", -1.0)
    events: list[Event] = [
        *(Reasoning(0, letter) for letter in "hm"),
        *(Text(0, letter) for letter in "abc"),
        figures,
        Text(0, "d", (logprob,)),
        Text(0, "e"),
        Text(1, "x"),
        Text(0, "f"),
        Finished(0, "stop"),
    ]
    assert list(joined(events)) == [
        Reasoning(0, "hm"),
        Text(0, "abc"),
        figures,
        Text(0, "de"),
        Text(1, "x"),
        Text(0, "f"),
        Finished(0, "stop"),
    ]
    assert list(joined([])) == []
