"""One thread fewer while another program is busy; the clock is ours."""

from typing import NamedTuple

from localchat_llamacpp.thread_count import ThreadWatch


class _Change(NamedTuple):
    threads: int
    note: str


class _Clock:
    def __init__(self, watch: ThreadWatch) -> None:
        self.watch = watch
        self.now_s = 100.0

    def steps(
        self, count: int, elapsed_s: float, *, rows: int = 1, cells: int = 500
    ) -> list[_Change]:
        """So many steps of equal time; the changes of threads and the notes."""
        changes = []
        for _ in range(count):
            self.now_s += elapsed_s
            before = self.watch.threads
            note = self.watch.step(rows, cells, elapsed_s, self.now_s)
            if note or self.watch.threads != before:
                changes.append(_Change(self.watch.threads, note))
        return changes


def test_quiet_steps_change_nothing() -> None:
    clock = _Clock(ThreadWatch(2))
    assert clock.steps(200, 0.04) == []


def test_a_few_slow_steps_change_nothing() -> None:
    clock = _Clock(ThreadWatch(2))
    clock.steps(50, 0.04)
    for _ in range(20):
        assert clock.steps(8, 0.2) == []
        assert clock.steps(20, 0.04) == []


def test_a_moment_without_a_core_changes_nothing_for_a_fast_model() -> None:
    clock = _Clock(ThreadWatch(2))
    clock.steps(50, 0.007)
    assert clock.steps(18, 0.02) == []
    assert clock.steps(50, 0.007) == []
    assert [c.threads for c in clock.steps(25, 0.02)] == [1]


def test_slow_steps_for_a_while_give_one_thread_up_and_a_failed_trial_says_so() -> None:
    clock = _Clock(ThreadWatch(4))
    clock.steps(50, 0.04)
    assert clock.steps(16, 0.2) == [_Change(3, "")]
    while not (changes := clock.steps(1, 0.1)):
        pass
    assert changes == [_Change(4, "")]
    (change,) = clock.steps(4, 0.2)
    assert change.threads == 3
    assert "3 threads" in change.note
    assert change.note.startswith("Slower than usual: other programs are using the CPU.")


def test_the_thread_is_tried_again_for_a_twentieth_of_the_time() -> None:
    clock = _Clock(ThreadWatch(2))
    clock.steps(50, 0.04)
    assert [c.threads for c in clock.steps(12, 0.2)] == [1]
    waits = []
    for _ in range(3):
        began = clock.now_s
        while not (changes := clock.steps(1, 0.07)):
            pass
        assert changes == [_Change(2, "")]
        waits.append(round(clock.now_s - began))
        assert [c.threads for c in clock.steps(4, 0.2)] == [1]
    assert waits == [2, 16, 16]
    clock.now_s += 70
    assert [c.threads for c in clock.steps(20, 0.07)] == [2]


def test_a_slow_step_at_the_start_of_a_try_does_not_end_it() -> None:
    clock = _Clock(ThreadWatch(2))
    clock.steps(50, 0.04)
    clock.steps(16, 0.2)
    assert [c.threads for c in clock.steps(30, 0.07)] == [2]
    assert clock.steps(3, 0.2) == []
    assert clock.steps(100, 0.04) == []


def test_a_try_that_succeeds_ends_it_and_the_next_time_waits_as_at_first() -> None:
    clock = _Clock(ThreadWatch(2))
    clock.steps(50, 0.04)
    clock.steps(16, 0.2)
    assert [c.threads for c in clock.steps(30, 0.07)] == [2]
    assert clock.steps(100, 0.04) == []
    assert [c.threads for c in clock.steps(12, 0.2)] == [1]
    assert clock.steps(28, 0.07) == []
    assert [c.threads for c in clock.steps(10, 0.07)] == [2]


def test_fewer_threads_are_not_taken_for_a_busy_neighbour() -> None:
    clock = _Clock(ThreadWatch(4))
    clock.steps(50, 0.04)
    clock.steps(16, 0.2)
    clock.steps(16, 0.4)
    assert clock.watch.threads == 2
    # Twice as long as with four threads is what two threads take.
    assert [c.threads for c in clock.steps(100, 0.079)] == [3, 4]


def test_a_thread_comes_back_where_one_is_as_fast_as_two() -> None:
    clock = _Clock(ThreadWatch(2))
    clock.steps(50, 0.04)
    clock.steps(16, 0.2)
    # Two threads of one core, or a model that waits for the memory.
    assert [c.threads for c in clock.steps(60, 0.038)] == [2]
    assert clock.steps(200, 0.041) == []


def test_a_thread_that_slows_steps_down_is_given_up_again() -> None:
    clock = _Clock(ThreadWatch(2))
    clock.steps(50, 0.06)
    clock.steps(16, 0.2)
    while not clock.steps(1, 0.07):
        pass
    assert [c.threads for c in clock.steps(4, 0.09)] == [1]


def test_one_thread_is_never_given_up() -> None:
    clock = _Clock(ThreadWatch(1))
    clock.steps(50, 0.04)
    assert clock.steps(100, 1.0) == []


def test_longer_conversations_and_wider_steps_are_not_compared_with_short_ones() -> None:
    clock = _Clock(ThreadWatch(2))
    clock.steps(50, 0.04, cells=300)
    assert clock.steps(100, 0.12, cells=30_000) == []
    assert clock.steps(100, 0.15, rows=4) == []
    assert clock.steps(100, 3.0, rows=64) == []


def notes(changes: list[_Change]) -> list[str]:
    return [change.note for change in changes if change.note]


def told(clock: _Clock, elapsed_s: float) -> list[str]:
    """Be slow until a thread is given up, and in the trial after it. The notes."""
    changes = clock.steps(16, elapsed_s)
    while not (retried := clock.steps(1, 0.07)):
        pass
    return notes([*changes, *retried, *clock.steps(16, elapsed_s)])


def test_a_slowness_is_told_once_however_often_threads_come_and_go() -> None:
    clock = _Clock(ThreadWatch(2))
    clock.steps(50, 0.04)
    assert len(told(clock, 0.2)) == 1
    for _ in range(5):
        assert notes(clock.steps(400, 0.07)) == []
        assert notes(clock.steps(20, 0.2)) == []


def test_a_slowness_that_gets_much_worse_is_told_again() -> None:
    clock = _Clock(ThreadWatch(2))
    clock.steps(50, 0.04)
    assert len(told(clock, 0.1)) == 1
    assert [c.threads for c in clock.steps(400, 0.04)] == [2]
    assert told(clock, 0.12) == []
    assert [c.threads for c in clock.steps(2_000, 0.04)] == [2]
    assert len(told(clock, 0.6)) == 1


def test_a_slowness_after_a_long_recovery_is_news_and_the_recovery_is_told() -> None:
    clock = _Clock(ThreadWatch(2))
    clock.steps(50, 0.04)
    assert len(told(clock, 0.2)) == 1
    (recovered,) = notes(clock.steps(18_000, 0.04))
    assert recovered == "Back to the usual speed: computing with 2 threads."
    assert len(told(clock, 0.2)) == 1
