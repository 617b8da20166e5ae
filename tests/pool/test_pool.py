"""The pool: sharing, idle time, eviction by memory, queues, deaths; from many threads at once."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from localchat.engine.interface import EngineInfo
from localchat.errors import DoesNotFit, EngineBusy, EngineClosed, ModelMissing
from localchat.pool.entry import NEVER
from localchat.pool.pool import EnginePool
from tests.support.pool_models import FakeMachine
from tests.support.scripted_engine import ScriptedEngine

PATIENCE_S = 90.0
Start = Callable[..., tuple[EnginePool, FakeMachine]]


@pytest.fixture
def start() -> Iterator[Start]:
    pools: list[EnginePool] = []

    def begin(machine: FakeMachine | None = None, **options: Any) -> tuple[EnginePool, FakeMachine]:
        used = machine or FakeMachine({"a": 40, "b": 40, "c": 40, "big": 90, "huge": 200})
        options = {"keep_alive_s": NEVER, "patience_s": 0.05, **options}
        pools.append(EnginePool(used.resolve, used.open, used.check_memory, **options))
        return pools[-1], used

    yield begin
    for pool in pools:
        pool.close()


def until(true: Callable[[], bool]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < end_s, "it never came to be"
        time.sleep(0.005)


def test_two_words_for_one_model_share_its_engine(start: Start) -> None:
    pool, machine = start()
    with pool.lease("a", "chat") as one, pool.lease("alias", "editor") as other:
        assert one.engine is other.engine
        (loaded,) = pool.loaded()
        assert loaded.clients == ("chat", "editor")
        assert (loaded.name, loaded.state, loaded.idle_s) == ("a", "ready", 0.0)
    assert machine.opened == ["a"]
    assert pool.loaded()[0].clients == ()


def test_unknown_model_is_the_finders_error_and_opens_nothing(start: Start) -> None:
    pool, machine = start()
    with pytest.raises(ModelMissing):
        pool.lease("nobody")
    assert machine.opened == []


def test_release_twice_counts_once(start: Start) -> None:
    pool, _ = start()
    first, second = pool.lease("a"), pool.lease("a")
    first.release()
    first.release()
    assert len(pool.loaded()[0].clients) == 1
    second.release()


def test_many_threads_open_a_model_once(start: Start) -> None:
    pool, machine = start(patience_s=PATIENCE_S)
    machine.before_open = lambda: time.sleep(0.02)
    leases: list[object] = []
    threads = [
        threading.Thread(target=lambda: leases.append(pool.lease("a").engine)) for _ in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert machine.opened == ["a"]
    assert len(leases) == 16 and len(set(map(id, leases))) == 1


def test_lease_without_waiting_is_given_only_for_a_word_that_was_just_found(start: Start) -> None:
    pool, machine = start()
    assert pool.lease_if_loaded("a") is None
    pool.lease("a").release()
    taken = pool.lease_if_loaded("a", "me")
    assert taken is not None and pool.loaded()[0].clients == ("me",)
    taken.release()
    machine.engines["a"].close()
    assert pool.lease_if_loaded("a") is None


def test_of_requests_that_come_together_one_looks_what_the_name_means_now(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, _ = start()
    now_s = 100.0
    monkeypatch.setattr("localchat.pool.pool.time.monotonic", lambda: now_s)
    pool.lease("a").release()
    now_s += 60.0
    leases = [pool.lease_if_loaded("a") for _ in range(3)]
    assert leases[0] is None
    assert all(lease is not None for lease in leases[1:])


def test_name_that_meant_no_model_is_looked_for_once_in_a_while(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, machine = start()
    with pytest.raises(ModelMissing):
        pool.lease("new")
    with pytest.raises(ModelMissing, match="new"):
        pool.lease_if_loaded("new")
    machine.sizes["new"] = 1  # pulled meanwhile
    monkeypatch.setattr("localchat.pool.pool._CACHED_NAME_S", 0.0)
    assert pool.lease_if_loaded("new") is None
    pool.lease("new").release()
    assert machine.opened == ["new"]


def test_names_that_clients_make_up_do_not_add_up(start: Start) -> None:
    pool, _ = start()
    for number in range(1000):
        with pytest.raises(ModelMissing):
            pool.lease(f"made up {number}")
    assert len(pool._cached_names) == 256
    assert pool.lease_if_loaded("made up 3") is None
    with pytest.raises(ModelMissing):
        pool.lease_if_loaded("made up 999")


def test_idle_engine_is_unloaded_after_its_time_and_a_used_one_is_not(start: Start) -> None:
    pool, machine = start(keep_alive_s=0.03)
    held = pool.lease("a")
    pool.lease("b").release()
    until(lambda: machine.alive() == ["a"])
    held.release()
    until(lambda: machine.alive() == [])
    assert pool.loaded() == []


def test_keep_alive_of_nothing_unloads_at_once_and_a_new_request_loads_again(start: Start) -> None:
    pool, machine = start(keep_alive_s=0)
    for _ in range(2):
        pool.lease("a").release()
        until(lambda: machine.alive() == [])
    assert machine.opened == ["a", "a"]


@pytest.mark.parametrize("keep_alive_s", [NEVER, 3600])
def test_a_client_may_have_an_engine_unloaded_at_once(start: Start, keep_alive_s: float) -> None:
    pool, machine = start(keep_alive_s=keep_alive_s)
    pool.lease("b").release()
    held = pool.lease("a")
    with pool.lease("a") as lease:
        lease.keep_alive(0)
    assert machine.alive() == ["b", "a"], "somebody uses it"
    held.release()
    until(lambda: machine.alive() == ["b"])


def test_a_client_may_keep_an_engine_for_longer(start: Start) -> None:
    pool, machine = start(FakeMachine({"a": 10, "b": 10, "c": 10}), keep_alive_s=0.02)
    for name, seconds in (("a", NEVER), ("b", 3600.0)):
        with pool.lease(name) as lease:
            lease.keep_alive(seconds)
    pool.lease("c").release()
    until(lambda: machine.alive() == ["a", "b"])
    never, later = pool.loaded()
    assert never.unloads_in_s is None
    assert 3590 < (later.unloads_in_s or 0) < 3600
    with pool.lease("b") as lease:
        lease.keep_alive(0)
    until(lambda: machine.alive() == ["a"])


def fill_gap(pool: EnginePool, name: str) -> None:
    with pool.lease(name) as lease:
        lease.fill_gap()


def test_engine_that_completes_code_outlives_its_idle_time(start: Start) -> None:
    pool, machine = start(keep_alive_s=0.02, editor_keep_alive_s=3600)
    pool.lease("b").release()
    fill_gap(pool, "a")
    pool.lease("a").release()  # a chat with it changes nothing
    until(lambda: machine.alive() == ["a"])
    assert 3590 < (pool.loaded()[0].unloads_in_s or 0) < 3600


def test_it_makes_room_for_another_model_and_ends_after_its_own_time(start: Start) -> None:
    pool, machine = start(keep_alive_s=0.02, editor_keep_alive_s=0.2)
    fill_gap(pool, "a")
    with pool.lease("big"):
        assert machine.alive() == ["big"]
    until(lambda: machine.alive() == [])
    fill_gap(pool, "a")
    until(lambda: machine.alive() == [])


def test_least_recently_used_idle_engine_makes_room(start: Start) -> None:
    pool, machine = start()
    pool.lease("a").release()
    pool.lease("b").release()
    pool.lease("a").release()
    with pool.lease("c"):
        assert sorted(machine.alive()) == ["a", "c"]


def test_engine_in_use_is_never_evicted_and_the_error_names_its_users(start: Start) -> None:
    pool, machine = start()
    with pool.lease("a", "editor"), pool.lease("b", "chat"):
        with pytest.raises(EngineBusy, match=r"a \(40 B\) by editor; b \(40 B\) by chat") as caught:
            pool.lease("c")
        assert caught.value.details["retry_after_s"]
        assert sorted(machine.alive()) == ["a", "b"]


def test_lease_waits_its_turn_for_memory(start: Start) -> None:
    pool, machine = start(patience_s=PATIENCE_S)
    held = [pool.lease("a"), pool.lease("b")]
    got: list[str] = []

    def wait_for_room() -> None:
        with pool.lease("c") as lease:
            got.append(lease.name)

    waiter = threading.Thread(target=wait_for_room)
    waiter.start()
    assert got == []
    held.pop(0).release()
    waiter.join(PATIENCE_S)
    assert got == ["c"]
    assert "a" not in machine.alive() and "b" in machine.alive()
    held.pop().release()


def test_waiting_lease_that_is_cancelled_ends(start: Start) -> None:
    pool, _ = start(patience_s=60.0)
    cancelled = threading.Event()
    cancelled.set()
    with pool.lease("a"), pool.lease("b"), pytest.raises(EngineBusy):
        pool.lease("c", cancelled=cancelled)


def test_lease_that_is_cancelled_does_not_wait_for_the_load_of_another(start: Start) -> None:
    loading, go_on = threading.Event(), threading.Event()

    def before_open() -> None:
        loading.set()
        assert go_on.wait(PATIENCE_S)

    pool, machine = start(FakeMachine({"a": 1, "b": 1}, before_open=before_open), patience_s=600.0)
    first = threading.Thread(target=lambda: pool.lease("a").release())
    first.start()
    try:
        assert loading.wait(PATIENCE_S)
        cancelled = threading.Event()
        cancelled.set()
        with pytest.raises(EngineBusy):
            pool.lease("b", cancelled=cancelled)
    finally:
        go_on.set()
        first.join()
    assert machine.opened == ["a"]


def test_nobody_is_unloaded_for_a_lease_that_is_cancelled(start: Start) -> None:
    pool, machine = start()
    pool.lease("a").release()
    cancelled = threading.Event()
    cancelled.set()
    with pytest.raises(EngineBusy):
        pool.lease("big", cancelled=cancelled)
    assert (machine.opened, machine.alive()) == (["a"], ["a"])


def test_closed_pool_loads_nothing_for_a_lease_that_waited(start: Start) -> None:
    pool, machine = start(patience_s=600.0)
    held = pool.lease("big")
    errors: list[EngineClosed] = []

    def wait() -> None:
        try:
            pool.lease("a").release()
        except EngineClosed as error:
            errors.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    until(pool._loading.locked)
    pool.close()
    waiter.join(PATIENCE_S)
    held.release()
    assert len(errors) == 1 and machine.opened == ["big"]


def test_engine_that_came_too_late_is_closed_without_the_lock(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, machine = start()
    machine.before_open = pool.close
    listed: list[object] = []

    def close(engine: ScriptedEngine, deadline_s: float = 2.0) -> None:
        thread = threading.Thread(target=lambda: listed.append(pool.engines()), daemon=True)
        thread.start()
        thread.join(5.0)

    monkeypatch.setattr(ScriptedEngine, "close", close)
    with pytest.raises(EngineClosed):
        pool.lease("a")
    assert listed == [[]]


def test_info_that_another_thread_takes_back_meanwhile_is_read_once(start: Start) -> None:
    pool, _ = start()
    pool.lease("a").release()
    (entry,) = pool._entries.values()

    class Failing:
        """The info of an engine that fails in another thread while this one looks."""

        actual_bytes = predicted_bytes = 7

        @property
        def loaded(self) -> bool:
            entry.info = None
            return True

    entry.info = cast(EngineInfo, Failing())
    assert entry.memory_bytes == 7


def test_model_that_fits_nowhere_is_refused_and_evicts_nobody(start: Start) -> None:
    pool, machine = start()
    pool.lease("a").release()
    with pytest.raises(DoesNotFit, match="200 B"):
        pool.lease("huge")
    assert machine.alive() == ["a"]


def test_idle_engine_leaves_for_one_that_would_be_cramped_and_a_used_one_does_not(
    start: Start,
) -> None:
    pool, machine = start(FakeMachine({"a": 10, "b": 10}, cramped=frozenset({"b"})))
    with pool.lease("a"):
        pool.lease("b").release()
        assert sorted(machine.alive()) == ["a", "b"]
    pool.unload("b")
    pool.lease("b").release()
    assert machine.alive() == ["b"]


def test_full_queue_is_a_typed_refusal(start: Start) -> None:
    pool, _ = start(FakeMachine({"a": 1}, max_slots=2), queue=3)
    leases = [pool.lease("a") for _ in range(5)]
    with pytest.raises(EngineBusy) as caught:
        pool.lease("a")
    assert caught.value.details == {"waiting": 3, "limit": 3, "retry_after_s": 5}
    with pytest.raises(EngineBusy):
        pool.lease_if_loaded("a")
    leases.pop().release()
    pool.lease("a").release()


def test_engine_that_ended_while_idle_is_opened_anew(start: Start) -> None:
    pool, machine = start()
    pool.lease("a").release()
    machine.engines["a"].close()
    assert pool.loaded()[0].state == "ended"
    with pool.lease("a") as lease:
        assert lease.engine is machine.engines["a"]
    assert machine.opened == ["a", "a"]
    assert len(pool.loaded()) == 1


def test_stop_of_a_model_returns_the_number_of_ended_requests(start: Start) -> None:
    pool, machine = start()
    pool.lease("a")
    pool.lease("alias")
    assert pool.unload("alias") == 2
    assert machine.alive() == [] and pool.loaded() == []
    assert pool.unload("a") is None
    assert pool.unload("nobody") is None


def test_lease_of_an_engine_that_was_stopped_may_still_be_given_back(start: Start) -> None:
    pool, _machine = start()
    lease = pool.lease("a")
    pool.unload("a")
    fresh = pool.lease("a")
    lease.release()
    assert len(pool.loaded()[0].clients) == 1
    fresh.release()


def test_closed_pool_ends_its_engines_and_refuses(start: Start) -> None:
    pool, machine = start(keep_alive_s=60)
    pool.lease("a")
    pool.close()
    pool.close()
    assert machine.alive() == []
    with pytest.raises(EngineClosed):
        pool.lease("a")


def test_storm_of_leases_never_overcommits_and_leaves_no_entry(start: Start) -> None:
    pool, machine = start(patience_s=PATIENCE_S, keep_alive_s=0.001)
    failures: list[BaseException] = []
    most = [0]

    def client(number: int) -> None:
        try:
            for turn in range(12):
                with pool.lease("abc"[(number + turn) % 3]):
                    most[0] = max(most[0], len(machine.alive()))
        except Exception as error:  # noqa: BLE001 - raised below
            failures.append(error)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert most[0] <= 2
    until(lambda: pool.loaded() == [])
