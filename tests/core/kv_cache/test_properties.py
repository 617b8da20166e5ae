"""Random lives of the KV cache, beside a storage that refuses what a real cache would do wrongly."""

from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from localchat.backend_api.interface import Capabilities
from localchat.core.kv_cache import make_kv_cache_manager
from localchat.core.kv_cache.manager import KVCacheManager
from localchat.core.kv_cache.paged import PagedKVCacheManager
from localchat.core.kv_cache.paged_windows import WindowedKVCacheManager
from localchat.core.kv_cache.slots import SlotKVCacheManager
from tests.support.kv_cache_bench import Bench, capabilities, common

TOKEN = st.integers(0, 2)
SALT = st.sampled_from(["", "b"])


class Life(RuleBasedStateMachine):
    """Requests come, compute, draft, fork, are cut short, end; the pool is small."""

    def book_of(self, can: Capabilities, ram: int) -> KVCacheManager:
        raise NotImplementedError

    def capabilities_of(self, size: int) -> Capabilities:
        raise NotImplementedError

    @initialize(size=st.integers(2, 8), ram=st.sampled_from([0, 150, 10_000]))
    def begin(self, size: int, ram: int) -> None:
        can = self.capabilities_of(size * 6)
        self.bench = Bench(self.book_of(can, ram), can)
        self.texts: list[list[int]] = [[0]]

    def pick(self, number: int) -> int:
        running = sorted(self.bench.running)
        return running[number % len(running)]

    @rule(
        base=st.integers(0, 99),
        part=st.integers(0, 30),
        tail=st.lists(TOKEN, min_size=1, max_size=12),
        salt=SALT,
    )
    def arrive(self, base: int, part: int, tail: list[int], salt: str) -> None:
        tokens = self.texts[base % len(self.texts)][:part] + tail
        if self.bench.kv_cache.never_fits(len(tokens) + 1):
            return
        seq = self.bench.allocate(tokens, salt)
        assert seq is not None or self.bench.running, "nothing runs and there is no room"
        self.texts.append(tokens)

    @precondition(lambda self: self.bench.running)
    @rule(number=st.integers(0, 9), tokens=st.integers(1, 9), done=st.none() | st.integers(0, 9))
    def compute(self, number: int, tokens: int, done: int | None) -> None:
        seq = self.pick(number)
        it = self.bench.running[seq]
        if it.computed == len(it.known):
            it.known.append(number % 3)
        alone = len(self.bench.running) == 1
        fits = not self.bench.kv_cache.never_fits(it.computed + tokens)
        done = None if self.bench.can.rewind == "checkpoint" else done
        assert self.bench.compute(seq, tokens, done=done) or not alone or not fits

    @precondition(lambda self: self.bench.running and self.bench.can.rewind != "checkpoint")
    @rule(number=st.integers(0, 9), drafts=st.lists(TOKEN, max_size=4), accept=st.integers(0, 4))
    def verify(self, number: int, drafts: list[int], accept: int) -> None:
        seq = self.pick(number)
        it = self.bench.running[seq]
        if it.computed == len(it.known):
            it.known.append(number % 3)
        self.bench.compute(seq, drafts=drafts, accept=min(accept, len(drafts)))
        self.texts.append(list(it.known))

    @precondition(lambda self: self.bench.running)
    @rule(number=st.integers(0, 9))
    def fork(self, number: int) -> None:
        self.bench.fork(self.pick(number))

    @precondition(lambda self: self.bench.running)
    @rule(number=st.integers(0, 9))
    def checkpoint(self, number: int) -> None:
        self.bench.checkpoint(self.pick(number))

    @precondition(lambda self: self.bench.running)
    @rule(number=st.integers(0, 9), keep=st.sampled_from([True, True, False]))
    def release(self, number: int, keep: bool) -> None:
        self.bench.release(self.pick(number), keep=keep)

    @rule()
    def flush(self) -> None:
        self.bench.flush()

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        for seq in sorted(self.bench.running):
            self.bench.release(seq)
        self.bench.flush()
        assert self.bench.kv_cache.usage().live == 0
        for _ in range(self.bench.can.max_slots):
            assert self.bench.allocate([7]) is not None
        assert self.bench.allocate([7]) is None


class BlocksLife(Life):
    def capabilities_of(self, size: int) -> Capabilities:
        return capabilities(
            kv_tokens=size // 4 * 4 + 12, context_tokens=60, block_tokens=4, max_slots=3, depth=2
        )

    def book_of(self, can: Capabilities, ram: int) -> KVCacheManager:
        return PagedKVCacheManager(
            can.block_tokens, can.kv_tokens // 4, can.max_slots, "model", can.host_blocks
        )


class HostBlocksLife(BlocksLife):
    def capabilities_of(self, size: int) -> Capabilities:
        return replace(super().capabilities_of(size), host_blocks=size // 2)


class WindowsLife(BlocksLife):
    """Windows of 1 to 14 tokens; as many blocks as two windows and a step need, at least."""

    def capabilities_of(self, size: int) -> Capabilities:
        window = size % 14 + 1
        return replace(
            super().capabilities_of(size),
            window_tokens=window,
            window_blocks=2 * (window // 4 + 4) + size // 12,
        )

    def book_of(self, can: Capabilities, ram: int) -> KVCacheManager:
        return make_kv_cache_manager(can, "model", 0)

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "bench"):
            assert isinstance(self.bench.kv_cache, WindowedKVCacheManager)


class SlotsLife(Life):
    changes: dict[str, object]

    def capabilities_of(self, size: int) -> Capabilities:
        return capabilities(kv_tokens=size, max_slots=3, state_bytes=20, **self.changes)

    def book_of(self, can: Capabilities, ram: int) -> KVCacheManager:
        return SlotKVCacheManager(can, ram, min_swap_tokens=3)


KINDS: dict[str, dict[str, object]] = {
    "any": {},
    "sliding window": {"rewind": "last_n", "rewind_tokens": 6},
    "checkpoint": {"rewind": "checkpoint"},
}

SETTINGS = settings(
    max_examples=30,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


def test_paged_cache_keeps_every_sequence_and_leaks_no_block() -> None:
    run_state_machine_as_test(BlocksLife, settings=settings(SETTINGS, max_examples=60))


def test_paged_cache_with_blocks_in_host_memory_keeps_every_sequence_and_leaks_no_block() -> None:
    run_state_machine_as_test(HostBlocksLife, settings=settings(SETTINGS, max_examples=100))


def test_paged_cache_with_windows_keeps_what_they_see_and_leaks_no_block() -> None:
    run_state_machine_as_test(WindowsLife, settings=settings(SETTINGS, max_examples=100))


@pytest.mark.parametrize("kind", KINDS)
def test_slot_cache_keeps_every_sequence_and_leaks_no_cell(kind: str) -> None:
    life = type("KindOfLife", (SlotsLife,), {"changes": KINDS[kind]})
    run_state_machine_as_test(life, settings=SETTINGS)


@settings(max_examples=60, deadline=None)
@given(
    requests=st.lists(
        st.tuples(st.integers(0, 9), st.integers(0, 30), st.lists(TOKEN, min_size=1, max_size=12)),
        min_size=1,
        max_size=10,
    ),
    paged=st.booleans(),
)
def test_with_room_for_all_the_hit_is_the_longest_prefix_to_the_token(
    requests: list[tuple[int, int, list[int]]], paged: bool
) -> None:
    can = capabilities(kv_tokens=2000, context_tokens=2000, block_tokens=4 if paged else 0)
    kv_cache = (
        PagedKVCacheManager(4, 500, 4, "model")
        if paged
        else SlotKVCacheManager(can, 10**6, min_swap_tokens=1)
    )
    bench = Bench(kv_cache, can)
    texts: list[list[int]] = [[]]
    for base, part, tail in requests:
        tokens = texts[base % len(texts)][:part] + tail
        longest = max(common(text, tokens[:-1]) for text in texts)
        assert bench.find_prefix(tokens).cached == longest
        seq = bench.allocate(tokens)
        assert seq is not None
        assert bench.compute(seq)
        bench.release(seq)
        texts.append(tokens)
