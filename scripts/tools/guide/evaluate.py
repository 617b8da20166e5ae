"""Scores the guide on the frozen evaluation set: facts, ended answers, honest refusals, wrong numbers.

    python scripts/tools/guide/evaluate.py GGUF [--show] [--commands 500]

Greedy, 400 tokens at most. A question passes if the answer matches every fact's pattern (case does not
count), and with a pick if it offers a question whose answer does. A number is wrong if an answer states a quantity (number with unit) that is neither in the table
of facts nor in the question, or if the item names the quantity and the answer states only others. The
program's own parser checks every `localchat ...` command, and its own engine gives the answers. The
last line is JSON.
"""

import argparse
import json
import re
from itertools import islice
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

from conversations import conversations, read_facts
from facts import commands_in
from held_out import items
from product import Product, refusal

from localchat.engine.guide.rules import OFFER

HERE: Final = Path(__file__).resolve().parent
REFUSAL: Final = re.compile(
    r"(do not know|don't know|cannot|can not|not able|unable|know no|did not understand|no idea)",
    re.I,
)
HONEST: Final = re.compile(r"(small|only|guide)", re.I)
QUANTITY: Final = re.compile(
    r"\d[\d,]*(?:\.\d+)?\s?(?:GB/s|GB|GiB|MiB|KiB|bytes|tok/s|minutes|min|ms|s\b|bits?|million|billion|%)"
)


COMMANDS_SEED: Final = 99


class Answerer(Protocol):
    """The model under test: takes a conversation; returns the greedy answer and whether it ended by
    itself.
    """

    def answer(
        self, messages: list[tuple[str, str]], max_tokens: int = 400
    ) -> tuple[str, bool]: ...


class Outcome(NamedTuple):
    """The result of one item: the answer and how it counts."""

    id: str
    kind: str
    question: str
    answer: str
    passed: bool
    ended: bool
    wrong_number: bool
    bad_commands: list[str]


def holds(answer: str, patterns: list[str]) -> bool:
    """Whether the text matches every pattern."""
    return all(re.search(p, answer, re.I | re.S) for p in patterns)


def known_quantities(facts: dict[str, Any]) -> set[str]:
    """Every quantity in the table, without blanks."""
    return (
        {"".join(q.split()) for q in QUANTITY.findall(json.dumps(facts, ensure_ascii=False))}
        | {f"{value}tok/s" for value in facts["speeds"].values()}
        | {f"{bits}bits" for bits in (4, 8, 16)}
    )


def wrong_number(item: dict[str, Any], answer: str, known: set[str]) -> bool:
    """Whether the answer states a wrong number (see the module docstring)."""
    stated = ["".join(q.split()) for q in QUANTITY.findall(answer)]
    asked = " ".join(str(v) for v in item.values())
    if any(q not in known and re.match(r"[\d,.]+", q)[0] not in asked for q in stated):  # type: ignore[index]
        return True
    return "quantity" in item and bool(stated) and not re.search(item["quantity"], answer, re.I)


def ask(answerer: Answerer, facts: dict[str, Any]) -> list[Outcome]:
    """Ask all questions, off-topic questions and dialogues."""
    known = known_quantities(facts)
    outcomes = []

    def note(
        kind: str, item: dict[str, Any], question: str, got: tuple[str, bool], passed: bool
    ) -> None:
        bad = [c for c in commands_in(got[0]) if refusal(c)]
        wrong = wrong_number(item, got[0], known)
        outcomes.append(Outcome(item["id"], kind, question, got[0], passed, got[1], wrong, bad))

    for item in items("questions"):
        got = answerer.answer([("user", item["question"])])
        passed = holds(got[0], item["facts"])
        note("question", item, item["question"], got, passed)
        picks = [("user", item["question"]), ("assistant", got[0])] if OFFER in got[0] else []
        tried = [answerer.answer([*picks, ("user", number)]) for number in "123" if picks]
        passed = passed or any(holds(text, item["facts"]) for text, _ in tried)
        note("picked", item, item["question"], got, passed)
    for item in items("offtopic"):
        got = answerer.answer([("user", item["question"])])
        honest = bool(REFUSAL.search(got[0]) and HONEST.search(got[0]))
        note("offtopic", item, item["question"], got, honest)
    for item in items("dialogues"):
        first, ended = answerer.answer([("user", item["first"])])
        talk = [("user", item["first"]), ("assistant", first), ("user", item["second"])]
        got = answerer.answer(talk)
        note(
            "dialogue",
            item,
            f"{item['first']} / {item['second']}",
            (got[0], got[1] and ended),
            holds(got[0], item["facts"]),
        )
    return outcomes


def summary(outcomes: list[Outcome]) -> dict[str, float]:
    """The scores in per cent; `commands_refused` is a count."""

    def share(chosen: list[Outcome], field: str) -> float:
        hits = sum(bool(getattr(o, field)) for o in chosen)
        return round(100 * hits / len(chosen), 1)

    names = ("question", "picked", "offtopic", "dialogue")
    kinds = {k: [o for o in outcomes if o.kind == k] for k in names}
    return {
        "questions_passed": share(kinds["question"], "passed"),
        "with_a_pick": share(kinds["picked"], "passed"),
        "refusals_honest": share(kinds["offtopic"], "passed"),
        "dialogues_passed": share(kinds["dialogue"], "passed"),
        "ended": share(outcomes, "ended"),
        "wrong_numbers": share(outcomes, "wrong_number"),
        "commands_refused": sum(len(o.bad_commands) for o in outcomes),
    }


def commands_in_answers(answerer: Answerer, facts: dict[str, Any], count: int) -> dict[str, int]:
    """Answer `count` new questions of the generators; return how many commands came and which ones the
    parser refused.
    """
    stream = (talk for kind, talk in conversations(facts, COMMANDS_SEED) if kind == "topic")
    commands = [
        command
        for talk in islice(stream, count)
        for command in commands_in(
            answerer.answer([talk[0] if talk[0][0] == "user" else talk[1]])[0]
        )
    ]
    refused = [c for c in commands if refusal(c)]
    for command in refused:
        print(f"refused: {command} ({refusal(command)})")
    return {"answers": count, "commands": len(commands), "refused": len(refused)}


def main() -> None:
    parser = argparse.ArgumentParser(description="evaluate the built-in guide")
    parser.add_argument("gguf", type=Path)
    parser.add_argument("--show", action="store_true", help="print what did not pass")
    parser.add_argument("--commands", type=int, default=0, help="also check commands in N answers")
    args = parser.parse_args()
    facts = read_facts(HERE / "facts.json")
    with Product(args.gguf) as answerer:
        outcomes = ask(answerer, facts)
        commands = commands_in_answers(answerer, facts, args.commands) if args.commands else None
    for o in outcomes:
        if args.show and not (o.passed and o.ended and not o.wrong_number and not o.bad_commands):
            marks = f"passed={o.passed} ended={o.ended} wrong={o.wrong_number} {o.bad_commands}"
            print(f"[{o.id}] {marks}\n  Q: {o.question}\n  A: {o.answer[:300]}\n")
    result: dict[str, Any] = dict(summary(outcomes))
    if commands is not None:
        result["commands"] = commands
    print(json.dumps(result))


if __name__ == "__main__":
    main()
