"""Generates the training text: conversations over the table of facts, from one seed.

A conversation is a list of (role, text). SHARES lists the kinds and their shares; 15 to 20 % is
copying.
"""

import json
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any, Final

from asking import Topics
from copying import Copying
from foreign import Foreign
from held_out import forbidden, runs
from pasting import Pasting
from refusing import Refusals
from sums import Sums

Conversation = list[tuple[str, str]]
SHARES: Final = {"topic": 45, "sum": 9, "refusal": 15, "copy": 15, "chain": 14, "infill": 2}
PASTED: Final = 0.34  # of refusals: a text with a task that the guide cannot do
PAIRS: Final = 0.03  # of topics: two questions in one; with more, long single ones get two answers
FOREIGN: Final = 0.1  # of topics: in another language
SYSTEM: Final = [
    "You are a helpful assistant.",
    "You are the guide of localchat.",
    "Answer briefly.",
    "Be brief.",
    "You are localchat's built-in guide. Answer in English.",
    "Answer in one sentence.",
    "You are a friendly assistant.",
    "Keep answers short and exact.",
    "You answer questions about localchat.",
    "Be polite.",
    "You are an expert.",
    "You are a helpful, honest assistant.",
    "Think before you answer.",
    "Use Markdown.",
    "Answer correctly.",
]
AGAIN: Final = [
    "say that again",
    "again please",
    "repeat that",
    "can you repeat that",
    "once more",
    "what did you say",
    "repeat your answer",
    "I did not get that, again",
    "please repeat",
    "say it again",
    "repeat the answer",
]
MY_QUESTION: Final = [
    "what did I ask?",
    "what was my question?",
    "repeat my question",
    "what was my last question",
]


class Writer:
    """Writes conversations. `facts`: the parsed facts.json. `foreign`: share of topics asked in another
    language.
    """

    def __init__(self, facts: dict[str, Any], foreign: float = FOREIGN) -> None:
        self.foreign_share = foreign
        self.topics = Topics(facts)
        self.sums = Sums(facts)
        self.refusals = Refusals(facts)
        self.copying = Copying(facts)
        self.foreign = Foreign(facts)
        self.pasting = Pasting(facts, self.refusals.lexicon, abroad=foreign > 0)

    def draw(self, rng: Random) -> tuple[str, Conversation]:
        """(kind, conversation)."""
        kind = rng.choices(list(SHARES), list(SHARES.values()))[0]
        if kind == "infill":
            prefix, suffix, middle = self.copying.infill(rng)
            return kind, [("prefix", prefix), ("suffix", suffix), ("middle", middle)]
        talk: Conversation = []
        if rng.random() < 0.1:
            talk.append(("system", self._system(rng)))
        if kind == "topic":
            self._topic(talk, rng, 0.28)
        elif kind == "sum":
            self._sum(talk, rng, 0.3)
        elif kind == "refusal":
            _add(talk, *self._refusal(rng))
            if rng.random() < 0.12:
                _add(talk, *self.topics.after_refusal(rng))
        elif kind == "copy":
            for turn in self.copying.draw(rng):
                _add(talk, *turn)
        else:
            self._chain(talk, rng)
        if rng.random() < 0.015:
            self._look_back(talk, rng)
        return kind, talk

    def _system(self, rng: Random) -> str:
        return " ".join(rng.sample(SYSTEM, rng.choice((1, 1, 2))))

    def _refusal(self, rng: Random) -> tuple[str, str]:
        return self.pasting.draw(rng) if rng.random() < PASTED else self.refusals.draw(rng)

    def _topic(self, talk: Conversation, rng: Random, more: float) -> None:
        draw = rng.random()
        if draw < PAIRS + self.foreign_share:
            _add(talk, *(self.topics.pair(rng) if draw < PAIRS else self.foreign.draw(rng)))
            return
        topic = self.topics.draw(rng)
        _add(talk, *self.topics.question(topic, rng))
        while rng.random() < more and (step := self.topics.after(topic, rng)):
            text, answer, led = step
            _add(talk, text, answer)
            if led is None:
                return
            topic, more = led, 0.35

    def _sum(self, talk: Conversation, rng: Random, more: float) -> None:
        text, answer, about = self.sums.draw(rng)
        _add(talk, text, answer)
        while rng.random() < more and (step := self.sums.after(about, rng)):
            text, answer, about = step
            _add(talk, text, answer)

    def _chain(self, talk: Conversation, rng: Random) -> None:
        for _ in range(rng.choice((2, 2, 3, 3, 4, 5, 7, 10))):
            draw = rng.random()
            if draw < 0.58:
                self._topic(talk, rng, 0.5)
            elif draw < 0.72:
                self._sum(talk, rng, 0.5)
            elif draw < 0.86:
                _add(talk, *self._refusal(rng))
            else:
                for turn in self.copying.draw(rng):
                    _add(talk, *turn)

    def _look_back(self, talk: Conversation, rng: Random) -> None:
        if rng.random() < 0.6:
            _add(talk, rng.choice(AGAIN), talk[-1][1])
        else:
            _add(talk, rng.choice(MY_QUESTION), f"> {talk[-2][1]}".replace("\n", "\n> "))


def _add(talk: Conversation, question: str, answer: str) -> None:
    talk += (("user", question), ("assistant", answer))


def conversations(
    facts: dict[str, Any], seed: int, *, foreign: float = FOREIGN
) -> Iterator[tuple[str, Conversation]]:
    """An endless stream of (kind, conversation); the same seed gives the same stream. Leaves out
    whatever shares eight words in a row with an evaluation question.
    """
    rng, writer, barred = Random(seed), Writer(facts, foreign), forbidden()

    @lru_cache(maxsize=8192)  # most answers repeat often
    def shared(text: str) -> bool:
        return not barred.isdisjoint(runs(text))

    while True:
        kind, talk = writer.draw(rng)
        if not any(shared(text) for _, text in talk):
            yield kind, talk


def read_facts(path: Path) -> dict[str, Any]:
    """Read facts.json."""
    facts: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return facts


def main() -> None:
    """Print some conversations for a person to read."""
    stream = conversations(read_facts(Path(__file__).with_name("facts.json")), 1)
    for _ in range(40):
        kind, talk = next(stream)
        print(f"--- {kind}")
        for role, text in talk:
            print(f"[{role}] {text}")


if __name__ == "__main__":
    main()
