"""Questions in languages other than English, the only one that the guide speaks."""

from random import Random
from typing import Any, Final

from grammar import phrase
from noise import typo

SHARES: Final = {
    "german": 5, "french": 4, "spanish": 4, "italian": 2, "portuguese": 2.5, "dutch": 3, "polish": 3,
    "swedish": 2, "danish": 1.5, "turkish": 3, "russian": 2.5, "ukrainian": 0.7, "chinese": 2, "japanese": 1.3,
    "korean": 1, "arabic": 1, "hindi": 1,
}  # fmt: skip
ANSWERED: Final = frozenset(("command.pull", "command.rm", "talk.hello", "self.who"))
"""Topics that are answered: the others get the hint, as a guess at an unknown word answers beside the question."""
BARE: Final = str.maketrans("äöüéèêàçùîôñáíóúãõåøłśćżğışßæ¿", "aoueeeacuionaiouaoaolsczgissa ")
"""Letters as on a keyboard that lacks them."""


class Foreign:
    """Draws such questions. `facts`: the parsed facts.json."""

    def __init__(self, facts: dict[str, Any]) -> None:
        self.english: str = facts["foreign"]["english"]
        self.tongues: dict[str, Any] = {name: facts["foreign"][name] for name in SHARES}
        self.answers: dict[str, str] = {t["id"]: t["answer"] for t in facts["topics"]}

    def draw(self, rng: Random) -> tuple[str, str]:
        """A question and its answer: one line in that language, then a topic's answer or a hint in English."""
        tongue = self.tongues[rng.choices(list(SHARES), list(SHARES.values()))[0]]
        if rng.random() < 0.5:
            pattern, topic = rng.choice(tongue["asks"])
            answer = self.answers[topic] if topic in ANSWERED else self.english
            text = self._rough(phrase(f"({pattern})", {}, rng), rng)
        else:
            answer = self.english
            text = self._rough(phrase(rng.choice(tongue["other"]), {}, rng), rng)
        return text, f"{tongue['answer']}\n\n{answer}"

    @staticmethod
    def _rough(text: str, rng: Random) -> str:
        text = text.strip()
        if rng.random() < 0.3:
            text = text.translate(BARE).strip()
        words = text.split(" ")
        able = [i for i, w in enumerate(words) if len(w) >= 5 and w.isalpha()]
        if able and rng.random() < 0.2:
            at = rng.choice(able)
            words[at] = typo(words[at], rng)
            text = " ".join(words)
        if rng.random() < 0.4:
            text = text[:1].upper() + text[1:]
        return text + rng.choices(("", "?", " ?", ".", "!"), (50, 38, 5, 4, 3))[0]
