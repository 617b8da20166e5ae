"""The KV cache of a model whose layers see a window: what can be cut, and what only seems so."""

from localchat.backend_api.interface import Drop
from localchat.core.kv_cache.manager import ValidTokens
from tests.support.cache_integrity import check
from tests.support.slot_benches import TEN, bench, start


def test_a_prefix_outside_the_sliding_window_is_computed_again() -> None:
    b = bench(rewind="last_n", rewind_tokens=4)
    seq = b.allocate([*range(20)])
    assert seq is not None
    for _ in range(5):
        b.compute(seq, 4)
    b.release(seq)
    assert b.find_prefix([*range(20), 20]).cached == 20
    hit = b.find_prefix([*range(8), 90, 91])
    assert hit.cached == 0
    assert hit.why_missed == (
        "the text differs from token 9 on, and this model's sliding window has moved on"
    )
    assert b.find_prefix([*range(16), 90, 91]).cached == 16


def test_a_saved_window_continues_only_at_its_end() -> None:
    b = bench(rewind="last_n", rewind_tokens=4)
    b.release(start(b, TEN))
    b.release(start(b, [50, 51, 52, 53], salt="other"))
    assert b.find_prefix([*TEN, 90]).cached == 10
    hit = b.find_prefix([*TEN[:8], 90, 91])
    assert hit.cached == 0
    assert hit.why_missed.endswith("this model's sliding window has moved on")


def test_a_window_that_others_may_have_written_over_is_not_shared() -> None:
    b = bench(rewind="last_n", rewind_tokens=4)
    one, other = start(b, TEN), start(b, [50, 51, 52, 53], salt="other")
    b.compute(one, 0)
    assert b.find_prefix([*TEN[:8], 90]).cached == 8
    b.running[other].known.append(54)
    assert b.kv_cache.extend(other, 5) is not None
    b.compute(other)
    assert b.find_prefix([*TEN[:8], 90]).cached == 0


def test_a_truncation_outside_the_window_empties_the_slot() -> None:
    b = bench(rewind="last_n", rewind_tokens=4)
    seq = start(b, TEN)
    assert b.kv_cache.extend(seq, 14) is not None
    lost = b.kv_cache.commit(seq, [*TEN, 10], ValidTokens(11, earliest=8))
    assert lost.kept == 0
    assert lost.memory == (Drop(0),)
    assert b.kv_cache.usage().live == 0
    check(b.kv_cache)
    assert b.kv_cache.extend(seq, 11) is not None
