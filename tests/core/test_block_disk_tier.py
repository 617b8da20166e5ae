"""Blocks that go to the disk and come back: the same text as computed, whatever happened before."""

import os
import random
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localchat.backend_api.interface import LoadBlock
from localchat.core import engine_core
from localchat.core.kv_cache.block_disk_tier import BlockDiskTier
from localchat.engine.events import Prefill
from localchat.kv_store.entry import Entry, make_entry
from localchat.kv_store.eviction import StoredFile
from localchat.kv_store.store import KVStore
from localchat.kv_store.tree import Match
from tests.support.engine_core_bench import Bench, capabilities, check_received, peaked, request

PAGED: dict[str, Any] = {"block_tokens": 4, "depth": 2, "host_blocks": 200, "bytes_per_token": 8}
TEXT = "A conversation that is opened tomorrow is read from the disk. " * 3


def store_in(folder: Path, limit_bytes: int = 1 << 30) -> KVStore:
    return KVStore(folder / "kv", limit_bytes)


def started(folder: Path, **changes: Any) -> Bench:
    """An engine that starts anew over what the disk has."""
    model = changes.pop("model", "m")
    return Bench(capabilities(**PAGED | changes), disk=store_in(folder), model=model)


def written(bench: Bench) -> None:
    """Write everything that there is, as an idle engine does."""
    bench.store()
    assert bench.disk_tier is not None and bench.disk_tier._store.writer.drain(60)


def kept(folder: Path, text: str = TEXT, **changes: Any) -> list[int]:
    """A conversation that was answered and written to the disk; its tokens."""
    bench = started(folder)
    id_ = bench.ask(request(text, owner="1", **changes))
    bench.run_until_idle()
    written(bench)
    return bench.requests[id_].sequences[0].tokens


def prefill(bench: Bench, id_: int) -> Prefill:
    found: Prefill = bench.received[id_].all(Prefill)[0]
    return found


def test_the_next_turn_after_a_restart_is_read_back_and_goes_on_the_same(tmp_path: Path) -> None:
    tokens = kept(tmp_path)
    following = [*tokens, *b" And then?"]
    bench = started(tmp_path)
    id_ = bench.ask(request(following, owner="1"))
    bench.run_until_idle()
    check_received(bench, id_, peaked)
    whole = (len(tokens) - 1) // 4 * 4
    assert prefill(bench, id_).read_back == prefill(bench, id_).cached == whole
    assert prefill(bench, id_).read_s > 0
    again = bench.ask(request(following, owner="1"))
    bench.run_until_idle()
    assert prefill(bench, again).read_back == 0


def test_parts_that_were_read_are_on_the_device_before_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = kept(tmp_path)
    bench = started(tmp_path)
    assert bench.disk_tier is not None
    read_into, end_s = bench.disk_tier.namespace.read_into, time.monotonic() + 5

    def loaded() -> bool:
        return any(isinstance(op, LoadBlock) for plan in bench.runner.steps for op in plan.memory)

    def read_the_end_late(entry: Entry, out: memoryview) -> bytes | None:
        while entry.end > 160 and not loaded() and time.monotonic() < end_s:
            time.sleep(0.001)
        return read_into(entry, out) if entry.end <= 160 or loaded() else None

    monkeypatch.setattr(bench.disk_tier.namespace, "read_into", read_the_end_late)
    id_ = bench.ask(request([*tokens, 65]))
    bench.run_until_idle()
    assert prefill(bench, id_).read_back == (len(tokens) - 1) // 4 * 4


def test_nothing_is_given_back_while_blocks_are_still_being_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, filled, seen = started(tmp_path), [], []
    id_ = bench.ask(request(TEXT))
    bench.run_until_idle()
    tier = bench.disk_tier
    assert isinstance(tier, BlockDiskTier)
    ids = np.zeros(4, np.int32)
    entries = tuple(make_entry(b"", 4 * number, ids, 32) for number in range(40))

    def read_into(entry: Entry, _: memoryview) -> bytes | None:
        time.sleep(0.002)
        filled.append(entry)
        return b"" if entry.start else None

    monkeypatch.setattr(tier.namespace, "read_into", read_into)
    numbers = [0] * len(entries)
    buffers = [memoryview(b"")] * len(entries)
    state = bench.requests[id_]
    tier._read(state, Match(entries, 160), numbers, buffers, lambda read: seen.append(len(filled)))
    assert seen == [40]


def test_what_the_device_cannot_sum_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = kept(tmp_path)
    bench = started(tmp_path)

    def fail(_: object, numbers: object) -> list[bytes]:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(type(bench.runner), "block_sums", fail)
    id_ = bench.ask(request([*tokens, 65]))
    bench.run_until_idle()
    check_received(bench, id_, peaked)
    assert prefill(bench, id_).read_back == prefill(bench, id_).cached == 0


def test_a_branch_reads_the_beginning_that_it_shares(tmp_path: Path) -> None:
    tokens = kept(tmp_path)
    bench = started(tmp_path)
    id_ = bench.ask(request([*tokens[:101], *b"#something else"], owner="2"))
    bench.run_until_idle()
    check_received(bench, id_, peaked)
    assert prefill(bench, id_).read_back == 100


def test_only_what_ram_lacks_is_read(tmp_path: Path) -> None:
    tokens = kept(tmp_path)
    bench = started(tmp_path)
    bench.say(request(tokens[:60], max_tokens=1))
    id_ = bench.ask(request([*tokens, 65]))
    bench.run_until_idle()
    check_received(bench, id_, peaked)
    whole = (len(tokens) - 1) // 4 * 4
    assert (prefill(bench, id_).cached, prefill(bench, id_).read_back) == (whole, whole - 60)


def test_without_an_owner_nothing_is_kept(tmp_path: Path) -> None:
    bench = started(tmp_path)
    bench.say(request(TEXT))
    written(bench)
    assert not list(store_in(tmp_path).files())


@pytest.mark.parametrize(
    "other", [{"salt": "b"}, {"model": "another"}, {"kv_type": "fp8"}, {"host_layout": "2"}]
)
def test_another_salt_model_or_layout_reads_nothing(tmp_path: Path, other: dict[str, str]) -> None:
    kept(tmp_path, salt="a")
    salt = other.pop("salt", "a")
    bench = started(tmp_path, **other)
    id_ = bench.ask(request(TEXT, salt=salt))
    bench.run_until_idle()
    check_received(bench, id_, peaked)
    assert bench.received[id_].done.usage.cached_tokens == 0


def blocks_in_order(folder: Path) -> list[StoredFile]:
    """Stored blocks of one text, from its beginning."""
    files = list(store_in(folder).files())
    by_parent = {file.parent: file for file in files}
    (start,) = by_parent.keys() - {file.key for file in files}
    ordered = [by_parent[start]]
    while ordered[-1].key in by_parent:
        ordered.append(by_parent[ordered[-1].key])
    return ordered


@pytest.mark.parametrize("harm", ["a bit", "torn", "gone", "another's"])
def test_a_damaged_block_is_computed_again_and_the_events_say_so(tmp_path: Path, harm: str) -> None:
    tokens = kept(tmp_path)
    files = blocks_in_order(tmp_path)
    path = files[10].path
    content = bytearray(path.read_bytes())
    match harm:
        case "a bit":
            content[-1] ^= 1
        case "torn":
            del content[-3:]
        case "another's":
            content = bytearray(files[11].path.read_bytes())
    path.write_bytes(content)
    bench = started(tmp_path)
    if harm == "gone":
        assert bench.disk_tier is not None
        bench.disk_tier.namespace.tree._refresh()
        path.unlink()
    id_ = bench.ask(request([*tokens, 65]))
    bench.run_until_idle()
    check_received(bench, id_, peaked)
    assert prefill(bench, id_).read_back == 40
    assert "damaged" in prefill(bench, id_).why_missed


def test_every_bit_flip_is_a_miss(tmp_path: Path) -> None:
    tokens, draw = kept(tmp_path), random.Random(1)
    prompt_blocks = (len(tokens) - 1) // 4
    for _ in range(200):
        file = draw.choice(blocks_in_order(tmp_path)[:prompt_blocks])
        content = bytearray(file.path.read_bytes())
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        file.path.write_bytes(content)
        bench = started(tmp_path)
        id_ = bench.ask(request([*tokens, 65], max_tokens=4, owner="1"))
        bench.run_until_idle()
        check_received(bench, id_, peaked)
        assert prefill(bench, id_).read_back < (len(tokens) - 1) // 4 * 4
        written(bench)


def test_a_damaged_block_in_the_middle_of_a_text_is_written_again(tmp_path: Path) -> None:
    tokens = kept(tmp_path)
    blocks = blocks_in_order(tmp_path)
    blocks[10].path.write_bytes(b"")
    for read_back in (40, (len(tokens) - 1) // 4 * 4):
        bench = started(tmp_path)
        id_ = bench.ask(request([*tokens, 65], owner="1"))
        bench.run_until_idle()
        assert prefill(bench, id_).read_back == read_back
        written(bench)


GREEDY = {"temperature": 0.0, "max_tokens": 6}
CHUNK = 64
"""Prompt tokens of a step whose shape is the same cold and warm, on this runner."""


def read_back_of(bench: Bench, tokens: list[int], **changes: Any) -> int:
    """Ask, and return the prompt tokens that came from the disk."""
    id_ = bench.ask(request(tokens, owner="1", **changes))
    bench.run_until_idle()
    check_received(bench, id_, peaked)
    return prefill(bench, id_).read_back


def test_a_request_at_temperature_0_reads_what_another_one_stored(tmp_path: Path) -> None:
    """Blocks on the disk have the bits of a fresh computation if the step had a fixed shape."""
    prompt = list(TEXT.encode())
    bench = started(tmp_path)
    read_back_of(bench, prompt, **GREEDY)
    written(bench)
    assert read_back_of(started(tmp_path), prompt, **GREEDY) == len(prompt) // CHUNK * CHUNK
    # A request without a seed reads the answer too.
    assert read_back_of(started(tmp_path), [*prompt, 65]) == len(prompt) // 4 * 4


def test_a_request_at_temperature_0_reads_nothing_that_other_steps_computed(tmp_path: Path) -> None:
    """KV of single tokens, or of steps that several requests share, has other bits."""
    tokens = kept(tmp_path, temperature=0.9)
    bench = started(tmp_path)
    assert read_back_of(bench, tokens, **GREEDY) == 0
    assert not [op for plan in bench.runner.steps for op in plan.memory if "Load" in repr(op)]


def test_blocks_of_fixed_shape_replace_others_on_the_disk(tmp_path: Path) -> None:
    tokens = kept(tmp_path, temperature=0.9)
    before = len(list(store_in(tmp_path).files()))
    bench = started(tmp_path)
    read_back_of(bench, tokens, **GREEDY)
    written(bench)
    assert read_back_of(started(tmp_path), tokens, **GREEDY) == len(tokens) // CHUNK * CHUNK
    # The answer of the second request has new blocks, and no block is stored twice.
    assert len(list(store_in(tmp_path).files())) <= before + 2


def test_a_request_at_temperature_0_computes_its_prompt_once_after_others_did(
    tmp_path: Path,
) -> None:
    """The copy in host memory, which has other bits, is replaced."""
    prompt = list(TEXT.encode())
    bench = started(tmp_path)
    read_back_of(bench, prompt, temperature=0.9)
    cached = []
    for _ in range(2):
        id_ = bench.ask(request(prompt, **GREEDY))
        bench.run_until_idle()
        check_received(bench, id_, peaked)
        cached.append(prefill(bench, id_).cached)
    assert cached == [0, len(prompt) // CHUNK * CHUNK]


def test_a_request_that_is_cancelled_while_the_disk_is_read_leaves_nothing(tmp_path: Path) -> None:
    tokens = kept(tmp_path)
    bench = started(tmp_path)
    id_ = bench.ask(request([*tokens, 65]))
    bench.core.process_commands()
    bench.core.cancel(id_)
    bench.run_until_idle()
    other = bench.ask(request([*tokens, 65]))
    bench.run_until_idle()
    check_received(bench, other, peaked)
    assert prefill(bench, other).cached > 100


def test_an_engine_that_ends_writes_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_core, "_LAST_WRITES_S", 60.0)
    bench = started(tmp_path)
    id_ = bench.ask(request(TEXT, owner="1"))
    bench.run_until_idle()
    bench.core.stop()
    bench.core.run()
    tokens = bench.requests[id_].sequences[0].tokens
    again = started(tmp_path)
    other = again.ask(request([*tokens, 65]))
    again.run_until_idle()
    assert prefill(again, other).read_back == (len(tokens) - 1) // 4 * 4


def test_a_disk_that_is_slower_than_computing_is_left_alone_until_it_is_tried_again(
    tmp_path: Path,
) -> None:
    tokens = kept(tmp_path)
    bench = started(tmp_path)
    tier = bench.disk_tier
    assert isinstance(tier, BlockDiskTier)
    tier.observe_prefill(1000, 1e-3)
    tier._read_s = 3 * tier._prefill_s
    found = []
    for letter in range(7):
        id_ = bench.ask(request([*tokens, 65 + letter], salt=""))
        bench.run_until_idle()
        check_received(bench, id_, peaked)
        found.append(prefill(bench, id_).read_back > 0)
        if not found[-1]:
            assert "slowly" in prefill(bench, id_).why_missed
        bench = restarted_over(bench, tmp_path)
    assert found.index(True) == 5


def restarted_over(bench: Bench, folder: Path) -> Bench:
    """An engine that starts anew and remembers the measured rates."""
    fresh, before = started(folder), bench.disk_tier
    assert isinstance(fresh.disk_tier, BlockDiskTier) and isinstance(before, BlockDiskTier)
    fresh.disk_tier._prefill_s, fresh.disk_tier._read_s = before._prefill_s, before._read_s
    return fresh


def test_while_steps_run_blocks_are_written_at_a_pace_and_the_others_when_nothing_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer holds Python's lock, which every step needs."""
    clock_s = [0.0]
    monkeypatch.setattr(
        "localchat.core.kv_cache.block_disk_tier.time.monotonic", lambda: clock_s[0]
    )
    bench = started(tmp_path)
    bench.run_until_idle()
    files = KVStore(tmp_path / "kv", 0).files
    bench.ask(request(TEXT, owner="1", max_tokens=40))
    clock_s[0] = 10.0
    bench.run_until_idle()
    assert bench.disk_tier is not None and bench.disk_tier._store.writer.drain(60)
    assert len(list(files())) == 1
    bench.ask(request(TEXT.upper(), owner="2", max_tokens=40))
    clock_s[0] = 20.0
    bench.run_until_idle()
    assert bench.disk_tier._store.writer.drain(60)
    assert len(list(files())) == 2
    written(bench)
    assert len(list(files())) > 2 * len(TEXT) // 4


def test_a_prompt_larger_than_host_memory_reads_as_much_as_that_holds(tmp_path: Path) -> None:
    tokens = kept(tmp_path)
    bench = started(tmp_path, host_blocks=6)
    id_ = bench.ask(request([*tokens, 65]))
    bench.run_until_idle()
    check_received(bench, id_, peaked)
    assert prefill(bench, id_).read_back == 24


def test_a_disk_without_room_is_left_alone(tmp_path: Path) -> None:
    bench = Bench(capabilities(**PAGED), disk=KVStore(tmp_path, 1 << 30, free_bytes=lambda _: 0))
    id_ = bench.ask(request(TEXT, owner="1"))
    bench.run_until_idle()
    written(bench)
    check_received(bench, id_, peaked)
    assert not list(KVStore(tmp_path, 0).files())


def test_a_prompt_of_another_salt_looks_up_as_much_as_one_that_nobody_knows(tmp_path: Path) -> None:
    """No lookup, no file and no copy differs, so no time tells what another user has."""
    kept(tmp_path, salt="a")
    looked: dict[str, list[object]] = {}
    for name, text in (("another's", TEXT), ("nobody's", TEXT.upper())):
        bench = started(tmp_path)
        tier = bench.disk_tier
        assert tier is not None
        reads: list[object] = []
        tier.namespace.tree.has = lambda *key, seen=reads, **_: bool(seen.append(key))  # type: ignore
        bench.say(request(text, salt="b"))
        assert not [op for plan in bench.runner.steps for op in plan.memory if "Load" in repr(op)]
        looked[name] = reads
    assert len(looked["another's"]) == len(looked["nobody's"]) == 1


HISTORIES = int(os.environ.get("LOCALCHAT_HISTORIES", "60"))


@pytest.mark.parametrize("number", range(HISTORIES))
def test_random_histories_are_answered_as_by_a_model_that_never_forgets(
    tmp_path: Path, number: int
) -> None:
    """Turns, branches, edits, salts, evictions, preemptions, deletions, kills and damage, in any order."""
    draw = random.Random(number)
    limit = draw.choice([3_000, 20_000, 1 << 30])
    texts: list[tuple[str, list[int]]] = []

    def engine() -> Bench:
        sizes = {"host_blocks": draw.choice([1, 7, 60, 300]), "kv_tokens": draw.choice([340, 800])}
        stumble = draw.sample(range(100), draw.choice([0, 0, 3]))
        can = capabilities(**PAGED | sizes)
        return Bench(can, disk=store_in(tmp_path, limit), stumble=stumble)

    bench = engine()
    for _ in range(draw.randint(4, 14)):
        match draw.choice(["turn", "turn", "branch", "new", "crowd", "store", "kill", "damage"]):
            case "turn" | "branch" | "new" | "crowd" as what:
                asked = []
                for _ in range(draw.randint(2, 5) if what == "crowd" else 1):
                    salt, text = draw.choice(texts) if texts and what != "new" else ("", [])
                    salt = salt if text else draw.choice(["", "one"])
                    text = text[: draw.randint(0, len(text))] if what == "branch" else text
                    text = [*text, *draw.choices(b"abcdef", k=draw.randint(1, 60))]
                    if len(text) > 300:
                        continue
                    sampling = draw.choice([{}, {"temperature": 1.0, "seed": number}])
                    owner, choices = draw.choice(["1", "2", ""]), draw.choice([1, 1, 2])
                    asked.append(
                        (salt, bench.ask(request(text, owner=owner, salt=salt, max_tokens=12,
                                                 n=choices, **sampling)))
                    )  # fmt: skip
                    bench.step(draw.randint(0, 3))
                bench.run_until_idle()
                for salt, id_ in asked:
                    check_received(bench, id_, peaked)
                    texts.append((salt, list(bench.requests[id_].sequences[0].tokens)))
            case "store":
                bench.store(draw.randint(1, 20))
            case "kill":
                bench.store(draw.randint(0, 3))
                assert bench.disk_tier is not None
                bench.disk_tier._store.writer.drain(draw.choice([0, 5]))
                bench = engine()
            case _:
                for file in draw.sample(files := list(store_in(tmp_path).files()), len(files) // 3):
                    with suppress(FileNotFoundError):  # evicted in the meantime
                        content = bytearray(file.path.read_bytes())
                        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
                        file.path.write_bytes(content[: draw.choice([None, 30])])
