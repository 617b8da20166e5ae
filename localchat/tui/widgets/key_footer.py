"""The footer: one row of the keys that are useful now."""

from typing import ClassVar, NamedTuple

from rich.cells import cell_len
from rich.segment import Segment
from textual.geometry import Region
from textual.strip import Strip

from localchat.tui.textual_internals.flat_widget import FlatWidget

_GAP = 2


class FooterKey(NamedTuple):
    """A key and its effect in one or two words."""

    key: str
    label: str
    rank: int = 0
    """Order of omission: a short row omits the highest rank first."""


def fit_keys(keys: tuple[FooterKey, ...], width: int) -> tuple[FooterKey, ...]:
    """Return the keys that fit into `width` cells."""
    kept = list(keys)
    while kept and sum(map(_cells, kept)) - _GAP > width:
        kept.remove(max(kept, key=lambda key: (key.rank, kept.index(key))))
    return tuple(kept)


def _cells(key: FooterKey) -> int:
    return cell_len(key.key) + 1 + cell_len(key.label) + _GAP


class KeyFooter(FlatWidget):
    """Draws one row of keys. Redraws only if the keys changed."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {"footer--key", "footer--word"}

    def __init__(self, *, id: str) -> None:  # noqa: A002 - textual's word
        super().__init__(id=id)
        self._keys: tuple[FooterKey, ...] = ()

    def show(self, keys: tuple[FooterKey, ...]) -> None:
        """Show these keys, as many as fit."""
        if keys != self._keys:
            self._keys = keys
            self.refresh(Region(0, 0, self.size.width, 1))

    def render_line(self, y: int) -> Strip:
        base = self.style_of("")
        width = self.size.width
        segments = [Segment(" ", base)]
        for key in fit_keys(self._keys, width - 2):
            segments += [
                Segment(key.key, self.style_of("footer--key")),
                Segment(f" {key.label}", self.style_of("footer--word")),
                Segment(" " * _GAP, base),
            ]
        return Strip(segments).adjust_cell_length(width, base)
