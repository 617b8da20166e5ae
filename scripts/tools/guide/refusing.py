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
        "build", "generate", "open", "logs", "kill", "restart", "embed", "tokenize", "talk",
        "explain", "summarize", "web", "gui", "browse", "upload", "edit", "write", "translate",
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


FRAGMENTS: Final = (
    "the", "and", "or", "but", "so", "then", "this", "that", "it", "you", "we", "them", "if", "because", "when",
    "maybe", "ok", "well", "hmm", "um", "of", "with", "not", "also", "too", "again", "there", "here", "yes", "no",
)  # fmt: skip


def pseudo_word(rng: Random) -> str:
    """A pronounceable word that exists in no language."""
    return "".join(rng.choices(SYLLABLES, k=rng.randint(2, 4)))


def noise_text(rng: Random) -> str:
    """What a cat on the keyboard types, or a fragment without sense."""
    draw = rng.random()
    if draw < 0.4:
        return "".join(rng.choices("asdfjklghqwertyuiopzxcvbnm", k=rng.randint(2, 12)))
    if draw < 0.55:
        return "".join(rng.choices(".,?!;:-_#+*~%&=/()", k=rng.randint(1, 5)))
    if draw < 0.65:
        return rng.choice("abcdefghijklmnopqrstuvwxyz0123456789") * rng.randint(1, 7)
    if draw < 0.8:
        return str(rng.randint(0, 10 ** rng.randint(1, 8)))
    return " ".join(rng.sample(FRAGMENTS, rng.randint(1, 4)))


class Refusals:
    """Draws questions that the guide must not answer. `facts`: the parsed facts.json."""

    def __init__(self, facts: dict[str, Any]) -> None:
        words = {
            k: v.split(" ") if "|" not in v else v.split("|") for k, v in facts["words"].items()
        }
        self.unclear: str = next(t["answer"] for t in facts["topics"] if t["id"] == "talk.unclear")
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
        if not about and rng.random() < 0.04:
            return noise_text(rng), self.unclear
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
                "what does {0} do",
                "what is {0}",
                "{0}",
                "how do i use {0}",
                "explain {0}",
                "what is {0} for",
                "is there {0}",
                "{0} does not work",
            )
        )
        where = "`/help` lists them" if kind == "slash command" else "`localchat --help` lists them"
        asked = roughen(text, rng, dress=False).replace("{0}", shown)  # without noise: it is copied
        return asked, f"I know no {kind} `{shown}`; {where}."
