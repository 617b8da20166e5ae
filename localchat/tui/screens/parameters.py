"""Parameter screen: values of this conversation, with the memory that each choice needs."""

import asyncio
from typing import TYPE_CHECKING

from textual import work
from textual.content import Content
from textual.widgets import Input

from localchat.config.parameters import PARAMETERS
from localchat.config.settings import Given, convert
from localchat.errors import LocalchatError
from localchat.tui.parameter_costs import Cost, parameter_costs
from localchat.tui.screens.list_dialog import ListDialog
from localchat.tui.setting_labels import LABELS, effective_words, matches, setting_line

if TYPE_CHECKING:
    from localchat.session.session import ChatSession

_GROUPS = ("Memory", "Sampling", "Answers", "Tools", "Model")
"""Groups of parameters, in the order of the screen."""


def _keys(applies: str) -> list[str]:
    """Return the keys with this effect, in the order of the screen."""
    keys = [key for key, parameter in PARAMETERS.items() if parameter.applies == applies]
    return sorted(keys, key=lambda key: _GROUPS.index(LABELS[key].group))


_RELOADING = _keys("reload")
_IMMEDIATE = _keys("now")
_LOCAL_ONLY = (*_RELOADING, "speculation")
"""Parameters that a server decides by itself."""


class ParameterScreen(ListDialog[dict[str, str]]):
    """Lists the parameters, then the values of the chosen one. Returns the change, by key."""

    TITLE_TEXT = "Parameters"
    KEYS_TEXT = "Enter choose · Esc back"

    def __init__(self, session: "ChatSession") -> None:
        super().__init__()
        self._session = session
        self._key: str | None = None
        self._costs: tuple[Cost, ...] = ()
        self._recommended: dict[str, float] = {}

    def on_mount(self) -> None:
        # Textual also calls `ListDialog.on_mount`, which fills the list.
        self._read_recommendation()

    @work
    async def _read_recommendation(self) -> None:
        """Show the sampling that is recommended for the model, once it is read."""
        from localchat.models.recommended_sampling import recommended_sampling

        context = self._session.context
        model = self._session.setup.model
        try:
            recommendation = await asyncio.to_thread(recommended_sampling, model, context.paths)
        except LocalchatError:
            return  # the list of models shows what is wrong with the catalogue
        self._recommended = recommendation.sampling
        if self._recommended and self._key is None and self.is_open:
            self.fill(self.query_one("#filter", Input).value)

    @property
    def _is_remote(self) -> bool:
        info = self._session.status.info
        return info is not None and info.backend == "remote"

    def fill(self, text: str) -> None:
        if self._key is not None:
            self._check(text)
            return
        keys = (*_RELOADING, *_IMMEDIATE)
        if self._is_remote:
            keys = tuple(key for key in keys if key not in _LOCAL_ONLY)
        shown = [key for key in keys if matches(key, text)]
        if not shown:
            self.show_nothing(f"no parameter matches {text}")
            return
        self.set_entries([(key, self._line(key)) for key in shown], keep=True)

    def width_changed(self) -> None:
        if self._key is None:
            self.fill(self.query_one("#filter", Input).value)

    def _line(self, key: str) -> Content:
        session = self._session
        words = effective_words(key, session.setup.settings, session.status.info, self._recommended)
        return setting_line(key, words, "bold", self.line_cells)

    def about(self, id_: str) -> str:
        if self._key is None:
            if id_ not in PARAMETERS:
                return ""
            text = f"{PARAMETERS[id_].help}.\n/set {id_} VALUE"
            if id_ in _RELOADING:
                text += "; reloads the model"
            return text
        cost = next((cost for cost in self._costs if cost.value == id_), None)
        if cost:
            return cost.words
        return f"It takes {PARAMETERS[self._key].valid}"

    # ------------------------------------------------------------------ one parameter

    def entry_chosen(self, id_: str) -> None:
        field = self.query_one("#filter", Input)
        if self._key is None:
            self._key = id_
            field.value = ""
            field.placeholder = f"{LABELS[id_].text}: {PARAMETERS[id_].valid}"
            self.set_entries([])
            self.show_about(f"It takes {PARAMETERS[id_].valid}")
            if id_ in _RELOADING:
                self._plan(id_)
            else:
                self._offer(_usual(id_))
            return
        self._apply(id_)

    def text_entered(self, text: str) -> None:
        if self._key is not None and text:
            self._apply(text)
        else:
            super().text_entered(text)

    def _apply(self, value: str) -> None:
        assert self._key is not None
        try:
            convert(self._key, Given(value, f"/set {self._key}"))
        except LocalchatError as problem:
            self.show_about(str(problem))
            return
        self.dismiss({self._key: value})

    def _check(self, text: str) -> None:
        if self._key is not None and text.strip():
            try:
                convert(self._key, Given(text.strip(), f"/set {self._key}"))
                self.show_about(f"Enter sets {self._key} to {text.strip()}")
            except LocalchatError as problem:
                self.show_about(problem.hint)

    @work(exclusive=True)
    async def _plan(self, key: str) -> None:
        self.show_about("planning the memory of each choice …")
        session = self._session
        try:
            costs = await asyncio.to_thread(parameter_costs, key, session.context, session.setup)
        except LocalchatError as problem:
            if self.is_open:
                self.show_about(str(problem))
            return
        if self._key == key and self.is_open:
            self._offer(costs)

    def _offer(self, costs: tuple[Cost, ...]) -> None:
        self._costs = costs
        rows = []
        for cost in costs:
            style = "$error"
            if cost.fits:
                style = "$foreground 70%"
            mark = " "
            if cost.is_current:
                mark = "●"
            rows.append(
                (
                    cost.value,
                    Content.assemble(
                        (f"{mark} ", "$accent"), f"{cost.value:<10} ", (cost.words, style)
                    ),
                )
            )
        self.set_entries(rows)
        if not rows and self._key is not None:
            self.show_about(f"It takes {PARAMETERS[self._key].valid}")

    def action_leave(self) -> None:
        if self._key is None:
            self.dismiss(None)
            return
        self._key = None
        field = self.query_one("#filter", Input)
        field.placeholder = self.FILTER_TEXT
        field.value = ""
        self.fill("")


_USUAL = {
    "temperature": (
        ("0", "always the most likely token"),
        ("0.7", "usual"),
        ("1.0", "more varied"),
    ),
    "think": (("auto", "model default"), ("on", "reason first"), ("off", "answer at once")),
    "speculation": (("true", "guess ahead; the text is the same"), ("false", "plain steps")),
    "top_p": (("0.9", ""), ("0.95", ""), ("1", "off")),
    "top_k": (("0", "off"), ("20", ""), ("40", "")),
    "min_p": (("0", "off"), ("0.05", ""), ("0.1", "")),
}


def _usual(key: str) -> tuple[Cost, ...]:
    """Return usual values of a parameter that needs no memory."""
    return tuple(
        Cost(value, words or "costs nothing, from the next answer on")
        for value, words in _USUAL.get(key, ())
    )
