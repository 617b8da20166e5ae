import pytest

from localchat_llamacpp.attention_tiles import prompt_widths, tile_excess


def test_tiles_are_full_where_the_parts_of_the_threads_end_at_tiles() -> None:
    # 9 heads x 512 rows in 8 parts: 576 rows each, which are 9 tiles.
    assert tile_excess(512, heads=9, threads=2) == 1.0
    assert tile_excess(128, heads=16, threads=2) == 1.0


def test_part_that_ends_inside_a_tile_adds_tiles() -> None:
    # 9 heads x 128 rows in 8 parts of 144 rows, each of which holds parts of 3 tiles: 24 instead of 18.
    assert tile_excess(128, heads=9, threads=2) == pytest.approx(24 / 18)


def test_one_thread_never_divides_a_tile() -> None:
    assert all(tile_excess(rows, heads=9, threads=1) == 1.0 for rows in (64, 128, 192, 256))


def test_narrowest_prompt_width_has_nearly_full_tiles() -> None:
    assert prompt_widths(512, heads=9, threads=2)[0] == 256
    assert prompt_widths(512, heads=12, threads=2)[0] == 128
    assert prompt_widths(512, heads=9, threads=1)[0] == 128


def test_prompt_widths_stay_within_the_limit_of_the_context() -> None:
    assert prompt_widths(192, heads=9, threads=2) == (192,)
    assert prompt_widths(100, heads=9, threads=2) == (64,)
    assert prompt_widths(32, heads=9, threads=2) == ()


def test_no_efficient_width_leaves_the_best_of_the_narrow_ones() -> None:
    assert prompt_widths(512, heads=28, threads=16)[0] == 256
