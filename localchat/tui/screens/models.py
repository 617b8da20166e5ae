"""Model screen: local models, models of other programs and the catalogue, each with its memory verdict."""

import asyncio
import os
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

from textual import work
from textual.binding import BindingType
from textual.content import Content
from textual.css.query import NoMatches
from textual.fuzzy import FuzzySearch
from textual.widgets import Input

from localchat.errors import LocalchatError
from localchat.sanitize import sanitize_line
from localchat.tui.keymap import bindings
from localchat.tui.screens.list_dialog import ListDialog
from localchat.units import rate, size, tokens

if TYPE_CHECKING:
    from localchat.fit.load_options import LoadOptions
    from localchat.fit.memory_plan import MemoryPlan
    from localchat.models.assess import ExpectedSpeed
    from localchat.models.catalog import CatalogEntry
    from localchat.session.context import ModelSetup, SessionContext
    from localchat.tui.screens.used_models import UsedModels


class ModelChoice(NamedTuple):
    """The chosen model."""

    name: str
    pull: bool = False
    """Whether it must be downloaded first."""
    about: str = ""
    """Size and verdict of a model to download."""


class ModelEntry(NamedTuple):
    """A line of the list."""

    name: str
    kind: Literal["here", "adopted", "catalogue", "unusable"]
    size_bytes: int
    about: str
    """A sentence about it, or why it cannot run."""


class FitVerdict(NamedTuple):
    """Whether a model fits, in words, and the size of its files."""

    words: str
    size_bytes: int
    fits: bool | None = None
    """None if it is not known."""
    speed: "ExpectedSpeed | None" = None
    """Measured or expected; None if it is not known."""


_NARROW = 60
_WITH_MEMORY = 80
_WITH_SPEED = 100
_WITH_WORDS = 120
"""Widths of the window from which a line says more than whether the model fits."""
_NAME_CELLS = 40
"""At most."""
_SECTIONS = {
    "recommended": "Recommended for this computer",
    "here": "On this computer",
    "adopted": "From other programs",
    "catalogue": "To download: they fit this computer",
    "too large": "Too large for this computer",
    "unusable": "Cannot be run",
}


class ModelScreen(ListDialog[ModelChoice]):
    """Shows the list at once; a thread adds the verdicts one by one, the marked model first.

    Models of the catalogue are planned from their published shape.
    """

    TITLE_TEXT = "Models"
    KEYS_TEXT = "Enter use or download · Esc back"
    BINDINGS: ClassVar[list[BindingType]] = [*bindings("models")]

    def __init__(
        self, context: "SessionContext", read_used: "Callable[[], UsedModels] | None" = None
    ) -> None:
        """`read_used`: tells which models were used, and which is in use. Called in a thread."""
        super().__init__()
        self._session_context = context
        self._read_used = read_used
        self._used: UsedModels | None = None
        self._models: dict[str, ModelEntry] = {}
        self._verdicts: dict[str, FitVerdict] = {}
        self._recommended: dict[str, str] = {}
        """Speed and download of the recommended models, by name."""
        self._filter = ""
        self._room = 0
        self._entered_early = False
        """Enter came before there were entries: the first of those that match is chosen then."""
        self.verdicts_complete = False

    def on_mount(self) -> None:
        self._load()

    def fill(self, text: str) -> None:
        self._filter = text
        self._refill(keep=False)

    def _refill(self, *, keep: bool = True) -> None:
        found = _matching(self._filter, tuple(self._models.values()))
        if not found:
            self.show_nothing(f"no model matches {self._filter}" if self._models else "searching …")
            return
        rows: list[tuple[str, Content]] = []
        sections = list(_SECTIONS)
        if not self._filter.strip():  # a search has its own order
            ranks = {name: rank for rank, name in enumerate(self._recommended)}
            found.sort(
                key=lambda entry: (
                    sections.index(self._section(entry)),
                    ranks.get(entry.name, len(ranks)),
                )
            )
        before = ""
        for entry in found:
            section = self._section(entry)
            if section != before and not self._filter.strip():
                rows.append(("", Content.styled(self._heading(section), "$primary")))
            before = section
            rows.append((entry.name, self._line(entry)))
        self.set_entries(rows, keep=keep)

    def width_changed(self) -> None:
        self._refill()

    def _heading(self, section: str) -> str:
        """The heading of a section, which promises nothing while models have no verdict yet."""
        title = _SECTIONS[section]
        if len(self._verdicts) == len(self._models):
            return title
        return title.partition(":")[0]

    def _section(self, entry: ModelEntry) -> str:
        """The section of a model: by its verdict, before that by its size."""
        if entry.kind != "catalogue":
            return entry.kind
        if entry.name in self._recommended:
            return "recommended"
        verdict = self._verdicts.get(entry.name)
        fits = verdict.fits if verdict is not None else None
        if fits is None:
            fits = not self._room or int(entry.size_bytes * _WITH_CACHE) <= self._room
        return "catalogue" if fits else "too large"

    def _line(self, entry: ModelEntry) -> Content:
        verdict = self._verdicts.get(entry.name, FitVerdict("", entry.size_bytes))
        style = "$error" if verdict.fits is False else "$foreground 70%"
        speed = self._speed_column(verdict)
        cells = self.app.size.width
        narrow = self.app.size.width < _NARROW
        width = _name_cells(cells, len(speed))
        name = sanitize_line(_label(entry))
        name = name if len(name) <= width else f"{name[: width - 1]}…"
        taken = f"{size(verdict.size_bytes) if verdict.size_bytes else '':>7} "
        words = verdict.words
        if cells < _WITH_WORDS:  # the whole verdict stands below the list
            words = words.replace("does not fit", "no room").replace(" tokens", " tok")
        if cells < _WITH_MEMORY:
            words = words.partition(":")[0].partition(",")[0]
        if entry.name in self._recommended and entry.kind == "catalogue":
            words = self._recommended[entry.name]
            speed = ""
            taken = ""
            style = "$success"
        used = self._used.words(entry.name) if self._used is not None else ""
        parts = [used, words]
        if narrow:
            parts = [used] if used == "in use" else [words]
        words = " · ".join(filter(None, parts))
        mark = {"here": "○", "adopted": "◆", "catalogue": "↓", "unusable": "✕"}[entry.kind]
        mark = "●" if used == "in use" else mark
        return Content.assemble(
            (f"{mark} ", "$accent" if entry.kind != "unusable" else "$error"),
            f"{name:<{width}}",
            (f" {'' if narrow else taken} ", "$foreground 70%"),
            (speed, "$accent"),
            (words, style),
        )

    def _speed_column(self, verdict: FitVerdict) -> str:
        """The speed in a column of its own; none in a narrow window, or where no speed is known."""
        speeds = (each.speed for each in self._verdicts.values() if each.fits)
        if self.app.size.width < _WITH_SPEED or not any(speeds):
            return ""
        speed = verdict.speed if verdict.fits else None
        if speed is None:
            return " " * 15
        mark = "" if speed.is_measured else "~"
        return f"{mark + rate(speed.tokens_per_s):>13}  "

    def about(self, id_: str) -> str:
        entry = self._models.get(id_)
        if entry is None:
            return ""
        verdict = self._verdicts.get(id_)
        words = f"\n{verdict.words}" if verdict is not None and verdict.words else ""
        if verdict is not None and verdict.fits and verdict.speed is not None:
            words += f", {verdict.speed.words}, {verdict.speed.basis}"
        return f"{sanitize_line(entry.about)}{words}"

    def text_entered(self, text: str) -> None:
        self._entered_early = not self._models
        super().text_entered(text)

    def entry_chosen(self, id_: str) -> None:
        entry = self._models[id_]
        if entry.kind == "unusable":
            self.show_about(f"{entry.name} cannot be run: {sanitize_line(entry.about)}")
            return
        self.dismiss(self._choice(entry, pull=entry.kind == "catalogue"))

    def _choice(self, entry: ModelEntry, *, pull: bool) -> ModelChoice:
        verdict = self._verdicts.get(entry.name, FitVerdict("", entry.size_bytes))
        fetched = f"{size(verdict.size_bytes)} to download" if verdict.size_bytes else ""
        parts = (sanitize_line(entry.about), fetched, verdict.words)
        return ModelChoice(entry.name, pull, "\n".join(filter(None, parts)))

    def action_pull(self) -> None:
        entry = self._models.get(self.marked or "")
        if entry is not None:
            self.dismiss(self._choice(entry, pull=True))

    @work(exclusive=True)
    async def _load(self) -> None:
        try:
            if self._read_used is not None:
                self._used = await asyncio.to_thread(self._read_used)
            entries = await asyncio.to_thread(_entries, self._session_context, self._used)
        except LocalchatError as problem:
            self.show_about(str(problem))
            return
        self._models = {entry.name: entry for entry in entries}
        with suppress(NoMatches):  # the screen may close meanwhile
            self.fill(typed := self.query_one("#filter", Input).value)
            if self._entered_early:
                self.text_entered(typed)
            self._room = room = await asyncio.to_thread(_room_bytes)
            await self._recommend()
            self._refill()
            while (entry := self._next(self._verdicts)) is not None:
                verdict = await asyncio.to_thread(_verdict, self._session_context, entry, room)
                self._verdicts[entry.name] = verdict
                self._show_verdict(entry)
            self._refill()  # into the sections that the verdicts say
            # Speeds come last: the first of them takes a benchmark.
            done = {name for name, verdict in self._verdicts.items() if not verdict.fits}
            while (entry := self._next(done)) is not None:
                done.add(entry.name)
                speed = await asyncio.to_thread(_speed, self._session_context, entry)
                if speed is not None:
                    self._add_speed(entry, speed)
            self.verdicts_complete = True

    async def _recommend(self) -> None:
        """Put the recommended models first, unless they are on this computer already."""
        try:
            recommendations = await asyncio.to_thread(self._session_context.recommended)
        except LocalchatError as problem:
            self.show_about(str(problem))
            return
        self._recommended = {
            recommendation.name: recommendation.summary
            for recommendation in recommendations
            if recommendation.name in self._models
        }

    def _add_speed(self, entry: ModelEntry, speed: "ExpectedSpeed") -> None:
        is_first = not any(each.speed for each in self._verdicts.values())
        self._verdicts[entry.name] = self._verdicts[entry.name]._replace(speed=speed)
        if is_first:
            self._refill()  # every line gets a column for it
        else:
            self._show_verdict(entry)

    def _show_verdict(self, entry: ModelEntry) -> None:
        """Draw the line of a model again, and the words below if it is the marked one."""
        if self._shows(entry.name):
            at = self.entries.get_option_index(entry.name)
            self.entries.replace_option_prompt_at_index(at, self._line(entry))
            if entry.name == self.marked and self.shows_entry:
                self.show_about()

    def _next(self, done: Container[str]) -> ModelEntry | None:
        """The next model that is not done: the marked one, then those that the filter shows, then others."""
        names = (
            self.marked or "",
            *(option.id or "" for option in self.entries.options),
            *self._models,
        )
        known = (self._models[name] for name in names if name in self._models)
        remaining = (one for one in known if one.kind != "unusable" and one.name not in done)
        return next(remaining, None)

    def _shows(self, name: str) -> bool:
        return any(option.id == name for option in self.entries.options)


def _label(entry: ModelEntry) -> str:
    """The name of a model in the list; of a path its last part."""
    if entry.name.startswith("/"):
        return PurePath(entry.name).name
    return entry.name


def _entries(context: "SessionContext", used: "UsedModels | None") -> tuple[ModelEntry, ...]:
    """Local models, then the models of the catalogue that are not local."""
    from localchat.models.catalog import read_catalog
    from localchat.models.index import read_index
    from localchat.models.info.inspect import inspect

    found: list[ModelEntry] = []
    models = read_index(context.paths, context.environ).models
    listed = {os.path.realpath(model.path) for model in models if model.path is not None}
    paths = [] if used is None else used.paths()
    for path in paths:
        if os.path.realpath(path) not in listed:
            found.append(ModelEntry(str(path), "here", _bytes_of(path), str(path)))
    for model in models:
        trouble = model.trouble or inspect(model).trouble
        kind = "unusable" if trouble else "adopted" if model.kind == "adopted" else "here"
        found.append(
            ModelEntry(model.name, kind, model.size_bytes, trouble or model.origin)  # type: ignore[arg-type]
        )
    order = list(_SECTIONS)
    found.sort(key=lambda entry: order.index(entry.kind))
    here = {entry.name.rpartition("-")[0] for entry in found} | {entry.name for entry in found}
    for name, entry in read_catalog(context.paths).items():
        if name not in here:
            size_bytes = _published_bytes(entry) or _estimate(entry.parameters)
            found.append(ModelEntry(name, "catalogue", size_bytes, entry.about))
    return tuple(found)


def _bytes_of(path: Path) -> int:
    """Size of a file; of a folder that of the files in it."""
    files = path.iterdir() if path.is_dir() else (path,)
    with suppress(OSError):
        return sum(file.stat().st_size for file in files)
    return 0


def _name_cells(cells: int, speed: int) -> int:
    """The column of names in a window of so many cells, beside a column of speeds. dialog.tcss has the width
    of the list; the rest of a line is a mark, the size of the file, and "no room" or the memory."""
    if cells < _NARROW:
        return cells - 16
    line = min(cells * 92 // 100, 100) - 7
    if cells < _WITH_MEMORY:
        return line - 19
    return min(_NAME_CELLS, line - (50 if cells >= _WITH_WORDS else 42) - speed)


_BITS = 4.9
"""Bits per weight of Q4_K_M, the default of a pull, embeddings included."""
_WITH_CACHE = 1.15
"""Rough factor for a short context and buffers; the header gives the exact numbers after the download."""


def _published_bytes(entry: "CatalogEntry") -> int:
    """Size of the default file by its published shape, the same as after the verdict; 0: unknown."""
    from localchat.models.names import parse
    from localchat.models.published_shapes import published_model

    model = published_model(parse(entry.name, {entry.name: entry}))
    return model.file_bytes if model is not None else 0


def _estimate(parameters: int) -> int:
    return int(parameters * _BITS / 8)


def _room_bytes() -> int:
    """Memory that a model may use now. Takes some tenths of a second."""
    from localchat.fit.hardware import read_machine
    from localchat.fit.memory_plan import spendable_gpu, spendable_ram

    machine = read_machine()
    return max(spendable_ram(machine), spendable_gpu(machine))


def _verdict(context: "SessionContext", entry: ModelEntry, room_bytes: int) -> FitVerdict:
    """The verdict of the planner that also decides at the load."""
    try:
        if entry.kind != "catalogue":
            setup = context.resolve(entry.name, {})
            plan = context.plan(setup, _usual_context(context, setup))
            return FitVerdict(_words(plan), entry.size_bytes, _fits(plan))
        estimate = context.estimate(entry.name)
    except LocalchatError as problem:
        return FitVerdict(problem.message, entry.size_bytes)
    if estimate is not None:
        plan = estimate.plan
        return FitVerdict(_words(plan), estimate.file_bytes, _fits(plan))
    # The shape is not published: estimate from the number of parameters.
    need = int(entry.size_bytes * _WITH_CACHE)
    fits = need <= room_bytes
    words = f"{'fits' if fits else 'does not fit'}, about {size(need)}"
    return FitVerdict(words, entry.size_bytes, fits)


def _usual_context(context: "SessionContext", setup: "ModelSetup") -> "LoadOptions":
    """The load with a usual context, as the largest one makes a small model look large."""
    import msgspec

    from localchat.fit.report import USUAL_LENGTH

    load = setup.options.load
    if load.context_tokens is not None:
        return load
    trained = context.plan(setup, load).context_tokens
    return msgspec.structs.replace(load, context_tokens=min(USUAL_LENGTH, trained))


def _speed(context: "SessionContext", entry: ModelEntry) -> "ExpectedSpeed | None":
    """The decode rate of a model that fits; None if it is not known. May take a second."""
    try:
        if entry.kind == "catalogue":
            return context.catalog_speed(entry.name)
        return context.speed(context.resolve(entry.name, {}))
    except LocalchatError:
        return None  # its verdict says what is wrong


def _fits(plan: "MemoryPlan") -> bool:
    return plan.fits and not plan.missing


def _words(plan: "MemoryPlan") -> str:
    if plan.missing:
        return f"does not fit: {plan.missing}"
    words = f"{tokens(plan.context_tokens)}, {size(plan.total_bytes)}"
    if plan.fits:
        return f"fits: {words}"
    return f"does not fit: {words}"


def _matching(text: str, entries: Sequence[ModelEntry]) -> list[ModelEntry]:
    if not text.strip():
        return list(entries)
    search = FuzzySearch(case_sensitive=False)
    scored = [(search.match(text, entry.name)[0], n, entry) for n, entry in enumerate(entries)]
    return [entry for score, _, entry in sorted(scored, key=lambda s: (-s[0], s[1])) if score > 0]
