"""Paged KV cache of a hybrid model: pages of its attention layers, and states of its recurrent layers.

Pages can be reused up to any token. A state can be reused only where it was saved: near the end of a prompt,
at intervals within a long prompt, and at the end of an answer. So a prefix hit ends at the longest saved state
whose pages are all cached. States are evicted least recently used first. While drafts are verified, the state
from before them counts as a saved one.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from localchat.backend_api.interface import Alias, Discard, MemoryOp, Restore, Save
from localchat.core.kv_cache.manager import CacheUpdate, KVUsage, PrefixHit, ValidTokens
from localchat.core.kv_cache.paged import ExtendedKVCacheManager, PagedKVCacheManager
from localchat.core.kv_cache.prefix_index import PrefixIndex
from localchat.core.kv_cache.token_prefix import TokenPrefix

MIN_STATE_TOKENS = 64
"""Fewer tokens take no longer than a step of one token."""
_NO_STATE = "this model cannot rewind, and no state was saved near that point"


class _SavedPrefixState(NamedTuple):
    salt: str
    prefix: TokenPrefix


@dataclass(slots=True, eq=False)
class _RunningState:
    """State in a running sequence's slot, and the saved copies of it."""

    salt: str
    prefix: TokenPrefix
    saved: int
    """Length of the longest saved prefix."""
    keys: list[int] = field(default_factory=list)
    """Keys of the saved states."""
    rewind_key: int = -1
    """Key of the state of `prefix` while drafts are verified. -1: none."""
    extended: int = 0
    """Upper limit of the tokens that launched steps may have computed."""


class _HybridPrefix(NamedTuple):
    pages: PrefixHit
    key: int
    """Key of the saved state. -1: none."""


class HybridKVCacheManager(ExtendedKVCacheManager):
    """See KVCacheManager."""

    def __init__(
        self,
        pages: PagedKVCacheManager,
        saved_states: int,
        *,
        min_state_tokens: int = MIN_STATE_TOKENS,
    ) -> None:
        """`saved_states`: limit of saved states. 0: prompts have no prefix hits.

        A state is saved if it has `min_state_tokens` more than the last one.
        """
        super().__init__(pages)
        self._min_tokens = min_state_tokens
        self._max_states = saved_states
        self._saved: OrderedDict[int, _SavedPrefixState] = OrderedDict()
        """States by key, least recently used first. Keys are never reused."""
        self._index = PrefixIndex()
        self._running: dict[int, _RunningState] = {}
        self._last_key = 0
        self._evictions = 0

    def find_prefix(self, tokens: Sequence[int], salt: str, exact_chunk: int = 0) -> PrefixHit:
        if exact_chunk:
            # States are saved within chunks, so a state never has the bits of a fresh computation.
            nothing = self._pages.find_prefix(tokens[:1], salt)
            return PrefixHit(0, _NO_STATE, _HybridPrefix(nothing, -1))
        all_pages = self._pages.find_prefix(tokens, salt)
        ids = np.asarray(tokens[: all_pages.cached], np.int32)
        for key in self._index.prefixes(salt, ids):
            length = len(self._saved[key].prefix)
            pages = self._pages.find_prefix(tokens[: length + 1], salt)
            if pages.cached == length:
                why = _NO_STATE
                if length == all_pages.cached:
                    why = all_pages.why_missed
                return PrefixHit(length, why, _HybridPrefix(pages, key))
        nothing = self._pages.find_prefix(tokens[:1], salt)
        why = _NO_STATE if all_pages.cached else all_pages.why_missed
        return PrefixHit(0, why, _HybridPrefix(nothing, -1))

    def allocate(
        self, seq: int, tokens: Sequence[int], hit: PrefixHit, salt: str, owner: str = ""
    ) -> CacheUpdate | None:
        assert isinstance(hit.source, _HybridPrefix)
        pages, key = hit.source
        update = self._pages.allocate(seq, tokens, pages, salt, owner)
        if update is None:
            return None
        ids = np.asarray(tokens[: hit.cached], np.int32)
        self._running[seq] = _RunningState(salt, TokenPrefix(ids), hit.cached)
        if key < 0:
            return update
        self._saved.move_to_end(key)
        restore = Restore(key, self._pages.slot(seq), hit.cached)
        return update._replace(memory=(*update.memory, restore))

    def extend(self, seq: int, tokens: int) -> CacheUpdate | None:
        update = self._pages.extend(seq, tokens)
        if update is not None:
            state = self._running[seq]
            state.extended = max(state.extended, tokens)
        return update

    def commit(self, seq: int, tokens: Sequence[int], valid: ValidTokens) -> CacheUpdate:
        state = self._running[seq]
        prefix = state.prefix
        held_key = state.rewind_key
        computed = valid.computed
        if held_key >= 0 and computed < state.extended:
            # The pages stay as they are, because the same tokens are written to them again.
            state.extended = len(prefix)
            back = Restore(held_key, self._pages.slot(seq), len(prefix))
            return CacheUpdate((back, *self._drop_held(state)), kept=len(prefix))
        update = self._pages.commit(seq, tokens, ValidTokens(computed))
        prefix.append(tokens[len(prefix) : computed])
        state.extended = computed
        return update._replace(memory=(*self._drop_held(state), *update.memory))

    def hold_state(self, seq: int) -> CacheUpdate | None:
        state = self._running[seq]
        if state.rewind_key >= 0:
            # The last step computed nothing, so the state is still held.
            return CacheUpdate()
        if not state.prefix or (room := self._room()) is None:
            return None
        self._last_key = state.rewind_key = self._last_key + 1
        return CacheUpdate((*room, Save(self._pages.slot(seq), state.rewind_key)))

    def _drop_held(self, state: _RunningState) -> tuple[MemoryOp, ...]:
        if state.rewind_key < 0:
            return ()
        key = state.rewind_key
        state.rewind_key = -1
        return (Discard(key),)

    def _room(self) -> tuple[MemoryOp, ...] | None:
        """Make room for one more state. None: all are held for drafts, and cannot be evicted."""
        held_states = sum(state.rewind_key >= 0 for state in self._running.values())
        if len(self._saved) + held_states < self._max_states:
            return ()
        if not self._saved:
            return None
        self._evictions += 1
        return (self._discard(next(iter(self._saved))),)

    def checkpoint(self, seq: int) -> CacheUpdate:
        state = self._running[seq]
        length = len(state.prefix)
        if not self._max_states or length < state.saved + self._min_tokens:
            return CacheUpdate()
        state.saved = length
        for key in self._index.prefixes(state.salt, state.prefix.ids)[:1]:
            if len(self._saved[key].prefix) == length:
                self._saved.move_to_end(key)
                return CacheUpdate()
        if (room := self._room()) is None:
            return CacheUpdate()
        self._last_key = key = self._last_key + 1
        state.keys.append(key)
        self._saved[key] = _SavedPrefixState(state.salt, state.prefix.head(length))
        self._index.add(state.salt, state.prefix.ids, key)
        return CacheUpdate((*room, Save(self._pages.slot(seq), key)))

    def _discard(self, key: int) -> Discard:
        saved = self._saved.pop(key)
        self._index.remove(saved.salt, saved.prefix.ids, key)
        return Discard(key)

    def fork(self, seq: int, child: int) -> CacheUpdate | None:
        update = self._pages.fork(seq, child)
        if update is None:
            return None
        state = self._running[seq]
        length = len(state.prefix)
        self._running[child] = _RunningState(state.salt, state.prefix.head(length), length)
        copy = Alias(self._pages.slot(seq), self._pages.slot(child), length)
        return update._replace(memory=(*update.memory, copy))

    def release(self, seq: int, *, keep: bool) -> CacheUpdate:
        state = self._running.pop(seq)
        update = self._pages.release(seq, keep=keep)
        discarded = [*self._drop_held(state)]
        if not keep:
            discarded += [self._discard(key) for key in state.keys if key in self._saved]
        return update._replace(memory=(*discarded, *update.memory))

    def usage(self) -> KVUsage:
        usage = super().usage()
        return usage._replace(evictions=usage.evictions + self._evictions)
