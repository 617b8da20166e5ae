"""KVCacheManager: the bookkeeping of a KV cache, paged (paged.py) or of slots for llama.cpp (slots.py).

A method that changes something returns the memory operations for the *next* plan, in order, or None when
there is no room now (and then nothing has changed). A manager never calls a runner.

Operations must reach the runner in the order in which the methods returned them, all before the rows of the
next plan. `commit` and `release` may free blocks, so they are called when no launched step still writes to
them. A paged slot's block table is empty when its sequence enters; blocks only ever get appended to it
(`CacheUpdate.new_blocks`, the first time with the cached ones). Layers with a window may have a table of their
own, with `CacheUpdate.new_window_blocks`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from localchat.backend_api.interface import MemoryOp


class PrefixHit(NamedTuple):
    """A cached prefix of a prompt."""

    cached: int
    """Tokens that need no computation. The last token of a prompt is always computed."""
    why_missed: str = ""
    """Phrase that explains why less was found than possible."""
    source: object = None
    """Data of the manager."""
    swapped: int = 0
    """Cached tokens in host memory, which need room on the device. Paged caches only."""


class CacheUpdate(NamedTuple):
    """Result of a change: operations for the next plan, and blocks appended to the sequence's table."""

    memory: tuple[MemoryOp, ...] = ()
    new_blocks: tuple[int, ...] = ()
    new_window_blocks: tuple[int, ...] = ()
    kept: int | None = None
    """Tokens that the slot holds after `commit`, if it could not be truncated. That is 0 if a
    sliding window moved on, or the tokens before the drafts if a state was held. The sequence keeps its slot
    and must be computed again from there, or released."""


class ValidTokens(NamedTuple):
    """Tokens of a sequence whose KV is valid after a step."""

    computed: int
    """Number of leading tokens. Never fewer than before."""
    earliest: int = 0
    """Lowest position that the slot still holds."""
    ahead: int = 0
    """Tokens of the sequence in steps that were launched behind this one."""
    exact: int = 0
    """Leading tokens known to have the bits of a fresh computation."""


class KVUsage(NamedTuple):
    """Tokens of KV: live + cached + free = total (blocks round up)."""

    live: int
    shared: int
    """Part of `live` that several sequences hold."""
    cached: int
    swapped: int
    """In host RAM, outside the cache."""
    free: int
    total: int
    evictions: int
    """Prefixes lost so far."""


class KVCacheManager(ABC):
    """The KV cache of one loaded model. Used by a single thread."""

    @abstractmethod
    def find_prefix(self, tokens: Sequence[int], salt: str, exact_chunk: int = 0) -> PrefixHit:
        """Find the longest usable prefix under this salt. Changes nothing.

        `exact_chunk`: if not 0, use only KV with the bits of a fresh computation, and end the
        prefix at a multiple of this many tokens.
        """

    @abstractmethod
    def allocate(
        self, seq: int, tokens: Sequence[int], hit: PrefixHit, salt: str, owner: str = ""
    ) -> CacheUpdate | None:
        """Give `seq` a slot that holds the hit's prefix, with room for one more token.

        `owner`: conversation for which its KV may go to the disk; empty: it may not. `hit` comes from
        `find_prefix` on the same tokens, with no change in between.
        """

    @abstractmethod
    def slot(self, seq: int) -> int:
        """Return the slot of an allocated sequence."""

    @abstractmethod
    def extend(self, seq: int, tokens: int) -> CacheUpdate | None:
        """Make room for `tokens` tokens in all (drafts included)."""

    @abstractmethod
    def commit(self, seq: int, tokens: Sequence[int], valid: ValidTokens) -> CacheUpdate:
        """Record after a step which of `tokens` are valid.

        `tokens` are the known tokens of the sequence, possibly more. Only `tokens[before:computed]` is read,
        so the cost follows the step, not the length. Full blocks become findable; rejected drafts are
        truncated (slots) or will be overwritten (blocks, whose room stays).
        """

    def checkpoint(self, seq: int) -> CacheUpdate:
        """Save the state of a sequence.

        Called near the end of a prompt, at the end of an answer, and before a preemption.

        Only models that cannot rewind need it.
        """
        return CacheUpdate()

    def hold_state(self, seq: int) -> CacheUpdate | None:
        """Hold the committed state while drafts are verified, so that `commit` can return to it.

        None: no room, so no drafts. Only models that cannot rewind need it.
        """
        return CacheUpdate()

    @abstractmethod
    def fork(self, seq: int, child: int) -> CacheUpdate | None:
        """Give `child` all that `seq` has committed, and room for one more token."""

    @abstractmethod
    def release(self, seq: int, *, keep: bool) -> CacheUpdate:
        """End a sequence. `keep`: its KV stays as a reusable prefix."""

    def write_behind(self) -> tuple[MemoryOp, ...]:
        """Return the last operations of the next plan: copies to host memory that nothing waits for.

        Called once for each plan.
        """
        return ()

    @property
    def behind(self) -> bool:
        """Return whether `write_behind` has more for another plan."""
        return False

    @abstractmethod
    def usage(self) -> KVUsage:
        """Count the tokens of KV."""

    @abstractmethod
    def never_fits(self, tokens: int) -> bool:
        """Return whether a sequence of this length cannot run even alone."""
