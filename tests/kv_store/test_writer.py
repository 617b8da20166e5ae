"""The background writer runs its tasks in order, and faster when it is drained."""

import threading

from localchat.kv_store.writer import Writer


def test_drain_runs_the_tasks_in_the_thread_that_waits_for_them() -> None:
    writer = Writer()
    threads: list[threading.Thread] = []
    started = threading.Event()

    def first() -> None:
        started.set()
        while not writer._draining:
            threading.Event().wait(0.001)
        threads.append(threading.current_thread())

    writer.put(first, 5)
    assert started.wait(60)
    for _ in range(3):
        writer.put(lambda: threads.append(threading.current_thread()), 1)
    assert writer.pending_bytes == 8
    assert writer.drain(60)
    assert writer.pending_bytes == 0
    assert threads[0] is writer._thread
    assert threads[1:] == [threading.current_thread()] * 3


def test_drain_waits_no_longer_than_allowed_and_keeps_the_order() -> None:
    writer = Writer()
    done: list[object] = []
    started = threading.Event()
    go_on = threading.Event()

    def first() -> None:
        started.set()
        done.append(go_on.wait(60))

    writer.put(first, 1)
    writer.put(lambda: done.append(2), 1)
    assert started.wait(60)
    assert not writer.drain(0.001)
    assert not done
    go_on.set()
    assert writer.drain(60)
    assert done == [True, 2]
