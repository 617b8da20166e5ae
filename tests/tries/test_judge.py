"""The judge's questions and how its verdicts are read."""

import pytest

from localchat.engine.request import Message
from localchat.tries.judge import (
    correction_messages,
    fault_messages,
    parse_faults,
    parse_pick,
    pick_messages,
)

ASKED = (Message("system", "be brief"), Message("user", "what is 2 + 2?"))


@pytest.mark.parametrize(
    ("verdict", "faults"),
    [
        ('{"faults": []}', []),
        ('{"faults": ["it is 4 ", ""]}', ["it is 4"]),
        ("looks good to me", None),
        ('{"faults": "none"}', None),
    ],
)
def test_faults_are_read_from_the_verdict(verdict: str, faults: list[str] | None) -> None:
    assert parse_faults(verdict) == faults


@pytest.mark.parametrize(
    ("verdict", "place"), [('{"best": 2}', 1), ('{"best": 4}', None), ("the second", None)]
)
def test_a_pick_is_one_of_the_answers(verdict: str, place: int | None) -> None:
    assert parse_pick(verdict, 3) == place


def test_questions_to_the_judge_begin_as_the_answered_conversation_did() -> None:
    judged = fault_messages(ASKED, "5")
    mending = correction_messages(ASKED, "5", ["it is 4"])
    assert judged[:3] == mending[:3] == (*ASKED, Message("assistant", "5"))
    assert "it is 4" in mending[-1].content
    chosen = pick_messages(ASKED, ["four", "five"])
    assert chosen[:2] == ASKED
    assert "Answer 2:\nfive" in chosen[-1].content
