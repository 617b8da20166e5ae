"""Placeholder ids of pictures, and where a cached text may end."""

from localchat.backend_api.media import cut_after, cut_before, placeholder_ids


def test_ids_are_negative_and_depend_on_content_and_place() -> None:
    first = placeholder_ids(b"a", 300, divisible=True)
    assert all(-(1 << 31) <= number < 0 for number in first)
    assert len(set(first)) == 300
    assert first == placeholder_ids(b"a", 300, divisible=True)
    assert not set(first) & set(placeholder_ids(b"b", 300, divisible=True))
    assert not set(first) & set(placeholder_ids(b"a", 300, divisible=True, index=1))


def test_text_is_cut_before_or_after_an_indivisible_picture() -> None:
    tokens = (1, 2, *placeholder_ids(b"a", 4, divisible=False), 3)
    assert [cut_before(tokens, end) for end in range(8)] == [0, 1, 2, 2, 2, 2, 6, 7]
    assert [cut_after(tokens, end) for end in range(8)] == [0, 1, 2, 6, 6, 6, 6, 7]


def test_divisible_picture_is_cut_anywhere() -> None:
    tokens = (1, *placeholder_ids(b"a", 4, divisible=True), 2)
    assert [cut_before(tokens, end) for end in range(7)] == list(range(7))
