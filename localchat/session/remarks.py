"""Remarks that are not about the answer under way."""

from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

NoticeKind: TypeAlias = Literal["info", "warning", "error"]


class Remark(NamedTuple):
    """A sentence of the program or of the engine."""

    sentence: str
    kind: NoticeKind
    passing: bool
    """True of the moment only: it goes when the next answer begins."""


class Remarks:
    """Holds remarks back until the first words of an answer, so that they stand below it."""

    def __init__(
        self, show: Callable[[str, NoticeKind], str], remove: Callable[[str], None]
    ) -> None:
        """`show` returns the id of a notice, which `remove` takes."""
        self._show = show
        self._remove = remove
        self._waiting: list[Remark] | None = None
        self._passing_ids: list[str] = []

    def add(self, remark: Remark) -> None:
        """Show a remark, or hold it back during the wait for an answer."""
        if self._waiting is not None:
            self._waiting.append(remark)
            return
        id_ = self._show(remark.sentence, remark.kind)
        if remark.passing:
            self._passing_ids.append(id_)

    def begin_answer(self) -> None:
        """Remove the passing remarks, and hold new ones back."""
        self._waiting = []
        for id_ in self._passing_ids:
            self._remove(id_)
        self._passing_ids.clear()

    def release(self) -> None:
        """Show the remarks that waited, and the next ones at once."""
        waiting = self._waiting or []
        self._waiting = None
        for remark in waiting:
            self.add(remark)
