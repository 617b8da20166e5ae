"""Notices that are not about the current answer."""

from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

from localchat.notice_cause import notice_cause

NoticeKind: TypeAlias = Literal["info", "warning", "error"]


class Remark(NamedTuple):
    """A sentence of the program or of the engine."""

    sentence: str
    kind: NoticeKind
    passing: bool
    """Whether the remark is removed when the next answer begins."""


class Remarks:
    """Buffers remarks until an answer's first token, so that they appear below it."""

    def __init__(
        self, show: Callable[[str, NoticeKind], str], remove: Callable[[str], None]
    ) -> None:
        """`show` returns the id of its notice, for `remove`."""
        self._show = show
        self._remove = remove
        self._buffer: list[Remark] | None = None
        """Remarks that wait for the answer to begin. None shows them at once."""
        self._passing_ids: dict[str, str] = {}
        """Notices of passing remarks by cause. A newer remark replaces the older one."""

    def add(self, remark: Remark) -> None:
        """Show a remark, or buffer it until the answer begins."""
        if self._buffer is not None:
            # A note of a load arrives twice: as an event, and in the info of the engine.
            others = [other for other in self._buffer if other.sentence != remark.sentence]
            self._buffer = [*others, remark]
            return
        cause = notice_cause(remark.sentence)
        if cause in self._passing_ids:
            self._remove(self._passing_ids.pop(cause))
        id_ = self._show(remark.sentence, remark.kind)
        if remark.passing:
            self._passing_ids[cause] = id_

    def begin_answer(self) -> None:
        """Remove the passing remarks, and buffer new ones."""
        self._buffer = []
        for id_ in self._passing_ids.values():
            self._remove(id_)
        self._passing_ids.clear()

    def release(self) -> None:
        """Show the buffered remarks, and show new ones at once."""
        buffered = self._buffer or []
        self._buffer = None
        for remark in buffered:
            self.add(remark)
