"""Judge: the model looks at its own answers, names their faults, or picks the best of several."""

import json
from collections.abc import Sequence
from typing import Final

from localchat.engine.request import Grammar, Message
from localchat.tries.extractor import json_field

JUDGE_TOKENS: Final = 512
"""Longest verdict."""

FAULTS_GRAMMAR: Final = Grammar(
    "json_schema",
    json.dumps(
        {
            "type": "object",
            "properties": {
                "faults": {
                    "type": "array",
                    "items": {"type": "string", "minLength": 3, "maxLength": 240},
                    "maxItems": 4,
                }
            },
            "required": ["faults"],
            "additionalProperties": False,
        }
    ),
)

_FIND_FAULTS: Final = (
    "Check your answer: is it right, does it answer what was asked, is anything missing? Reply with JSON: "
    '{"faults": [...]}, one short sentence for each fault, and an empty list if there is none.'
)
_MEND: Final = (
    "Your answer has these faults:\n{faults}\n"
    "Write the whole answer again without them. Write the answer alone, with no word about the faults."
)
_PICK: Final = (
    "Here are {count} answers to my last message.\n\n{answers}\n\n"
    'Which one is the best? Reply with JSON: {{"best": NUMBER}}.'
)


def fault_messages(conversation: Sequence[Message], answer: str) -> tuple[Message, ...]:
    """The conversation with its answer, and the question for faults. It begins as the answered one did, so
    that the prefix is computed already."""
    return (*conversation, Message("assistant", answer), Message("user", _FIND_FAULTS))


def found_faults(verdict: str) -> list[str] | None:
    """The faults that a judge names; None if there is no verdict in its text."""
    field = json_field(verdict, "faults")
    faults = None if field is None else json.loads(field)
    if not isinstance(faults, list):
        return None
    return [fault.strip() for fault in faults if isinstance(fault, str) and fault.strip()]


def mending_messages(
    conversation: Sequence[Message], answer: str, faults: Sequence[str]
) -> tuple[Message, ...]:
    """The conversation with its answer, and the request to mend these faults."""
    text = _MEND.format(faults="\n".join(f"- {fault}" for fault in faults))
    return (*conversation, Message("assistant", answer), Message("user", text))


def pick_messages(conversation: Sequence[Message], answers: Sequence[str]) -> tuple[Message, ...]:
    """The conversation, and the question which of these answers is the best."""
    shown = "\n\n".join(f"Answer {n}:\n{text.strip()}" for n, text in enumerate(answers, 1))
    return (*conversation, Message("user", _PICK.format(count=len(answers), answers=shown)))


def pick_grammar(count: int) -> Grammar:
    """Holds a pick to the numbers that there are."""
    schema = {
        "type": "object",
        "properties": {"best": {"enum": list(range(1, count + 1))}},
        "required": ["best"],
        "additionalProperties": False,
    }
    return Grammar("json_schema", json.dumps(schema))


def picked(verdict: str, count: int) -> int | None:
    """Index of the answer that a judge picked; None if there is no verdict in its text."""
    field = json_field(verdict, "best")
    if field is None or not field.isdecimal() or not 1 <= int(field) <= count:
        return None
    return int(field) - 1
