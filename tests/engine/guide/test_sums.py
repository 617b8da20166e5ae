"""Sums in the guide's answers: which hold."""

import pytest

from localchat.engine.guide.sums import SUM, holds


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ("how big is 14b in q4", "7 GB: 14 billion × 4 / 8. A Q4_K_M file is somewhat larger"),
        ("0.5B at 8 bits", "0.5 GB: 0.5 billion × 8 / 8."),
        ("4.7 GB at 1000 GB/s", "At most about 213 tok/s: 1000 / 4.7, since each token reads"),
        ("4.7 gb with 1 TB/s", "At most about 213 tok/s: 1000 / 4.7, since each token reads"),
        ("40 gb at 50 mbit", "About 106.7 minutes: 40 × 8 / 0.05 = 6400 s."),
        ("13b on 12gb?", "A 13B at Q4_K_M has 8.2 GB of weights, so on 12 GB it fits"),
        ("2,000 gb/s and 1,5 gb", "At most about 1333 tok/s: 2000 / 1.5, since"),
        ("kv of llama 3.1 8b at 32k", "Llama 3.1 8B needs 4.29 GB of KV cache for 32,768 tokens"),
        ("what is gguf", "GGUF is the file format of llama.cpp"),
        ("python 3.10.2?", "Python 3.11 or newer."),
    ],
)
def test_right_sums_of_the_question_hold(said: str, answer: str) -> None:
    assert holds(said, answer)


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ("how big is 14b in q4", "8 GB: 14 billion × 4 / 8."),
        ("how big is 41b in q4", "7 GB: 14 billion × 4 / 8."),
        ("4.7 GB at 1000 GB/s", "At most about 312 tok/s: 1000 / 4.7, since each token reads"),
        ("4.7 GB at 800 GB/s", "At most about 213 tok/s: 1000 / 4.7, since each token reads"),
        ("250 gb at 100 mbit", "About 6.7 minutes: 2 × 8 / 0.1 = 360 s."),
        ("2 gb at 100 mbit", "About 6.7 minutes: 2 × 8 / 0.1 = 360 s."),
        ("13b on 12gb?", "A 13B at Q4_K_M has 1.9 GB of weights, so on 12 GB it fits"),
        ("kv of an 8b at 32k", "Qwen2.5-1.5B needs 0.94 GB of KV cache for 32,768 tokens"),
        ("13b on 16gb?", "A 13B at Q4_K_M has 8.2 GB of weights, so on 12 GB it fits"),
    ],
)
def test_wrong_sums_and_those_of_other_numbers_do_not_hold(said: str, answer: str) -> None:
    assert not holds(said, answer)


@pytest.mark.parametrize("begun", ["7", "About ", "At most ", "A 13", "An 8"])
def test_the_beginning_of_a_sum_is_known(begun: str) -> None:
    assert SUM.match(begun)


@pytest.mark.parametrize("begun", ["A model", "Use `localchat", "Atoms", "An alias", "`--n 3`"])
def test_other_beginnings_are_no_sums(begun: str) -> None:
    assert not SUM.match(begun)
