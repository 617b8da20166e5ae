"""KV that is read back from the disk: the same text as computed, whatever happened before."""

import os
import random
from pathlib import Path
from typing import Any

import pytest

from localchat.backend_api.interface import Widths
from localchat.engine.events import Prefill
from localchat.kv_store.store import KVStore
from tests.support.engine_core_bench import Bench, capabilities, check_received, peaked, request

KINDS: list[dict[str, Any]] = [
    {"exports": "range"},
    {"exports": "whole", "rewind": "last_n", "rewind_tokens": 20},
    {"exports": "whole", "rewind": "checkpoint", "state_bytes": 100},
]
TEXT = "A conversation that is opened tomorrow is read from the disk. " * 3


def store_in(folder: Path, limit_bytes: int = 1 << 30) -> KVStore:
    return KVStore(folder / "kv", limit_bytes)


def restarted(folder: Path, kind: dict[str, Any], **options: Any) -> Bench:
    """An engine that starts anew over what the disk has."""
    return Bench(capabilities(**kind), disk=store_in(folder), **options)


def kept(folder: Path, kind: dict[str, Any], text: str = TEXT, **changes: Any) -> list[int]:
    """A conversation that was answered and written to the disk; its tokens."""
    bench = restarted(folder, kind)
    id_ = bench.ask(request(text, owner="1", **changes))
    bench.run_until_idle()
    bench.store()
    assert bench.disk_tier is not None and bench.disk_tier._store.writer.drain(60)
    return bench.requests[id_].sequences[0].tokens


def read_back(bench: Bench, id_: int) -> int:
    return bench.received[id_].all(Prefill)[0].read_back  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", KINDS)
def test_the_next_turn_after_a_restart_is_read_back_and_goes_on_the_same(
    tmp_path: Path, kind: dict[str, Any]
) -> None:
    tokens = kept(tmp_path, kind)
    following = [*tokens, *b" And then?"]
    bench = restarted(tmp_path, kind)
    id_ = bench.ask(request(following, owner="1"))
    bench.run_until_idle()
    check_received(bench, id_, peaked)
    # The last sampled token was never computed.
    assert read_back(bench, id_) == bench.received[id_].done.usage.cached_tokens == len(tokens) - 1
    [prefill, *_] = bench.received[id_].all(Prefill)
    assert prefill.read_s > 0
    # Now RAM has it: the disk is not read again.
    again = bench.ask(request(following, owner="1"))
    bench.run_until_idle()
    assert read_back(bench, again) == 0


def test_with_a_seed_the_chunks_of_the_prompt_are_read_back_and_its_answer_is_not(
    tmp_path: Path,
) -> None:
    sampling: dict[str, Any] = {"temperature": 1.0, "seed": 5}
    tokens = kept(tmp_path, KINDS[0], **sampling)
    bench = restarted(tmp_path, KINDS[0])
    id_ = bench.ask(request([*tokens, *b" And then?"], owner="1", **sampling))
    bench.run_until_idle()
    check_received(bench, id_, peaked)
    assert read_back(bench, id_) == len(TEXT) // 64 * 64


def test_with_a_seed_chunks_of_another_length_are_not_read_back(tmp_path: Path) -> None:
    """The length depends on the number of threads, and so do the bits."""
    tokens = kept(tmp_path, KINDS[0], temperature=1.0, seed=5)
    wider = {**KINDS[0], "max_step_tokens": 128, "widths": Widths(prefill=(128,), mixed=(64, 128))}
    bench = restarted(tmp_path, wider)
    id_ = bench.ask(request([*tokens, *b" And then?"], owner="1", temperature=1.0, seed=5))
    bench.run_until_idle()
    assert read_back(bench, id_) == 0


def test_kv_of_an_unseeded_request_is_not_read_back_with_a_seed(tmp_path: Path) -> None:
    tokens = kept(tmp_path, KINDS[0])
    bench = restarted(tmp_path, KINDS[0])
    id_ = bench.ask(request([*tokens, *b" And then?"], owner="1", seed=5))
    bench.run_until_idle()
    assert bench.received[id_].done.usage.cached_tokens == 0


@pytest.mark.parametrize("kind", KINDS[:1])
def test_a_branch_reads_the_beginning_that_it_shares(tmp_path: Path, kind: dict[str, Any]) -> None:
    tokens = kept(tmp_path, kind)
    bench = restarted(tmp_path, kind)
    id_ = bench.ask(request([*tokens[:100], *b"#something else"], owner="2"))
    bench.run_until_idle()
    check_received(bench, id_, peaked)
    assert read_back(bench, id_) == 100


def test_without_an_owner_nothing_is_kept(tmp_path: Path) -> None:
    bench = restarted(tmp_path, KINDS[0])
    bench.say(request(TEXT))
    bench.say(request("B" + TEXT))
    bench.store()
    assert not list(store_in(tmp_path).files())


@pytest.mark.parametrize("other", [{"salt": "b"}, {"model": "another file"}])
def test_another_salt_or_model_reads_nothing(tmp_path: Path, other: dict[str, str]) -> None:
    kept(tmp_path, KINDS[0], salt="a")
    bench = restarted(tmp_path, KINDS[0], model=other.get("model", "m"))
    id_ = bench.ask(request(TEXT, salt=other.get("salt", "a")))
    bench.run_until_idle()
    check_received(bench, id_, peaked)
    assert bench.received[id_].done.usage.cached_tokens == 0


def test_a_damaged_range_is_computed_again_and_the_events_say_so(tmp_path: Path) -> None:
    tokens = kept(tmp_path, KINDS[0])
    files = sorted(store_in(tmp_path).files(), key=lambda file: file.used_s)
    content = bytearray(files[4].path.read_bytes())
    content[-1] ^= 1
    files[4].path.write_bytes(content)
    bench = restarted(tmp_path, KINDS[0])
    id_ = bench.ask(request([*tokens, 65]))
    bench.run_until_idle()
    check_received(bench, id_, peaked)
    assert read_back(bench, id_) < len(tokens) - 1
    assert "damaged" in bench.received[id_].all(Prefill)[0].why_missed


def test_without_room_in_ram_it_is_computed_and_the_events_say_so(tmp_path: Path) -> None:
    kept(tmp_path, KINDS[0])
    bench = restarted(tmp_path, KINDS[0], ram=50)
    id_ = bench.ask(request(TEXT))
    bench.run_until_idle()
    check_received(bench, id_, peaked)
    assert "--cache-ram" in bench.received[id_].all(Prefill)[0].why_missed


@pytest.mark.parametrize("kind", KINDS[:1])
def test_another_text_in_the_same_slot_is_written_too(tmp_path: Path, kind: dict[str, Any]) -> None:
    bench = restarted(tmp_path, kind)
    texts = [f"A conversation {letter * 60}" for letter in "abc"]
    for text in texts:
        bench.ask(request(text, owner="1"))
        bench.run_until_idle()
        bench.store()
    assert bench.disk_tier is not None and bench.disk_tier._store.writer.drain(60)
    for text in texts:
        bench = restarted(tmp_path, kind)
        id_ = bench.ask(request(text, owner="1"))
        bench.run_until_idle()
        assert read_back(bench, id_) >= len(text) - 20


@pytest.mark.parametrize("kind", KINDS[:1])
def test_conversations_that_begin_alike_and_follow_at_once_are_all_written(
    tmp_path: Path, kind: dict[str, Any]
) -> None:
    bench = restarted(tmp_path, kind)
    texts = [f"user: {letter * 60}" for letter in "abc"]
    for text in texts:
        bench.ask(request(text, owner="1"))
        bench.run_until_idle()
    bench.store()
    assert bench.disk_tier is not None and bench.disk_tier._store.writer.drain(60)
    for text in texts:
        bench = restarted(tmp_path, kind)
        id_ = bench.ask(request(text, owner="1"))
        bench.run_until_idle()
        assert read_back(bench, id_) >= len(text) - 20


@pytest.mark.parametrize("kind", KINDS)
def test_a_store_without_room_is_offered_each_text_once(
    tmp_path: Path, kind: dict[str, Any]
) -> None:
    bench = Bench(capabilities(**kind), disk=store_in(tmp_path, 1))
    for text in (TEXT, TEXT[::-1]):
        bench.ask(request(text, owner="1"))
        bench.run_until_idle()
    offered = 0
    assert bench.disk_tier is not None
    while offered < 100 and bench.disk_tier.store_next():
        offered += 1
        bench.disk_tier._store.writer.drain(60)
    assert 0 < offered < 10


def test_a_request_that_is_cancelled_while_the_disk_is_read_leaves_nothing(tmp_path: Path) -> None:
    kept(tmp_path, KINDS[0])
    bench = restarted(tmp_path, KINDS[0])
    id_ = bench.ask(request(TEXT))
    bench.core.process_commands()
    bench.core.cancel(id_)
    bench.run_until_idle()
    other = bench.ask(request(TEXT))
    bench.run_until_idle()
    check_received(bench, other, peaked)


def test_conversations_that_ended_while_others_ran_are_written_too(tmp_path: Path) -> None:
    bench = restarted(tmp_path, KINDS[0])
    numbers = [bench.ask(request(letter + TEXT[:90], owner=letter)) for letter in "abc"]
    bench.run_until_idle()
    bench.store()
    assert bench.disk_tier is not None and bench.disk_tier._store.writer.drain(60)
    again = restarted(tmp_path, KINDS[0])
    for number in numbers:
        id_ = again.ask(request([*bench.requests[number].sequences[0].tokens, 65]))
        again.run_until_idle()
        check_received(again, id_, peaked)
        assert read_back(again, id_) > 90


def test_conversations_of_which_the_cache_holds_only_one_are_all_written(tmp_path: Path) -> None:
    bench = restarted(tmp_path, KINDS[0])
    texts = [letter * 250 for letter in "abc"]
    for text in texts:
        bench.say(request(text, owner=text[0]))
    bench.store()
    assert bench.disk_tier is not None and bench.disk_tier._store.writer.drain(60)
    # The last conversation is still in memory.
    assert bench.say(request(texts[-1])).done.usage.cached_tokens >= 249
    again = restarted(tmp_path, KINDS[0])
    for text in texts:
        id_ = again.ask(request(text))
        again.run_until_idle()
        assert read_back(again, id_) >= 249


HISTORIES = int(os.environ.get("LOCALCHAT_HISTORIES", "60"))


@pytest.mark.parametrize("number", range(HISTORIES))
def test_random_histories_are_answered_as_by_a_model_that_never_forgets(
    tmp_path: Path, number: int
) -> None:
    """Turns, branches, edits, salts, evictions, deletions, kills and damage, in any order."""
    draw = random.Random(number)
    kind = KINDS[number % len(KINDS)]
    limit = draw.choice([3_000, 20_000, 1 << 30])
    texts: list[tuple[str, list[int]]] = []

    def engine() -> Bench:
        ram = draw.choice([0, 300, 100_000])
        return Bench(capabilities(**kind), disk=store_in(tmp_path, limit), ram=ram)

    bench, asked = engine(), 0
    for _ in range(draw.randint(4, 14)):
        match draw.choice(["turn", "turn", "branch", "new", "store", "kill", "damage", "forget"]):
            case "turn" | "branch" | "new" as what:
                salt, text = draw.choice(texts) if texts and what != "new" else ("", [])
                salt = salt if text else draw.choice(["", "one"])
                text = text[: draw.randint(0, len(text))] if what == "branch" else text
                text = [*text, *draw.choices(b"abcdef", k=draw.randint(1, 30))]
                if len(text) > 300:
                    continue
                sampling: dict[str, Any] = draw.choice([{}, {"temperature": 1.0, "seed": number}])
                owner = draw.choice(["1", "2", ""])
                id_ = bench.ask(request(text, owner=owner, salt=salt, max_tokens=12, **sampling))
                bench.run_until_idle()
                check_received(bench, id_, peaked)
                texts.append((salt, list(bench.requests[id_].sequences[0].tokens)))
                asked += 1
            case "store":
                bench.store(draw.randint(1, 20))
            case "kill":
                bench.store(draw.randint(0, 3))
                assert bench.disk_tier is not None
                bench.disk_tier._store.writer.drain(draw.choice([0, 5]))
                bench = engine()
            case "forget":
                store_in(tmp_path, limit).forget(draw.choice(["1", "2"]))
            case _:
                for file in draw.sample(files := list(store_in(tmp_path).files()), len(files) // 3):
                    content = bytearray(file.path.read_bytes())
                    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
                    file.path.write_bytes(content[: draw.choice([None, 30])])
