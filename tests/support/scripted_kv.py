"""Interpreter of memory operations over token ids, for the scripted runner and for tests.

Does what a plan says, and raises AssertionError for whatever a real cache would do wrongly in silence or die
of: a gap between positions, a write into cells that another slot reads, a truncation that a sliding window no
longer covers, more cells than there are.
"""

from array import array
from collections.abc import Sequence
from typing import Protocol

from localchat.backend_api.interface import (
    Alias,
    Capabilities,
    Copy,
    Discard,
    Drop,
    Import,
    LoadBlock,
    MemoryOp,
    Restore,
    Save,
    SaveBlock,
    StateRange,
    StepPlan,
    StepRow,
    Truncate,
)


class Storage(Protocol):
    """Cache contents of a runner between steps. Raises AssertionError on a plan that breaks a rule."""

    def begin(self, plan: StepPlan) -> None:
        """Apply a plan up to its rows: leave, memory operations in order, enter."""
        ...

    def write(self, row: StepRow, tokens: Sequence[int]) -> None:
        """Compute a row. tokens: the row's, LAST resolved, drafts included."""
        ...

    def skip(self, row: StepRow) -> None:
        """Register a row whose step computes nothing."""
        ...

    def held(self, slot: int) -> list[int]:
        """Tokens that a slot holds, rejected drafts included until they are truncated or overwritten."""
        ...

    def earliest(self, slot: int) -> int:
        """Lowest position that a slot still holds."""
        ...


def storage_for(capabilities: Capabilities) -> Storage:
    """A storage with the rules of these capabilities."""
    return (BlockStorage if capabilities.block_tokens else SlotStorage)(capabilities)


# ---------------------------------------------------------------------------- one unified cache


class _Cell:
    __slots__ = ("slots", "token")

    def __init__(self, token: int) -> None:
        self.token = token
        self.slots = 0


class _Slot:
    __slots__ = ("cells", "earliest")

    def __init__(self) -> None:
        self.cells: list[_Cell] = []
        self.earliest = 0


class SlotStorage:
    """Slots over shared cells, as llama.cpp's unified cache.

    A sliding window moves in strides of its own width, so that some truncations are still possible and others
    not; a write moves those of all slots. A saved state has its window alone.
    """

    def __init__(self, capabilities: Capabilities) -> None:
        self._can = capabilities
        self._slots = [_Slot() for _ in range(capabilities.max_slots)]
        self._saved: dict[int, tuple[tuple[int, ...], int]] = {}
        self.used = 0
        self.behind_short = False
        """A step in flight came back short: slots may have fewer tokens than a truncation leaves."""

    def begin(self, plan: StepPlan) -> None:
        for op in plan.memory:
            self.apply(op)
        for enter in plan.enter:
            if enter.slot < 0:
                continue
            known = self.held(enter.slot)
            assert tuple(known) == enter.tokens[: len(known)], f"slot {enter.slot} has another text"

    def apply(self, op: MemoryOp) -> None:
        """Execute one operation."""
        match op:
            case Alias(src, dst, tokens):
                self._check_truncation(self._slots[src], tokens)
                self._fill(dst, self._slots[src].cells[:tokens], self._slots[src].earliest)
            case Truncate(slot, tokens):
                assert self._can.rewind != "checkpoint", "this model cannot rewind"
                if tokens < len(self._slots[slot].cells) or not self.behind_short:
                    self._check_truncation(self._slots[slot], tokens)
                    self._truncate(slot, tokens)
            case Drop(slot):
                self._truncate(slot, 0)
                self._slots[slot].earliest = 0
            case Save(slot, key):
                assert key not in self._saved, f"key {key} is taken"
                assert self._slots[slot].cells, f"slot {slot} is empty"
                text = self.held(slot)
                earliest = self._slots[slot].earliest
                if self._can.rewind == "last_n":
                    earliest = max(earliest, len(text) - self._can.rewind_tokens)
                self._saved[key] = (tuple(text), earliest)
            case Restore(key, slot, tokens):
                saved, earliest = self._saved[key]
                self._fill(slot, [_Cell(token) for token in saved], earliest)
                self._check_truncation(self._slots[slot], tokens)
                self._truncate(slot, tokens)
            case Discard(key):
                del self._saved[key]
            case Import(key, ranges):
                assert key not in self._saved, f"key {key} is taken"
                self._saved[key] = _imported(ranges)
            case Copy() | SaveBlock() | LoadBlock():
                raise AssertionError("a unified cache has no blocks to copy")

    def _check_truncation(self, slot: _Slot, tokens: int) -> None:
        length = len(slot.cells)
        assert 0 < tokens <= length, f"{tokens} of {length} tokens wanted"
        if tokens == length or self._can.rewind == "any":
            return
        assert self._can.rewind == "last_n", "this model cannot rewind"
        self._check_window(slot, tokens)

    def _check_window(self, slot: _Slot, start: int) -> None:
        if self._can.rewind == "last_n":
            first = max(0, start - self._can.rewind_tokens)
            assert slot.earliest <= first, f"the window moved on to {slot.earliest}: {first} wanted"

    def _fill(self, slot: int, cells: list[_Cell], earliest: int) -> None:
        assert not self._slots[slot].cells, f"slot {slot} is not empty"
        self._add(slot, cells)
        self._slots[slot].earliest = earliest

    def _add(self, slot: int, cells: list[_Cell]) -> None:
        for cell in cells:
            self.used += not cell.slots
            cell.slots += 1
        assert self.used <= self._can.kv_tokens, f"{self.used} cells of {self._can.kv_tokens}"
        self._slots[slot].cells.extend(cells)

    def _truncate(self, slot: int, tokens: int) -> None:
        cells = self._slots[slot].cells
        for cell in cells[tokens:]:
            cell.slots -= 1
            self.used -= not cell.slots
        del cells[tokens:]

    def write(self, row: StepRow, tokens: Sequence[int]) -> None:
        slot = self._slots[row.slot]
        assert row.start == len(slot.cells), f"slot {row.slot}: gap or overlap at {row.start}"
        assert not row.new_blocks, "a unified cache has no blocks"
        self._check_window(slot, row.start)
        self._add(row.slot, [_Cell(token) for token in tokens])
        if self._can.rewind == "last_n":
            self._move(slot, row.start)
            for other in self._slots:
                if other is not slot and all(cell.slots == 1 for cell in other.cells):
                    self._move(other, len(other.cells))

    def _move(self, slot: _Slot, start: int) -> None:
        gone = max(0, start - self._can.rewind_tokens)
        slot.earliest = max(slot.earliest, gone - gone % max(1, self._can.rewind_tokens))

    def skip(self, row: StepRow) -> None:
        """Nothing to register."""

    def held(self, slot: int) -> list[int]:
        return [cell.token for cell in self._slots[slot].cells]

    def earliest(self, slot: int) -> int:
        return self._slots[slot].earliest

    def export_slot(self, slot: int, start: int, end: int) -> memoryview:
        """The tokens of a range, after the lowest position held."""
        return _exported(self.held(slot), self._slots[slot].earliest, start, end)

    def export_saved(self, key: int, start: int, end: int) -> memoryview | None:
        """The same of a saved state. None: the cache has no room to load it."""
        text, earliest = self._saved[key]
        if self.used + len(text) > self._can.kv_tokens:
            return None
        return _exported(text, earliest, start, end)

    def saved(self) -> dict[int, int]:
        """Tokens saved under each key."""
        return {key: len(text) for key, (text, _) in self._saved.items()}


def _exported(text: Sequence[int], earliest: int, start: int, end: int) -> memoryview:
    assert 0 <= start < end <= len(text), f"{start} to {end} of {len(text)} tokens"
    return memoryview(array("q", [earliest, *text[start:end]]).tobytes())


def _imported(ranges: Sequence[StateRange]) -> tuple[tuple[int, ...], int]:
    text: list[int] = []
    earliest = 0
    for one in ranges:
        earliest, *tokens = array("q", bytes(one.data))
        assert (one.start, one.end) == (len(text), len(text) + len(tokens)), "a gap between ranges"
        text += tokens
    return tuple(text), earliest


# ---------------------------------------------------------------------------- a paged cache


class _Table:
    __slots__ = ("blocks", "length", "window_blocks")

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self.window_blocks: list[int] = []
        self.length = 0


_UNWRITTEN = -1


class _WindowStorage:
    """Blocks of windowed layers, whose KV depends on all tokens of a text so far.

    An entry of a block table that is no longer seen may name any block, one of another sequence too.
    """

    def __init__(self, capabilities: Capabilities) -> None:
        self._size = capabilities.block_tokens
        self._window = capabilities.window_tokens
        self._blocks = [[_UNWRITTEN] * self._size for _ in range(capabilities.window_blocks)]

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Copy the beginning of a block."""
        assert source != target, "a copy onto itself"
        self._blocks[target][:tokens] = self._blocks[source][:tokens]

    def write(self, table: Sequence[int], text: Sequence[int], start: int) -> None:
        """Compute the tokens of a text from `start` on, which see those before them."""
        state = 0
        for position, token in enumerate(text):
            state = hash((state, token))
            block = self._blocks[table[position // self._size]]
            at = position % self._size
            if position >= start:
                block[at] = state
            elif position > start - self._window:
                assert block[at] == state, f"position {position} was given back, {start} sees it"


class BlockStorage:
    """Blocks and block tables, as the CUDA runner's cache.

    A sequence that left may no longer be read, so its blocks may be written by others from that plan on.
    """

    def __init__(self, capabilities: Capabilities) -> None:
        size = self._size = capabilities.block_tokens
        self._blocks = [[_UNWRITTEN] * size for _ in range(capabilities.kv_tokens // size)]
        self._host = [array("q", [_UNWRITTEN] * size) for _ in range(capabilities.host_blocks)]
        self._windows = _WindowStorage(capabilities) if capabilities.window_blocks else None
        self._readers = [0] * len(self._blocks)
        self._tables = [_Table() for _ in range(capabilities.max_slots)]
        self._slot_of: dict[int, int] = {}

    def begin(self, plan: StepPlan) -> None:
        for seq in plan.leave:
            slot = self._slot_of.pop(seq)
            if slot >= 0:
                self._close(slot)
        for op in plan.memory:
            self.apply(op)
        for enter in plan.enter:
            taken = enter.slot >= 0 and enter.slot in self._slot_of.values()
            assert not taken, f"slot {enter.slot} is taken"
            assert enter.seq not in self._slot_of, f"sequence {enter.seq} enters twice"
            self._slot_of[enter.seq] = enter.slot

    def apply(self, op: MemoryOp) -> None:
        """Execute one operation of a paged cache."""
        match op:
            case Copy(source, target, tokens, window=True):
                assert self._windows is not None, "no layer has a window"
                self._windows.copy(source, target, tokens)
            case Copy(source, target, tokens):
                assert 0 < tokens <= self._size
                assert source != target, "a copy onto itself"
                text = self._blocks[source][:tokens]
                assert _UNWRITTEN not in text, f"block {source} holds fewer than {tokens} tokens"
                self._fill(target, text)
            case SaveBlock(block, number):
                text = self._blocks[block]
                assert _UNWRITTEN not in text, f"block {block} is not full"
                self._host[number][:] = array("q", text)
            case LoadBlock(number, block):
                self._fill(block, list(self._host[number]))
            case _:
                raise AssertionError(f"a paged cache cannot {op}")

    def _fill(self, block: int, text: list[int]) -> None:
        assert _UNWRITTEN not in text, f"a copy of more than there is to block {block}"
        assert not self._readers[block], f"block {block} is read by a slot"
        self._blocks[block] = text + [_UNWRITTEN] * (self._size - len(text))

    def host_block(self, number: int) -> memoryview:
        """The bytes of a host block."""
        return memoryview(self._host[number]).cast("B")

    def _close(self, slot: int) -> None:
        for block in self._tables[slot].blocks:
            self._readers[block] -= 1
        self._tables[slot] = _Table()

    def write(self, row: StepRow, tokens: Sequence[int]) -> None:
        table = self._tables[row.slot]
        self.skip(row)
        end = row.start + len(tokens)
        assert end <= len(table.blocks) * self._size, f"slot {row.slot}: no block at {end}"
        for position, token in enumerate(tokens, row.start):
            block = table.blocks[position // self._size]
            assert self._readers[block] == 1, f"block {block} is read by another slot too"
            self._blocks[block][position % self._size] = token
        table.length = end
        text = self.held(row.slot)
        assert _UNWRITTEN not in text, f"slot {row.slot}: gap before {row.start}"
        if self._windows is not None:
            self._windows.write(table.window_blocks, text, row.start)

    def skip(self, row: StepRow) -> None:
        """Extend the block table: the KV cache manager does not send the blocks again."""
        assert self._slot_of.get(row.seq) == row.slot, f"sequence {row.seq} is not in this slot"
        table = self._tables[row.slot]
        for block in row.new_blocks:
            assert block not in table.blocks, f"block {block} twice in a table"
            self._readers[block] += 1
            table.blocks.append(block)
        table.window_blocks += row.new_window_blocks

    def held(self, slot: int) -> list[int]:
        table = self._tables[slot]
        text = [token for block in table.blocks for token in self._blocks[block]]
        return text[: table.length]

    def earliest(self, slot: int) -> int:
        return 0
