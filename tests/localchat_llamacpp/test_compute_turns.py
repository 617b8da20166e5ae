"""Turns of the steps and the encoder."""

import threading
from collections.abc import Callable

from localchat_llamacpp.compute_turns import ComputeTurns


def run_beside(*bodies: Callable[[], None]) -> None:
    threads = [threading.Thread(target=body, daemon=True) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "a turn never came"


def test_each_computes_alone_and_both_come_to_an_end() -> None:
    turns = ComputeTurns()
    busy = threading.Lock()
    overlaps = []

    def compute() -> None:
        if not busy.acquire(blocking=False):
            overlaps.append(1)
            return
        threading.Event().wait(0.0005)
        busy.release()

    def step() -> None:
        for _ in range(200):
            with turns.step():
                compute()

    def encode() -> None:
        for _ in range(100):
            turns.begin_encoding()
            compute()
            turns.end_encoding()

    run_beside(step, encode)
    assert not overlaps


def test_encoder_alone_never_waits_for_steps_that_do_not_come() -> None:
    turns = ComputeTurns()

    def encode() -> None:
        for _ in range(1000):
            turns.begin_encoding()
            turns.end_encoding()

    run_beside(encode)


def test_steps_alone_never_wait() -> None:
    turns = ComputeTurns()

    def step() -> None:
        for _ in range(1000):
            with turns.step():
                pass

    run_beside(step)
