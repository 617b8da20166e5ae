"""Parameter screen: values of this conversation."""

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from textual import work
from textual.content import Content

from localchat.config.parameters import PARAMETERS
from localchat.errors import LocalchatError
from localchat.tui.screens.setting_list import SettingList
from localchat.tui.setting_labels import LABELS, effective_words, setting_line

if TYPE_CHECKING:
    from localchat.session.session import ChatSession

_GROUPS = ("Sampling", "Answers", "Tools", "Memory", "Model")
"""Groups of parameters, in the order of the screen."""


def _keys(applies: str) -> list[str]:
    """Return the keys with this effect, in the order of the screen."""
    keys = [key for key, parameter in PARAMETERS.items() if parameter.applies == applies]
    return sorted(keys, key=lambda key: _GROUPS.index(LABELS[key].group))


_RELOADING = _keys("reload")
_IMMEDIATE = _keys("now")
_LOCAL_ONLY = (*_RELOADING, "speculation")
"""Parameters that a server decides by itself."""


class ParameterScreen(SettingList):
    """Lists the parameters in effect, and changes one for this conversation."""

    TITLE_TEXT = "Parameters"
    KEYS_TEXT = "Enter choose · Esc back"

    def __init__(self, session: "ChatSession") -> None:
        super().__init__()
        self._session = session
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
        if self._recommended and self.is_open:
            self.width_changed()

    def keys(self) -> Sequence[str]:
        # What changes without a reload is changed most often.
        keys = (*_IMMEDIATE, *_RELOADING)
        info = self._session.status.info
        if info is not None and info.backend == "remote":
            return [key for key in keys if key not in _LOCAL_ONLY]
        return keys

    def line(self, key: str) -> Content:
        session = self._session
        words = effective_words(key, session.setup.settings, session.status.info, self._recommended)
        return setting_line(key, words, "bold", self.line_cells)

    def about(self, id_: str) -> str:
        if id_ not in PARAMETERS:
            return ""
        text = f"{PARAMETERS[id_].help}.\n/set {id_} VALUE"
        if id_ in _RELOADING:
            text += "; reloads the model"
        return text

    def take(self, key: str, text: str) -> None:
        self.dismiss({key: text})
