"""Files of entries: in a payload of several chunks every kind of damage shows."""

import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from localchat.kv_store.checksum import CHUNK_BYTES, GROUP_BYTES
from localchat.kv_store.entry import Entry, EntryInvalid, make_entry, read_payload, write_entry

SIZE = 2 * CHUNK_BYTES + 3 * GROUP_BYTES + 1003
LINE, PAGE = 64, 4096

Damage = Callable[[bytearray, random.Random], None]


def flip_a_bit(content: bytearray, draw: random.Random) -> None:
    content[draw.randrange(SIZE)] ^= 1 << draw.randrange(8)


def flip_the_highest_bits_of_two_words(content: bytearray, draw: random.Random) -> None:
    for word in draw.sample(range(SIZE // 8), 2):
        content[8 * word + 7] ^= 128


def replace_a_byte(content: bytearray, draw: random.Random) -> None:
    content[draw.randrange(SIZE)] ^= draw.randrange(1, 256)


def swap(content: bytearray, size: int, *places: int) -> None:
    one, two = (slice(size * place, size * place + size) for place in places)
    content[one], content[two] = content[two], content[one]


def swap_two_lines(content: bytearray, draw: random.Random) -> None:
    swap(content, LINE, *draw.sample(range(SIZE // LINE), 2))


def swap_two_pages(content: bytearray, draw: random.Random) -> None:
    swap(content, PAGE, *draw.sample(range(SIZE // PAGE), 2))


def repeat_a_line(content: bytearray, draw: random.Random) -> None:
    one, two = (LINE * n for n in draw.sample(range(SIZE // LINE), 2))
    content[two : two + LINE] = content[one : one + LINE]


def zero_a_page(content: bytearray, draw: random.Random) -> None:
    start = PAGE * draw.randrange(SIZE // PAGE)
    content[start : start + PAGE] = bytes(PAGE)


def move_the_end(content: bytearray, draw: random.Random) -> None:
    start = draw.randrange(SIZE - 8)
    content[start:] = content[start + 8 :] + bytes(8)


def written(folder: Path, payload: bytes) -> tuple[Entry, Path]:
    entry = make_entry(b"0" * 16, 0, np.arange(7, dtype=np.int32), len(payload))
    write_entry(folder, entry, [memoryview(payload)])
    return entry, folder / entry.name


def is_read(entry: Entry, path: Path, content: bytearray) -> bool:
    """Whether this payload in place of the entry's own is taken for whole."""
    with path.open("r+b") as file:
        file.seek(-len(content), os.SEEK_END)
        file.write(content)
    try:
        read_payload(path, entry)
    except EntryInvalid:
        return False
    return True


@pytest.mark.parametrize(
    "damage",
    [
        flip_a_bit, flip_the_highest_bits_of_two_words, replace_a_byte, swap_two_lines,
        swap_two_pages, repeat_a_line, zero_a_page, move_the_end,
    ],
)  # fmt: skip
def test_damage_to_a_large_payload_shows(tmp_path: Path, damage: Damage) -> None:
    draw = random.Random(3)
    payload = draw.randbytes(SIZE)
    entry, path = written(tmp_path, payload)
    assert is_read(entry, path, bytearray(payload))
    for _ in range(30):
        content = bytearray(payload)
        damage(content, draw)
        assert not is_read(entry, path, content)


def test_lines_in_each_others_place_show_at_every_distance(tmp_path: Path) -> None:
    draw = random.Random(4)
    payload = draw.randbytes(3 * GROUP_BYTES)
    entry, path = written(tmp_path, payload)
    lines = len(payload) // LINE
    for distance in range(1, lines):
        content = bytearray(payload)
        swap(content, LINE, first := draw.randrange(lines - distance), first + distance)
        assert not is_read(entry, path, content), distance


def test_a_file_that_is_read_by_several_calls_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    payload = random.Random(5).randbytes(200_000)
    entry, path = written(tmp_path, payload)
    preadv = os.preadv

    def read_little(descriptor: int, buffers: Sequence[bytearray], at: int) -> int:
        views, left = list[memoryview](), 70_000
        for buffer in buffers:
            views.append(memoryview(buffer)[:left])
            left -= len(views[-1])
        return preadv(descriptor, views, at)

    monkeypatch.setattr(os, "preadv", read_little)
    assert read_payload(path, entry) == payload
    content = path.read_bytes()
    for other in (content[:-1], content[: len(content) // 2], content + b"x", content[:40], b""):
        path.write_bytes(other)
        with pytest.raises(EntryInvalid):
            read_payload(path, entry)
