"""Questions beyond the guide's knowledge, and honest refusals."""

from random import Random
from typing import Any, Final

from grammar import phrase
from noise import roughen

SYLLABLES: Final = [
    "ba",
    "be",
    "bi",
    "bo",
    "bu",
    "da",
    "de",
    "di",
    "do",
    "du",
    "fa",
    "fe",
    "fi",
    "ga",
    "go",
    "gu",
    "ka",
    "ke",
    "ki",
    "ko",
    "la",
    "le",
    "li",
    "lo",
    "lu",
    "ma",
    "me",
    "mi",
    "mo",
    "mu",
    "na",
    "ne",
    "ni",
    "no",
    "nu",
    "pa",
    "pe",
    "pi",
    "po",
    "ra",
    "re",
    "ri",
    "ro",
    "ru",
    "sa",
    "se",
    "si",
    "so",
    "su",
    "ta",
    "te",
    "ti",
    "to",
    "tu",
    "va",
    "ve",
    "vi",
    "vo",
    "wa",
    "we",
    "za",
    "ze",
    "zo",
    "bren",
    "dor",
    "fal",
    "gim",
    "kor",
    "lan",
    "mer",
    "nor",
    "pol",
    "quin",
    "ras",
    "sten",
    "tor",
    "vin",
    "zan",
    "ock",
    "ish",
    "ell",
    "ant",
    "ump",
    "olo",
]
UNKNOWN: Final = {
    "command": (
        "build", "generate", "ask", "open", "logs", "kill", "restart", "embed", "tokenize", "talk",
        "explain", "summarize", "web", "gui", "install", "remove", "browse", "upload", "edit", "write",
    ),
    "flag": (
        "fast", "gpu", "cuda", "debug", "output", "voice", "web", "stream", "batch", "language",
        "agent", "smart", "cpu", "ram", "speed", "best", "markdown", "short", "long", "cloud", "safe",
    ),
    "slash command": (
        "image", "voice", "web", "load", "delete", "models", "reset", "tokens", "run", "code", "file",
        "draw", "learn", "remember", "forget", "summarize", "agent", "browse", "speak", "train",
    ),
}  # fmt: skip
"""Words that sound as if localchat had them, and it has not; a test asks the program."""


def pseudo_word(rng: Random) -> str:
    """A pronounceable word that exists in no language."""
    return "".join(rng.choices(SYLLABLES, k=rng.randint(2, 4)))


class Refusals:
    """Draws questions that the guide must not answer. `facts`: the parsed facts.json."""

    def __init__(self, facts: dict[str, Any]) -> None:
        words = {
            k: v.split(" ") if "|" not in v else v.split("|") for k, v in facts["words"].items()
        }
        self.frames = [(r["answer"], p) for r in facts["refusals"].values() for p in r["ask"]]
        self.lexicon = {
            "thing": words["things"], "person": words["people"], "place": words["places"],
            "subject": words["subjects"], "software": words["software"],
            "language": words["languages"],
            "writing": words["writings"], "job": words["jobs"], "act": words["verbs"],
            "code": words["code_names"], "attribute": words["attributes"],
            "pl": words["programming"],
        }  # fmt: skip

    def draw(self, rng: Random, about: str = "") -> tuple[str, str]:
        """A question and the refusal. about: a word in the pattern; empty: any question."""
        if not about and rng.random() < 0.06:
            return self._unknown_part(rng)
        answer, pattern = rng.choice([frame for frame in self.frames if about in frame[1]])
        lexicon = self.lexicon | {
            "n": [str(rng.randint(2, 999)) for _ in range(3)],
            "year": [str(rng.randint(1900, 2025))],
            "pseudo": [pseudo_word(rng)],
        }
        return roughen(phrase(pattern, lexicon, rng), rng), answer

    @staticmethod
    def _unknown_part(rng: Random) -> tuple[str, str]:
        kind, before = rng.choice(
            (("command", "localchat "), ("flag", "--"), ("slash command", "/"))
        )
        word = pseudo_word(rng) if rng.random() < 0.5 else rng.choice(UNKNOWN[kind])
        shown = before + word
        text = rng.choice(
            (
                f"what does {shown} do",
                f"what is {shown}",
                f"{shown}",
                f"how do i use {shown}",
                f"explain {shown}",
                f"what is {shown} for",
                f"is there {shown}",
                f"{shown} does not work",
            )
        )
        where = "`/help` lists them" if kind == "slash command" else "`localchat --help` lists them"
        return roughen(text, rng, dress=False), f"I know no {kind} `{shown}`; {where}."
