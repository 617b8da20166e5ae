"""The store of KV on the disk: what it finds, what it deletes, and that damage is a miss."""

import errno
import itertools
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from localchat.kv_store.entry import make_entry, root_key
from localchat.kv_store.eviction import StoredFile, victims
from localchat.kv_store.store import KVStore, Namespace
from tests.support import kv_texts
from tests.support.kv_texts import STRETCH, ids_of, keep, payload_of


def found(namespace: Namespace, text: str, salt: str = "") -> int:
    """Tokens of a text that are read back, after a check of every byte."""
    match = namespace.find(salt, ids_of(text))
    back = namespace.read(match)
    tokens = 0
    for entry, payload in zip(back.entries, back.payloads, strict=True):
        whole = bytes(payload).split(b"|")[0].decode()
        assert bytes(payload) == payload_of(whole, entry.start, entry.end)
        pairs = zip(f"{whole}\0", text, strict=False)
        shared = next((n for n, (a, b) in enumerate(pairs) if a != b), len(text))
        assert shared > entry.start, "an entry of another text"
        tokens = shared
    return tokens


@pytest.fixture
def store(tmp_path: Path) -> KVStore:
    return KVStore(tmp_path / "kv", 1 << 30)


def test_what_was_kept_is_found_by_another_program(store: KVStore) -> None:
    text = "The quick brown fox jumps over the lazy dog."
    keep(store.namespace("model", "m"), text)
    assert store.writer.drain(60)

    again = KVStore(store.folder, 1 << 30).namespace("model", "m")
    assert found(again, text) == len(text)
    assert found(again, text + " And more.") == len(text)
    assert found(again, text[:20] + "slow") == 20
    assert found(again, "Another beginning") == 0


def test_one_entry_is_read_by_its_tokens_alone(store: KVStore) -> None:
    namespace = store.namespace("model", "m")
    root = namespace.root("salt")
    ids = ids_of("digest")
    key = namespace.put(root, 0, ids, [memoryview(b"layout")], owner="first")
    assert store.writer.drain(60)

    again = KVStore(store.folder, 1 << 30)
    reader = again.namespace("model", "m")
    assert reader.read_exactly("salt", ids, "second") == memoryview(b"layout")
    assert reader.read_exactly("other salt", ids, "second") is None
    assert reader.read_exactly("salt", ids[:3], "second") is None
    assert again.writer.drain(60)
    assert again.forget("first") == 0
    path = next(file.path for file in again.files() if file.key == key)
    path.write_bytes(path.read_bytes()[:-1])
    assert reader.read_exactly("salt", ids, "second") is None


def test_a_shared_beginning_is_one_file(store: KVStore) -> None:
    namespace = store.namespace("model", "m")
    keep(namespace, "A" * 32 + "one")
    keep(namespace, "A" * 32 + "two")
    assert store.writer.drain(60)
    assert len(list(store.files())) == 32 // STRETCH + 2


@pytest.mark.parametrize("other", ["salt", "model"])
def test_another_salt_or_model_finds_nothing(store: KVStore, other: str) -> None:
    keep(store.namespace("model", "m"), "a secret text of a user", "one")
    assert store.writer.drain(60)
    salt, description = ("two", "model") if other == "salt" else ("one", "model 2")
    assert found(store.namespace(description, "m"), "a secret text of a user", salt) == 0
    assert root_key("a", "bc") != root_key("ab", "c")


def test_files_and_folders_are_the_owners_alone(store: KVStore) -> None:
    keep(store.namespace("model", "m"), "some text", owner="a conversation")
    assert store.writer.drain(60)
    for path in (store.folder, *store.folder.rglob("*")):
        assert path.stat().st_mode & 0o077 == 0, path


def test_every_damaged_byte_is_a_miss_and_the_file_goes(store: KVStore) -> None:
    text = "sixteen letters!"[:STRETCH]
    namespace = store.namespace("model", "m")
    keep(namespace, text)
    assert store.writer.drain(60)
    [file] = store.files()
    whole = file.path.read_bytes()
    places = random.Random(7).choices(range(len(whole) * 8), k=200)
    for place in places:
        damaged = bytearray(whole)
        damaged[place // 8] ^= 1 << place % 8
        file.path.write_bytes(damaged)
        assert found(KVStore(store.folder, 1 << 30).namespace("model", "m"), text) == 0, place
        file.path.write_bytes(whole)
    assert found(KVStore(store.folder, 1 << 30).namespace("model", "m"), text) == STRETCH


@pytest.mark.parametrize("length", [0, 1, 7, 60, 90, -1])
def test_a_torn_file_is_a_miss(store: KVStore, length: int) -> None:
    namespace = store.namespace("model", "m")
    keep(namespace, "eight ch")
    assert store.writer.drain(60)
    [file] = store.files()
    file.path.write_bytes(file.path.read_bytes()[:length])
    assert found(KVStore(store.folder, 1 << 30).namespace("model", "m"), "eight ch") == 0


def test_an_entry_under_anothers_name_is_a_miss(store: KVStore) -> None:
    namespace = store.namespace("model", "m")
    keep(namespace, "text one", "a")
    keep(namespace, "text two", "b")
    assert store.writer.drain(60)
    one, two = (file.path for file in store.files())
    one.write_bytes(two.read_bytes())
    fresh = KVStore(store.folder, 1 << 30).namespace("model", "m")
    assert sorted((found(fresh, "text one", "a"), found(fresh, "text two", "b"))) == [0, 8]


def test_a_damaged_stretch_leaves_those_before_it(store: KVStore) -> None:
    text = "x" * 40
    keep(store.namespace("model", "m"), text)
    assert store.writer.drain(60)
    fresh = KVStore(store.folder, 1 << 30).namespace("model", "m")
    third = fresh.find("", ids_of(text)).entries[2]
    path = fresh.folder / third.name
    path.write_bytes(path.read_bytes()[:-1])
    assert found(fresh, text) == 2 * STRETCH
    assert found(fresh, text) == 2 * STRETCH
    keep(fresh, text)  # what is missing is written again
    assert fresh._store.writer.drain(60)
    assert found(KVStore(store.folder, 1 << 30).namespace("model", "m"), text) == 40


def test_a_head_that_claims_more_than_memory_leaves_the_stretches_before_it(store: KVStore) -> None:
    text = "x" * 40
    keep(store.namespace("model", "m"), text)
    assert store.writer.drain(60)
    third = store.namespace("model", "m").find("", ids_of(text)).entries[2]
    path = store.namespace("model", "m").folder / third.name
    whole = path.read_bytes()
    claimed = third.payload_bytes.to_bytes(8, "little")
    assert whole.count(claimed) == 1
    path.write_bytes(whole.replace(claimed, (1 << 62).to_bytes(8, "little")))
    assert found(store.namespace("model", "m"), text) == 2 * STRETCH


def test_deleting_a_conversation_deletes_what_only_it_had(store: KVStore) -> None:
    namespace = store.namespace("model", "m")
    keep(namespace, "shared--" + "ONE ONLY", owner="1")
    keep(namespace, "shared--" + "two only", owner="2")
    keep(namespace, "shared--", owner="3")
    assert store.writer.drain(60)
    store.forget("1")
    assert found(namespace, "shared--ONE ONLY") == 8
    store.forget("2")
    assert found(namespace, "shared--two only") == 8
    store.forget("3")
    assert not list(store.files())
    assert store.forget("unknown") == 0


def test_the_bound_holds_and_the_ends_of_old_texts_go_first(tmp_path: Path) -> None:
    store = KVStore(tmp_path / "kv", 40_000)
    namespace = store.namespace("model", "m")
    for number in range(40):
        keep(namespace, f"{number:03}" + "y" * 60)
        assert store.writer.drain(60)
        assert sum(file.size_bytes for file in store.files()) <= 40_000
    assert found(namespace, "039" + "y" * 60) == 63
    assert found(namespace, "000" + "y" * 60) < 63


def test_a_full_store_of_thousands_of_files_is_listed_seldom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Listing them holds up whatever else the program does."""
    store = KVStore(tmp_path, 10_000_000_000, free_bytes=lambda _: 10**12)
    size = 4_000_000
    names = [number.to_bytes(16, "big") for number in range(2500)]
    files = [StoredFile(tmp_path / key.hex(), b"", key, size, 0.0) for key in names]
    monkeypatch.setattr(store, "files", lambda: iter(files))
    room = store.make_room(size)
    assert 500_000_000 < room < 1_000_000_000
    left = len(files) - store.evictions
    assert left * size + 2 * room <= 10_000_000_000 < left * size + 2 * room + size
    monkeypatch.setattr(store, "files", lambda: iter(files[:1000]))
    assert store.make_room(size) > 1_000_000_000
    assert left == len(files) - store.evictions


def test_a_text_larger_than_the_bound_leaves_no_end_without_its_beginning(tmp_path: Path) -> None:
    store = KVStore(tmp_path / "kv", 1_200)
    namespace = store.namespace("model", "m")
    keep(namespace, "a text that is much too long for this store " * 2)
    assert store.writer.drain(60)
    kept = {file.key for file in store.files()} | {namespace.root("")}
    assert all(file.parent in kept for file in store.files())


def test_never_more_than_a_share_of_the_free_disk(tmp_path: Path) -> None:
    store = KVStore(tmp_path / "kv", 1 << 40, free_bytes=lambda _: 100_000)
    keep(store.namespace("model", "m"), "text that fits nowhere")
    assert store.writer.drain(60)
    assert not list(store.files())


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_disk_that_cannot_be_written_gives_one_notice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    notices: list[str] = []
    store = KVStore(tmp_path / "kv", 1 << 30, notices.append)
    keep(store.namespace("model", "m"), "kept before")
    assert store.writer.drain(60)

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("localchat.kv_store.store.write_entry", refuse)
    namespace = store.namespace("model", "m")
    for text in ("a first text", "a second text"):
        keep(namespace, text)
        assert store.writer.drain(60)
        assert found(namespace, text) == 0
    assert len(notices) == 1 and os.strerror(number) in notices[0]
    assert found(namespace, "kept before") == 11
    assert not list(store.folder.rglob("*.part"))


def test_the_least_recently_used_go_first_and_a_parent_never_before_its_child() -> None:
    def file(name: str, parent: str, used_s: float) -> StoredFile:
        return StoredFile(Path("n") / name, parent.encode(), name.encode(), 10, used_s)

    files = [
        file("root", "", 10),
        file("fresh leaf", "root", 100),
        file("older", "", 20),
        file("old", "", 70),
    ]
    gone = victims(files, 0)
    assert [one.key for one in gone] == [b"older", b"old", b"fresh leaf", b"root"]
    assert [one.key for one in victims(files, 30)] == [b"older"]
    assert not victims(files, 40)
    assert len(victims(files, 1000, max_files=1)) == 3


def test_entries_of_a_wrong_clock_go_first(store: KVStore) -> None:
    namespace = store.namespace("model", "m")
    ahead_s = time.time() + 4e7
    keep(namespace, "a text of next year")
    assert store.writer.drain(60)
    ahead = {file.path for file in store.files()}
    part = namespace.folder / "x.part"
    part.write_bytes(b"x")
    for path in (*ahead, part):
        os.utime(path, (ahead_s, ahead_s))
    keep(namespace, "today: another text")
    assert store.writer.drain(60)
    files = victims(store.files(), 0)
    assert len(files) > len(ahead)
    assert {file.path for file in files[: len(ahead)]} == ahead
    assert not part.exists()


def writer_of(folder: Path, first: int) -> list[str]:
    return [sys.executable, str(kv_texts.__file__), str(folder), ":".join(sys.path), str(first)]


def test_killed_programs_leave_only_whole_entries_and_the_bound_holds(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    for run in range(20):
        with subprocess.Popen(writer_of(folder, run * 100), stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None and writer.stdout.readline()
            time.sleep(0.02 + run * 0.003)
            writer.send_signal(signal.SIGKILL)
    store = KVStore(folder, 3_000_000)
    namespace = store.namespace("model", "m")
    assert max(found(namespace, f"{run * 100:05}" + "z" * 400) for run in range(20)) > 0
    assert sum(file.size_bytes for file in store.files()) <= 3_000_000
    for part in folder.rglob("*.part"):
        os.utime(part, (1, 1))
    list(store.files())
    assert not list(folder.rglob("*.part"))


def test_two_programs_write_and_delete_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    # Both write the same texts, so that they meet in every file.
    command = writer_of(folder, 0)
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE) as one,
        subprocess.Popen(command, stdout=subprocess.PIPE) as two,
    ):
        assert one.stdout is not None and two.stdout is not None
        one.stdout.readline()
        two.stdout.readline()
        store = KVStore(folder, 3_000_000)
        namespace = store.namespace("model", "m")
        sound, end_s = 0, time.monotonic() + 60
        for number in itertools.count():
            sound += found(namespace, f"{number % 10:05}" + "z" * 400)
            if number % 50 == 49:
                store.forget("")
            if (sound > 20_000 and number > 200) or time.monotonic() > end_s:
                break
        assert one.poll() is None and two.poll() is None
        one.kill()
        two.kill()
    assert sound > 0


def test_clear_takes_one_model_or_all(store: KVStore) -> None:
    keep(store.namespace("one", "a"), "text")
    keep(store.namespace("two", "b"), "text")
    assert store.writer.drain(60)
    assert {line.model for line in store.summaries()} == {"a", "b"}
    assert store.clear("a") > 0
    assert [line.model for line in store.summaries()] == ["b"]
    store.clear()
    assert not store.folder.exists()
    assert store.clear() == 0


def test_whole_states_are_used_where_they_can_be_truncated(store: KVStore) -> None:
    namespace = store.namespace("windowed", "m")
    for text in ("abcdef", "abcdefghij"):
        root = root_key("windowed", "")
        payload = [memoryview(text.encode())]
        namespace.put(root, 0, ids_of(text), payload, owner="", earliest=len(text) - 2)
    assert store.writer.drain(60)

    def usable(length: int, earliest: int, tokens: int) -> bool:
        return tokens == length or earliest <= max(0, tokens - 2)

    assert namespace.find("", ids_of("abcdefgX"), usable).tokens == 6
    assert namespace.find("", ids_of("abcdefghijk"), usable).tokens == 10
    assert namespace.find("", ids_of("abcX"), usable).tokens == 0
    assert make_entry(root, 0, ids_of("ab"), 1).key != make_entry(root, 1, ids_of("ab"), 1).key
