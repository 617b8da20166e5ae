"""Saved prefixes are found by their tokens, compared with a search through all of them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from localchat.core.kv_cache.manager import ValidTokens
from localchat.core.kv_cache.prefix_index import PrefixIndex
from localchat.core.kv_cache.slots import SlotKVCacheManager
from localchat.core.kv_cache.token_prefix import Ids, TokenPrefix
from tests.support.kv_cache_bench import capabilities, common

# Ids whose bytes order otherwise than their numbers, and that share bytes with each other.
TEXTS = st.lists(st.sampled_from([1, 2, 256, 258, 65_537]), max_size=6)


@given(saved=st.lists(TEXTS, max_size=12), removed=st.integers(0, 11), asked=TEXTS)
def test_the_index_finds_what_a_search_through_all_finds(
    saved: list[list[int]], removed: int, asked: list[int]
) -> None:
    index = PrefixIndex()
    arrays = [np.array(text, np.int32) for text in saved]
    for key, ids in enumerate(arrays):
        index.add("", ids, key)
        index.add("other", ids, 100 + key)
    left = dict(enumerate(saved))
    if removed in left:
        index.remove("", arrays[removed], removed)
        del left[removed]
    ids = np.array(asked, np.int32)
    longest = max((common(text, asked) for text in left.values()), default=0)
    nearest = index.nearest("", ids, 1)
    assert max((common(left[key], asked) for key in nearest), default=0) == longest
    assert sorted(index.extensions("", ids)) == [
        key for key, text in left.items() if text[: len(asked)] == asked
    ]
    begun = [key for key, text in left.items() if asked[: len(text)] == text]
    found = index.prefixes("", ids)
    assert sorted(found) == begun
    assert [len(left[key]) for key in found] == sorted((len(left[k]) for k in begun), reverse=True)


def test_a_request_is_compared_with_few_of_many_saved_prefixes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = SlotKVCacheManager(capabilities(), 10_000_000, min_swap_tokens=1)
    head = [7] * 5
    for number in range(300):
        text = [*head, number, 9]
        assert cache.allocate(number, text, cache.find_prefix(text, ""), "") is not None
        assert cache.extend(number, len(text)) is not None
        cache.commit(number, text, ValidTokens(len(text)))
        cache.release(number, keep=True)
    compared = 0
    plain = TokenPrefix.common_length

    def counting(prefix: TokenPrefix, other: Ids) -> int:
        nonlocal compared
        compared += 1
        return plain(prefix, other)

    monkeypatch.setattr(TokenPrefix, "common_length", counting)
    assert cache.find_prefix([*head, 123, 9, 1], "").cached == 7
    assert cache.find_prefix([*head, 900, 9, 1], "").cached == 5
    assert compared < 100
