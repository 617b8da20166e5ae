#!/usr/bin/env python3
"""Measures votes: accuracy, tokens and time of one to eight tries at generated sums and reading questions.

    PYTHONPATH=.:backends scripts/bench/bench_tries.py [--model FILE] [--questions 200] [--tries 1 4 8]

Answers are held to their form (a number, one of the colours), drawn with temperature 1 and a seed, and counted
as `localchat --vote N` counts them: a vote ends as soon as it is decided. The rounds of all N are interleaved
question by question, so that each N meets the same load of the machine. `ratio` is the time over that of the
first N. Prints a table, and as the last line one JSON object with the same numbers.
"""

import argparse
import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random

import msgspec

import localchat
from localchat.engine.interface import Engine
from localchat.engine.local.engine import LocalEngine
from localchat.engine.options import EngineOptions
from localchat.engine.request import GenerateRequest, Grammar, Message, Messages, Sampling
from localchat.tries.best_answer import Tries, best_answer
from localchat.tries.spec import TriesSpec
from localchat.tries.vote import folded_text, last_number

GUIDE = Path(localchat.__file__).parent / "guide" / "guide.gguf"
COLOURS = ("red", "blue", "green", "yellow", "black", "white")
NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Felix")
THINGS = ("car", "house", "coat", "boat", "door", "cup")


@dataclass(frozen=True, slots=True)
class Question:
    """A question with its right answer, and the form that holds answers."""

    kind: str
    text: str
    right: str
    form: str


@dataclass(slots=True)
class Total:
    """Sums over the questions of one kind at one number of tries."""

    right: int = 0
    asked: int = 0
    ended: int = 0
    tokens: int = 0
    seconds: float = 0.0


def sum_question(draw: Random) -> Question:
    a, b = draw.randint(2, 49), draw.randint(2, 49)
    return Question("sums", f"What is {a} + {b}?", str(a + b), "[1-9][0-9]{0,2}")


def reading_question(draw: Random) -> Question:
    names, things, colours = (draw.sample(words, 3) for words in (NAMES, THINGS, COLOURS))
    told = [
        f"{name} has a {colour} {thing}."
        for name, colour, thing in zip(names, colours, things, strict=True)
    ]
    at = draw.randrange(3)
    text = f"{' '.join(told)}\n\nWhich colour is the {things[at]} of {names[at]}?"
    return Question("reading", text, colours[at], "|".join(COLOURS))


MAKERS = {"sums": sum_question, "reading": reading_question}


def ask(engine: Engine, question: Question, tries: int, seed: int, temperature: float) -> Tries:
    """Ask until the vote is decided."""
    request = GenerateRequest(
        Messages((Message("user", question.text),), thinking="off"),
        sampling=Sampling(temperature=temperature, seed=seed),
        max_tokens=16,
        grammar=Grammar("regex", question.form),
        salt=f"{seed} {tries}",  # every N computes its prompt
    )
    counted = last_number if question.kind == "sums" else folded_text
    best = best_answer(engine, request, TriesSpec(tries, "vote", counted))
    with best.stream as stream:
        for _ in stream:
            pass
    return best.tries


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, default=GUIDE)
    parser.add_argument("--kinds", nargs="+", choices=sorted(MAKERS), default=sorted(MAKERS))
    parser.add_argument("--questions", type=int, default=200, help="of each kind")
    parser.add_argument("--tries", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    opened = EngineOptions(options.model)
    load = msgspec.structs.replace(opened.load, max_slots=max(options.tries))
    engine = LocalEngine(msgspec.structs.replace(opened, load=load), notify=print)
    totals: dict[tuple[str, int], Total] = {}
    try:
        for make in (MAKERS[kind] for kind in options.kinds):
            question_of = partial(make, Random(options.seed))
            for number in range(options.questions + 1):
                question = question_of()
                for tries in options.tries:
                    vote = ask(engine, question, tries, number, options.temperature)
                    if not number:
                        continue  # warms up
                    total = totals.setdefault((question.kind, tries), Total())
                    said = (vote.vote.leader or "").strip('"')
                    total.asked += 1
                    total.right += said == question.right
                    total.ended += len(vote.vote.answers)
                    total.tokens += vote.tokens
                    total.seconds += vote.seconds
    finally:
        engine.close()
    print(f"{'':8} {'N':>2} {'right':>8} {'tries ended':>12} {'tokens':>7} {'s':>7} {'ratio':>6}")
    rows = []
    for (kind, tries), total in totals.items():
        ratio = total.seconds / totals[kind, options.tries[0]].seconds
        rows.append(
            {
                "kind": kind,
                "tries": tries,
                "asked": total.asked,
                "accuracy": total.right / total.asked,
                "ended": total.ended / total.asked,
                "tokens": total.tokens / total.asked,
                "seconds": total.seconds / total.asked,
                "ratio": ratio,
            }
        )
        print(
            f"{kind:8} {tries:2} {total.right / total.asked:8.1%} {total.ended / total.asked:12.2f} "
            f"{total.tokens / total.asked:7.1f} {total.seconds / total.asked:7.3f} {ratio:6.2f}"
        )
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
