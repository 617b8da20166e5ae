"""Model screen: local models, models of other programs and the catalogue, each with its memory verdict."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import PurePath
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, TypeAlias

from textual import work
from textual.binding import BindingType
from textual.content import Content
from textual.css.query import NoMatches

from localchat.errors import LocalchatError
from localchat.sanitize import sanitize_line
from localchat.tui.file_completion import rank_names
from localchat.tui.keymap import bindings
from localchat.tui.screens.list_dialog import ListDialog
from localchat.units import size, tokens

if TYPE_CHECKING:
    from localchat.fit.load_options import LoadOptions
    from localchat.fit.memory_plan import MemoryPlan
    from localchat.models.catalog import CatalogEntry
    from localchat.session.context import ModelSetup, SessionContext


Kind: TypeAlias = Literal["here", "adopted", "catalogue", "unusable"]


class ModelChoice(NamedTuple):
    """The chosen model."""

    name: str
    pull: bool = False
    """True if the model must be downloaded first."""
    about: str = ""
    """Size and verdict of a model to download, for the confirmation."""


class ModelEntry(NamedTuple):
    """A line of the list."""

    name: str
    kind: Kind
    size_bytes: int
    about: str
    """Sentence about the model, or why it cannot run."""


class FitVerdict(NamedTuple):
    """Fit of a model, and the size of its files."""

    words: str
    size_bytes: int
    fits: bool | None = None
    """True if the model fits. None if unknown."""


_MARKS = {"here": "○", "adopted": "◆", "catalogue": "↓", "unusable": "✕"}
_NARROW = 70
"""Width of the window below which a line has no size."""
_MAX_NAME_CELLS = 40
_SECTIONS = {
    "recommended": "Recommended for this computer",
    "here": "On this computer",
    "adopted": "From other programs",
    "catalogue": "To download: they fit this computer",
    "too large": "Too large for this computer",
    "unusable": "Cannot be run",
}


class ModelScreen(ListDialog[ModelChoice]):
    """Shows the list at once, and adds the verdicts one by one.

    The marked model comes first. Models of the catalogue are planned from their published shape.
    """

    TITLE_TEXT = "Models"
    KEYS_TEXT = "Enter use or download · Esc back"
    BINDINGS: ClassVar[list[BindingType]] = [*bindings("models")]

    def __init__(
        self,
        context: "SessionContext",
        in_use: tuple[str, ...] = (),
        read_used: Callable[[], tuple[str, ...]] = tuple,
    ) -> None:
        """`in_use` names the model in use. `read_used` names models that were used, in a thread."""
        super().__init__()
        self._session_context = context
        self._read_used = read_used
        self._in_use = in_use
        self._models: dict[str, ModelEntry] = {}
        self._verdicts: dict[str, FitVerdict] = {}
        self._recommended: dict[str, str] = {}
        """Speed and download of the recommended models, by name."""
        self._filter = ""
        self._room = 0
        self._entered_early = False
        """True if Enter was pressed before the list was read. It takes the first match."""
        self.verdicts_complete = False

    def on_mount(self) -> None:
        self._load()

    def fill(self, text: str) -> None:
        self._filter = text
        mark = None
        if not text.strip():
            # Enter then leaves the model as it is.
            mark = next((name for name in self._in_use if name in self._models), None)
        self._refill(mark)

    def _refill(self, mark: str | None) -> None:
        names = rank_names(self._filter.strip(), tuple(self._models))
        entries = [self._models[name] for name in names]
        if not entries:
            if self._models:
                text = f"no model matches {sanitize_line(self._filter)}"
                if _is_address(self._filter):
                    text += "; Enter uses the model at this address"
                self.show_nothing(text)
            else:
                self.show_nothing("searching …")
            return
        rows: list[tuple[str, Content]] = []
        # A search has its own order, without sections.
        has_sections = not self._filter.strip()
        if has_sections:
            entries.sort(key=self._rank)
        last_section = ""
        for entry in entries:
            section = self._section(entry)
            if has_sections and section != last_section:
                rows.append(("", Content.styled(self._heading(section), "$primary")))
            last_section = section
            rows.append((entry.name, self._line(entry)))
        self.set_entries(rows, mark=mark)

    def _rank(self, entry: ModelEntry) -> tuple[int, int]:
        """Return the sort key of a model: its section, then the order of the recommendations."""
        section = list(_SECTIONS).index(self._section(entry))
        recommended = list(self._recommended)
        if entry.name in recommended:
            return section, recommended.index(entry.name)
        return section, len(recommended)

    def width_changed(self) -> None:
        self._refill(self.marked)

    def _heading(self, section: str) -> str:
        """Return the heading of a section, which claims nothing until all verdicts are known."""
        title = _SECTIONS[section]
        if len(self._verdicts) == len(self._models):
            return title
        return title.partition(":")[0]

    def _section(self, entry: ModelEntry) -> str:
        """Return the section of a model: by its verdict, or by its size before that."""
        if entry.kind != "catalogue":
            return entry.kind
        if entry.name in self._recommended:
            return "recommended"
        verdict = self._verdicts.get(entry.name)
        if verdict is not None and verdict.fits is not None:
            fits = verdict.fits
        else:
            fits = not self._room or int(entry.size_bytes * _WITH_CACHE) <= self._room
        if fits:
            return "catalogue"
        return "too large"

    def _line(self, entry: ModelEntry) -> Content:
        """Return the line of a model. The text below the list has its whole verdict."""
        verdict = self._verdicts.get(entry.name, FitVerdict("", entry.size_bytes))
        is_narrow = self.app.size.width < _NARROW
        mark = _MARKS[entry.kind]
        words = {True: "fits", False: "no room", None: ""}[verdict.fits]
        style = "$foreground 70%"
        if verdict.fits is False:
            style = "$error"
        if entry.kind == "catalogue" and entry.name in self._recommended:
            style = "$success"
            if not is_narrow:
                words = self._recommended[entry.name].partition(",")[0]
        if entry.name in self._in_use:
            mark = "●"
            words = "in use"
        file_size = ""
        if verdict.size_bytes and not is_narrow:
            file_size = size(verdict.size_bytes)
        if not is_narrow:
            file_size = f"{file_size:>8}"
        mark_style = "$accent"
        if entry.kind == "unusable":
            mark_style = "$error"
        width = min(_name_cells(self.app.size.width), self._longest_name)
        name = sanitize_line(_label(entry))
        if len(name) > width:
            name = f"{name[: width - 1]}…"
        return Content.assemble(
            (f"{mark} ", mark_style),
            f"{name:<{width}} ",
            (f"{file_size}  ", "$foreground 70%"),
            (words, style),
        )

    @property
    def _longest_name(self) -> int:
        return max((len(_label(entry)) for entry in self._models.values()), default=0)

    def about(self, id_: str) -> str:
        entry = self._models.get(id_)
        if entry is None:
            return ""
        verdict = self._verdicts.get(id_, FitVerdict("", 0))
        lines = (sanitize_line(entry.about), self._recommended.get(id_, ""), verdict.words)
        return "\n".join(filter(None, lines))

    def text_entered(self, text: str) -> None:
        self._entered_early = not self._models
        if self.marked is None and self._models and _is_address(text):
            self.dismiss(ModelChoice(text))
        else:
            super().text_entered(text)

    def entry_chosen(self, id_: str) -> None:
        entry = self._models[id_]
        if entry.kind == "unusable":
            self.show_about(f"{entry.name} cannot be run: {sanitize_line(entry.about)}")
            return
        self.dismiss(self._choice(entry, pull=entry.kind == "catalogue"))

    def _choice(self, entry: ModelEntry, *, pull: bool) -> ModelChoice:
        verdict = self._verdicts.get(entry.name, FitVerdict("", entry.size_bytes))
        parts = [sanitize_line(entry.about)]
        if verdict.size_bytes:
            parts.append(f"{size(verdict.size_bytes)} to download")
        parts.append(verdict.words)
        return ModelChoice(entry.name, pull, "\n".join(filter(None, parts)))

    def action_pull(self) -> None:
        entry = self._models.get(self.marked or "")
        if entry is not None:
            self.dismiss(self._choice(entry, pull=True))

    @work(exclusive=True)
    async def _load(self) -> None:
        try:
            used = (*self._in_use, *await asyncio.to_thread(self._read_used))
            entries = await asyncio.to_thread(_entries, self._session_context, used)
        except LocalchatError as problem:
            self.show_about(str(problem))
            return
        self._models = {entry.name: entry for entry in entries}
        with suppress(NoMatches):  # the screen may close meanwhile
            self.fill(typed := self.filter_input.value)
            if self._entered_early:
                self.text_entered(typed)
            self._room = room = await asyncio.to_thread(_room_bytes)
            await self._recommend()
            self._refill(self.marked)
            while (entry := self._next()) is not None:
                verdict = await asyncio.to_thread(_verdict, self._session_context, entry, room)
                self._verdicts[entry.name] = verdict
                self._show_verdict(entry)
            self._refill(self.marked)  # the verdicts may change the sections
            self.verdicts_complete = True

    async def _recommend(self) -> None:
        """Put the recommended models first, unless they are already on this computer."""
        try:
            recommendations = await asyncio.to_thread(self._session_context.recommended)
        except LocalchatError as problem:
            self.show_about(str(problem))
            return
        for recommendation in recommendations:
            entry = self._models.get(recommendation.entry)
            if entry is None or entry.kind != "catalogue":
                continue
            if recommendation.name != entry.name:
                # Another quantization than the usual one suits this machine.
                del self._models[entry.name]
                entry = entry._replace(
                    name=recommendation.name, size_bytes=recommendation.size_bytes
                )
                self._models[entry.name] = entry
            self._recommended[entry.name] = recommendation.summary

    def _show_verdict(self, entry: ModelEntry) -> None:
        """Redraw the line of a model, and its text below the list if marked."""
        if any(option.id == entry.name for option in self.entries.options):
            index = self.entries.get_option_index(entry.name)
            self.entries.replace_option_prompt_at_index(index, self._line(entry))
            if entry.name == self.marked and self.shows_entry:
                self.show_about()

    def _next(self) -> ModelEntry | None:
        """Return the next model without a verdict: the marked one, the shown ones, then others."""
        shown = (option.id for option in self.entries.options)
        for name in (self.marked, *shown, *self._models):
            entry = self._models.get(name or "")
            if entry is None or entry.kind == "unusable":
                continue
            if entry.name not in self._verdicts:
                return entry
        return None


def _is_address(text: str) -> bool:
    """Return True for the path of a model file, or the name of a repository."""
    return "/" in text or text.strip().lower().endswith(".gguf")


def _label(entry: ModelEntry) -> str:
    """Return the name of a model in the list: of a path, its last part."""
    if entry.name.startswith("/"):
        return PurePath(entry.name).name
    return entry.name


def _entries(context: "SessionContext", used_names: Sequence[str]) -> tuple[ModelEntry, ...]:
    """Return local models, then the models of the catalogue that are not local."""
    from localchat.models.catalog import read_catalog
    from localchat.models.index import read_index, used_by_path
    from localchat.models.info.inspect import inspect

    entries: list[ModelEntry] = []
    models = read_index(context.paths, context.environ).models
    for model in used_by_path(used_names, models):
        entries.append(ModelEntry(model.name, "here", model.size_bytes, model.name))
    for model in models:
        trouble = model.trouble or inspect(model).trouble
        about = trouble or model.origin
        kind: Kind = "here"
        if model.kind == "adopted":
            kind = "adopted"
        if trouble:
            kind = "unusable"
        entries.append(ModelEntry(model.name, kind, model.size_bytes, about))
    order = list(_SECTIONS)
    entries.sort(key=lambda entry: order.index(entry.kind))
    names = {entry.name for entry in entries}
    local = names | {name.rpartition("-")[0] for name in names}
    for name, published in read_catalog(context.paths).items():
        if name not in local:
            size_bytes = _published_bytes(published) or _estimate(published.parameters)
            entries.append(ModelEntry(name, "catalogue", size_bytes, published.about))
    return tuple(entries)


def _name_cells(cells: int) -> int:
    """Return the width of the names' column. The width of the list is that of dialog.tcss."""
    if cells < _NARROW:
        return min(_MAX_NAME_CELLS, max(1, cells - 16))
    return min(_MAX_NAME_CELLS, min(cells * 92 // 100, 100) - 33)


_BITS = 4.9
"""Bits per weight of Q4_K_M, the default of a pull, embeddings included."""
_WITH_CACHE = 1.15
"""Rough factor for a short context and buffers. After the download, the header has exact numbers."""


def _published_bytes(entry: "CatalogEntry") -> int:
    """Return the size of the default file by its published shape. 0 if unknown."""
    from localchat.models.names import parse
    from localchat.models.published_shapes import published_model

    model = published_model(parse(entry.name, {entry.name: entry}))
    if model is None:
        return 0
    return model.file_bytes


def _estimate(parameters: int) -> int:
    return int(parameters * _BITS / 8)


def _room_bytes() -> int:
    """Return the memory that a model may use now. Takes some tenths of a second."""
    from localchat.fit.hardware import read_machine
    from localchat.fit.memory_plan import spendable_gpu, spendable_ram

    machine = read_machine()
    return max(spendable_ram(machine), spendable_gpu(machine))


def _verdict(context: "SessionContext", entry: ModelEntry, room_bytes: int) -> FitVerdict:
    """Return the verdict of the planner that also decides at the load."""
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
    words = f"does not fit, about {size(need)}"
    if fits:
        words = f"fits, about {size(need)}"
    return FitVerdict(words, entry.size_bytes, fits)


def _usual_context(context: "SessionContext", setup: "ModelSetup") -> "LoadOptions":
    """Return the load with a usual context: the largest one makes a small model look large."""
    import msgspec

    from localchat.fit.report import USUAL_LENGTH

    load = setup.options.load
    if load.context_tokens is not None:
        return load
    trained = context.plan(setup, load).context_tokens
    return msgspec.structs.replace(load, context_tokens=min(USUAL_LENGTH, trained))


def _fits(plan: "MemoryPlan") -> bool:
    return plan.fits and not plan.missing


def _words(plan: "MemoryPlan") -> str:
    if plan.missing:
        return f"does not fit: {plan.missing}"
    words = f"{size(plan.total_bytes)} with {tokens(plan.context_tokens)}"
    if plan.fits:
        return f"fits: {words}"
    return f"does not fit: {words}"
