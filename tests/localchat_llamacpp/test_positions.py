"""Positions of pictures whose tokens share them."""

from localchat_llamacpp.positions import NO_TABLE, PositionTable

TABLE = PositionTable.of([(5, 16, 4), (30, 9, 3)])


def test_positions_skip_what_pictures_share() -> None:
    assert [TABLE.position(token) for token in (0, 5, 21, 30, 39, 50)] == [0, 5, 9, 18, 21, 32]
    assert all(TABLE.token(TABLE.position(token)) == token for token in (0, 5, 21, 30, 39, 50))
    # Inside a picture, the position is that after it, so that all of its cells are copied.
    assert TABLE.position(10) == 9


def test_table_survives_a_state_that_it_follows() -> None:
    state = memoryview(b"KV of a text" + TABLE.encode())
    data, table = PositionTable.split(state)
    assert bytes(data) == b"KV of a text"
    assert table == TABLE
    assert PositionTable.split(memoryview(NO_TABLE.encode()))[1] == NO_TABLE


def test_parts_join_to_the_whole() -> None:
    assert TABLE.part(0, 25).plus(TABLE.part(25, 60)) == TABLE
    assert TABLE.part(6, 30) == NO_TABLE
