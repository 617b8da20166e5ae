"""What a bookkeeper of the KV cache answers. Two implement it: blocks.py (paged) and slots.py
(llama.cpp).

Every verb that changes something returns the memory operations for the *next* plan, in order, or
None when there is no room now (and then nothing has changed). A bookkeeper never talks to a runner.

Operations must reach the runner in the order in which the verbs gave them, all before the rows of
the next plan. A verb may free what it likes, so `settle` and `release` are called when no launched
step still writes to the part in question. A paged slot's block table begins empty when its sequence
enters; blocks only ever get appended to it (`CacheUpdate.new_blocks`, the first time with the cached
ones).
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from localchat.backend_api.interface import MemoryOp


class PrefixHit(NamedTuple):
    """A prefix found: `cached` tokens need no computing (never the whole prompt: the last token is
    always computed). `why_missed`: one phrase when less was found than could have been, else
    empty."""

    cached: int
    why_missed: str = ""
    source: object = None
    """For the bookkeeper alone."""


class CacheUpdate(NamedTuple):
    """Room was made: operations for the next plan, and the blocks appended to the sequence's table.

    `lost` (only from `settle`): what should have been cut cannot be (a sliding window moved on), so
    the slot was emptied; the sequence keeps its slot and must be computed again from position 0, or
    released."""

    memory: tuple[MemoryOp, ...] = ()
    new_blocks: tuple[int, ...] = ()
    lost: bool = False


class KVUsage(NamedTuple):
    """Tokens of KV. live + cached + free = total (blocks round up); shared is the part of live that
    several sequences hold; parked lies in RAM beside the cache. evictions: entries lost so far."""

    live: int
    shared: int
    cached: int
    swapped: int
    free: int
    total: int
    evictions: int


class KVCacheManager(Protocol):
    """The KV books of one loaded model. Single thread."""

    def find_prefix(self, tokens: Sequence[int], salt: str) -> PrefixHit:
        """The longest usable prefix under this salt. Changes nothing."""
        ...

    def allocate(
        self, seq: int, tokens: Sequence[int], hit: PrefixHit, salt: str
    ) -> CacheUpdate | None:
        """Give `seq` a slot with the hit's prefix in it, and room for one more token than that.
        `hit` comes from `match` on the same tokens with no verb between."""
        ...

    def slot(self, seq: int) -> int:
        """The slot of an admitted sequence."""
        ...

    def extend(self, seq: int, tokens: int) -> CacheUpdate | None:
        """Make room for `tokens` tokens in all (drafts included)."""
        ...

    def commit(
        self, seq: int, tokens: Sequence[int], computed: int, earliest: int = 0
    ) -> CacheUpdate:
        """After a step: the first `computed` of `tokens` (the known text of the sequence, which may
        be longer) are computed and valid; never fewer than before. Only `tokens[before:computed]`
        is read, so the cost follows the step, not the length. Full blocks are published; the rest
        (of rejected drafts) is cut (slots) or will be overwritten (blocks, whose spare room stays).
        `earliest`: lowest position the slot still holds."""
        ...

    def checkpoint(self, seq: int) -> CacheUpdate:
        """End of a prompt or an answer: models that cannot rewind save their state here; others
        nothing."""
        ...

    def fork(self, seq: int, child: int) -> CacheUpdate | None:
        """`child` begins with all that `seq` has settled, and room for one more token."""
        ...

    def release(self, seq: int, *, keep: bool) -> CacheUpdate:
        """The sequence ends; `keep`: its KV stays as a reusable prefix."""
        ...

    def usage(self) -> KVUsage: ...

    def never_fits(self, tokens: int) -> bool:
        """Whether a sequence of this length could not run even alone."""
        ...

    def check(self) -> None:
        """Integrity of the books: raises AssertionError naming what is off."""
        ...
