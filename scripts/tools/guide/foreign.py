"""Questions in languages other than English, the only one that the guide speaks."""

from random import Random
from typing import Any, Final

from grammar import phrase
from noise import typo

SHARES: Final = {"german": 4, "french": 3, "spanish": 3, "others": 1}
BARE: Final = str.maketrans("äöüéèêàçùîôñáíóúß¿", "aoueeeacuionaious ")


class Foreign:
    """Draws such questions. `facts`: the parsed facts.json."""

    def __init__(self, facts: dict[str, Any]) -> None:
        self.tongues: dict[str, Any] = facts["foreign"]
        self.answers: dict[str, str] = {t["id"]: t["answer"] for t in facts["topics"]}

    def draw(self, rng: Random) -> tuple[str, str]:
        """A question and its answer: a topic's English answer, or a sentence in that language."""
        tongue = self.tongues[rng.choices(list(SHARES), list(SHARES.values()))[0]]
        if tongue["asks"] and rng.random() < 0.75:
            pattern, topic = rng.choice(tongue["asks"])
            return self._rough(phrase(f"({pattern})", {}, rng), rng), self.answers[topic]
        return self._rough(phrase(rng.choice(tongue["other"]), {}, rng), rng), tongue["answer"]

    @staticmethod
    def _rough(text: str, rng: Random) -> str:
        text = text.strip()
        if rng.random() < 0.2:
            text = text.translate(BARE).strip()
        words = text.split(" ")
        able = [i for i, w in enumerate(words) if len(w) >= 5 and w.isalpha()]
        if able and rng.random() < 0.12:
            at = rng.choice(able)
            words[at] = typo(words[at], rng)
            text = " ".join(words)
        if rng.random() < 0.5:
            text = text[:1].upper() + text[1:]
        return text + rng.choices(("", "?", " ?", ".", "!"), (40, 45, 6, 4, 3))[0]
