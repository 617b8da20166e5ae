"""Cells of a unified cache, counted by the slots that hold them. Shared prefixes count once.

A slot's cells form a path of *segments*. A segment is a range of cells with the set of slots that hold it.
Sharing a prefix splits at most one segment, so the cost of every operation depends on the few segments of a
path and not on the number of tokens.
"""


class _Segment:
    __slots__ = ("length", "slots")

    def __init__(self, length: int, slots: set[int]) -> None:
        self.length = length
        self.slots = slots


class Cells:
    """The cells of a cache. `free` of `total` belong to no slot."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.free = total
        self.shared = 0
        """Cells that more than one slot holds."""
        self._paths: dict[int, list[_Segment]] = {}
        self._counts: dict[int, int] = {}

    def used_by(self, slot: int) -> int:
        """Return the number of cells of a slot, shared ones included."""
        return self._counts.get(slot, 0)

    def extend(self, slot: int, tokens: int) -> None:
        """Give a slot `tokens` more cells of its own."""
        assert 0 <= tokens <= self.free, f"{tokens} cells requested, {self.free} free"
        if not tokens:
            return
        path = self._paths.setdefault(slot, [])
        if path and len(path[-1].slots) == 1:
            path[-1].length += tokens
        else:
            path.append(_Segment(tokens, {slot}))
        self._counts[slot] = self.used_by(slot) + tokens
        self.free -= tokens

    def share(self, src: int, dst: int, tokens: int) -> None:
        """Share the first `tokens` cells of `src` with the empty slot `dst`."""
        assert not self.used_by(dst), f"slot {dst} is not empty"
        assert 0 < tokens <= self.used_by(src), f"slot {src} holds fewer than {tokens} cells"
        path: list[_Segment] = []
        left = tokens
        for segment in list(self._paths[src]):
            if left < segment.length:
                self._split(segment, left)
            segment.slots.add(dst)
            if len(segment.slots) == 2:
                self.shared += segment.length
            path.append(segment)
            left -= segment.length
            if not left:
                break
        self._paths[dst] = path
        self._counts[dst] = tokens

    def truncate(self, slot: int, tokens: int) -> None:
        """Take all but the first `tokens` cells from a slot."""
        excess = self.used_by(slot) - tokens
        assert excess >= 0, f"slot {slot} holds fewer than {tokens} cells"
        path = self._paths.get(slot, [])
        while excess:
            last = path[-1]
            if excess < last.length:
                self._split(last, last.length - excess)
                continue
            path.pop()
            excess -= last.length
            last.slots.remove(slot)
            if not last.slots:
                self.free += last.length
            elif len(last.slots) == 1:
                self.shared -= last.length
        self._counts[slot] = tokens
        if not tokens:
            self._counts.pop(slot)
            self._paths.pop(slot, None)

    def _split(self, segment: _Segment, length: int) -> None:
        tail = _Segment(segment.length - length, set(segment.slots))
        segment.length = length
        for slot in segment.slots:
            path = self._paths[slot]
            path.insert(path.index(segment) + 1, tail)
