"""The paged KV cache of a hybrid: where states are found, what they are of, and which goes first."""

import random

import pytest

from localchat.backend_api.interface import Alias, Copy, Discard, Restore, Save
from localchat.core.kv_cache.manager import CacheUpdate, ValidTokens
from localchat.core.kv_cache.paged import PagedKVCacheManager
from localchat.core.kv_cache.paged_states import HybridKVCacheManager
from tests.support.cache_integrity import check

BLOCK = 4


class Driver:
    """Runs a manager with states that are the texts they were computed of."""

    def __init__(self, *, blocks: int = 40, slots: int = 4, states: int = 3) -> None:
        pages = PagedKVCacheManager(BLOCK, blocks, slots, "model")
        self.cache = HybridKVCacheManager(pages, states, min_state_tokens=2)
        self.states = states
        self.slots: dict[int, list[int]] = {}
        self.saved: dict[int, list[int]] = {}
        self.running: dict[int, list[int]] = {}
        self._next = 0

    def apply(self, update: CacheUpdate) -> None:
        for op in update.memory:
            match op:
                case Save(slot, key):
                    assert key not in self.saved
                    self.saved[key] = list(self.slots[slot])
                case Discard(key):
                    del self.saved[key]
                case Restore(key, slot, tokens):
                    self.slots[slot] = list(self.saved[key])
                    assert len(self.slots[slot]) == tokens
                case Alias(source, target, tokens):
                    self.slots[target] = list(self.slots[source])
                    assert len(self.slots[target]) == tokens
                case Copy():
                    pass
                case _:
                    raise AssertionError(op)
        assert len(self.saved) <= self.states
        check(self.cache)

    def begin(self, tokens: list[int], salt: str = "") -> int | None:
        """The number of a new sequence; its state is that of the prefix that was found."""
        hit = self.cache.find_prefix(tokens, salt)
        self._next += 1
        update = self.cache.allocate(self._next, tokens, hit, salt)
        if update is None:
            return None
        slot = self.cache.slot(self._next)
        self.slots[slot] = []
        self.apply(update)
        assert self.slots[slot] == tokens[: hit.cached]
        self.running[self._next] = list(tokens)
        return self._next

    def cached(self, tokens: list[int], salt: str = "") -> int:
        return self.cache.find_prefix(tokens, salt).cached

    def compute(self, seq: int, upto: int) -> bool:
        """Compute tokens, and commit them."""
        update = self.cache.extend(seq, upto)
        if update is None:
            return False
        self.apply(update)
        text, state = self.running[seq], self.slots[self.cache.slot(seq)]
        state.extend(text[len(state) : upto])
        self.apply(self.cache.commit(seq, text, ValidTokens(upto)))
        return True

    def draft(self, seq: int, drafted: int, accepted: int) -> bool:
        """Compute a token and some drafts, and commit it with the accepted ones. False: no room for them."""
        text, state = self.running[seq], self.slots[self.cache.slot(seq)]
        done = len(state)
        upto = done + 1 + drafted
        update = self.cache.extend(seq, upto)
        if update is None:
            return False
        self.apply(update)
        held = self.cache.hold_state(seq)
        if held is None:
            return False
        self.apply(held)
        assert (
            self.cache.extend(seq, done + 1) is not None
        )  # the scheduler asks for its own token again
        right = text[done : done + 1 + accepted]
        state.extend([*right, *[-1] * (upto - done - len(right))])
        committed = self.cache.commit(seq, text, ValidTokens(done + len(right)))
        self.apply(committed)
        assert committed.kept == (done if accepted < drafted else None)
        return True

    def save(self, seq: int) -> None:
        self.apply(self.cache.checkpoint(seq))

    def fork(self, seq: int) -> int | None:
        self._next += 1
        update = self.cache.fork(seq, self._next)
        if update is None:
            return None
        length = len(self.slots[self.cache.slot(seq)])
        self.running[self._next] = self.running[seq][:length]
        self.apply(update)
        return self._next

    def end(self, seq: int, *, keep: bool = True) -> None:
        del self.running[seq]
        self.apply(self.cache.release(seq, keep=keep))

    def run(self, tokens: list[int], *stops: int, salt: str = "") -> None:
        """One whole sequence, its state saved after each of `stops` tokens, and at its end."""
        seq = self.begin(tokens, salt)
        assert seq is not None
        for stop in stops:
            if stop > len(self.slots[self.cache.slot(seq)]):
                assert self.compute(seq, stop)
                self.save(seq)
        assert self.compute(seq, len(tokens))
        self.save(seq)
        self.end(seq)


TEXT = list(range(20))


def test_a_prompt_is_found_as_far_as_a_state_was_saved() -> None:
    driver = Driver()
    driver.run(TEXT, 9, 16)
    assert driver.cached(TEXT) == 16
    assert driver.cached([*TEXT, 50, 51]) == 20
    assert driver.cached([*TEXT[:12], 50, 51]) == 9
    hit = driver.cache.find_prefix([*TEXT[:8], 50], "")
    assert (hit.cached, "cannot rewind" in hit.why_missed) == (0, True)
    assert driver.cached(TEXT, "another salt") == 0
    driver.run([*TEXT, 50, 51])
    driver.run([*TEXT[:12], 60, 61])


def test_the_state_that_was_used_least_recently_goes_first() -> None:
    driver = Driver(states=2)
    texts = [[n * 100 + i for i in range(10)] for n in range(3)]
    driver.run(texts[0])
    driver.run(texts[1])
    driver.run([*texts[0], 7])  # uses the first one, and continues it by one token only
    driver.run(texts[2])
    longer = [[*text, 5] for text in texts]
    assert [driver.cached(text) for text in longer] == [10, 0, 10]
    assert driver.cache.usage().evictions >= 1


def test_a_state_without_its_pages_is_no_hit() -> None:
    driver = Driver(blocks=6, states=3)
    driver.run(TEXT)
    driver.run([n + 100 for n in range(20)])
    assert driver.cached([*TEXT, 1]) == 0
    driver.run(TEXT)
    assert driver.cached([*TEXT, 1]) == 20


def test_the_same_state_is_saved_once() -> None:
    driver = Driver()
    for _ in range(3):
        driver.run(TEXT, 10)
    assert sorted(map(len, driver.saved.values())) == [10, 20]


def test_nothing_of_a_spoilt_sequence_is_found() -> None:
    driver = Driver()
    driver.run(TEXT[:8])
    seq = driver.begin(TEXT)
    assert seq is not None
    assert driver.compute(seq, 14)
    driver.save(seq)
    driver.end(seq, keep=False)
    assert driver.cached(TEXT) == 8


def test_without_room_for_states_nothing_is_saved() -> None:
    driver = Driver(states=0)
    driver.run(TEXT, 10)
    assert not driver.saved
    assert driver.cached(TEXT) == 0


def test_a_rejected_draft_brings_back_the_state_from_before_it() -> None:
    driver = Driver()
    seq = driver.begin(TEXT)
    assert seq is not None
    assert driver.compute(seq, 8)
    for accepted, length in ((3, 12), (1, 12), (0, 12), (3, 16)):
        assert driver.draft(seq, 3, accepted)
        assert driver.slots[driver.cache.slot(seq)] == TEXT[:length]
        assert not driver.saved


def test_drafts_take_the_place_of_the_state_used_least_recently_and_wait_where_all_are_taken() -> (
    None
):
    driver = Driver(states=1)
    driver.run(TEXT[:9])
    seqs = [driver.begin([n + 50, *TEXT]) for n in range(2)]
    assert None not in seqs
    one, other = (seq for seq in seqs if seq is not None)
    assert driver.compute(one, 4)
    assert driver.compute(other, 4)
    driver.apply(driver.cache.extend(one, 6) or CacheUpdate())
    held = driver.cache.hold_state(one)
    assert held is not None
    driver.apply(held)
    assert not driver.cached(TEXT)
    assert driver.cache.hold_state(one) == CacheUpdate()  # as after a step that computed nothing
    assert driver.cache.hold_state(other) is None
    driver.save(other)
    driver.end(one, keep=False)
    assert not driver.saved
    assert driver.cache.hold_state(other) is not None


@pytest.mark.parametrize("seed", range(6))
def test_states_are_always_those_of_their_texts(seed: int) -> None:
    """Random sequences of a few tokens over few blocks: they share, fork, end, and are evicted."""
    draw = random.Random(seed)
    driver = Driver(blocks=12, slots=4, states=3)
    hits = 0
    for _ in range(600):
        seqs = list(driver.running)
        what = draw.random()
        if what < 0.3 or not seqs:
            tokens = [draw.randint(0, 1) for _ in range(draw.randint(1, 24))]
            hits += driver.cached(tokens) > 0
            driver.begin(tokens)
            continue
        seq = draw.choice(seqs)
        done = len(driver.slots[driver.cache.slot(seq)])
        if what < 0.6:
            driver.running[seq] += [draw.randint(0, 1) for _ in range(3)]
            driver.compute(seq, min(done + draw.randint(1, 6), len(driver.running[seq])))
        elif what < 0.7:
            drafted = draw.randint(1, 4)
            driver.running[seq] += [draw.randint(0, 1) for _ in range(5)]
            driver.draft(seq, drafted, draw.randint(0, drafted))
        elif what < 0.74:
            driver.save(seq)
        elif what < 0.8:
            driver.fork(seq)
        else:
            driver.end(seq, keep=draw.random() < 0.8)
    assert hits
