"""Questions about the topics of facts.json: every way the table knows to ask, and what may be asked after."""

import re
from collections.abc import Iterator
from random import Random
from typing import Any, Final

from grammar import phrase
from noise import roughen

TO_DO: Final = [
    "how do i",
    "how can i",
    "how to",
    "how do you",
    "how would i",
    "what is the command to",
    "which command do i use to",
    "what do i type to",
    "i want to",
    "i would like to",
    "i need to",
    "is it possible to",
    "can i",
    "is there a way to",
    "how could i",
    "please tell me how to",
    "tell me how to",
    "show me how to",
    "what is the best way to",
    "could you tell me how to",
    "do you know how to",
    "where can i",
    "help me",
    "help me to",
    "what is the way to",
    "i am trying to",
    "trying to",
    "how does one",
    "command to",
    "way to",
    "how should i",
    "what do i have to do to",
    "is there a command to",
    "is there an option to",
    "what must i do to",
    "let me",
    "explain how to",
    "i wish to",
    "how am i supposed to",
    "what is the trick to",
    "can you tell me how to",
    "can localchat",
    "does localchat let me",
    "what is the easiest way to",
    "could i",
    "would it be possible to",
    "what is the right way to",
    "steps to",
    "",
    "",
    "",
    "",
]
TO_DO_FLAG: Final = [
    "which flag do i use to",
    "what flag to",
    "which option do i need to",
    "with which flag can i",
    "flag to",
    "option to",
    "is there a flag to",
    "which parameter is there to",
    "what is the flag to",
    "which switch do i need to",
    "which command line option is used to",
]
TO_DO_KEY: Final = [
    "which key do i press to",
    "what key to",
    "which shortcut is there to",
    "key to",
    "shortcut to",
    "hotkey to",
    "what do i press to",
    "is there a shortcut to",
    "is there a key to",
    "which keys do i use to",
    "what is the shortcut to",
    "which slash command do i use to",
    "is there a slash command to",
    "how do i in the ui",
]
TO_KNOW: Final = [
    "what is {}",
    "what's {}",
    "whats {}",
    "explain {}",
    "what does {} mean",
    "define {}",
    "tell me about {}",
    "{}",
    "{}",
    "what are {}",
    "describe {}",
    "meaning of {}",
    "i do not understand {}",
    "can you explain {}",
    "{} explained",
    "{}, what is that",
    "what do people mean by {}",
    "please explain {} to me",
    "how does {} work",
    "what is meant by {}",
    "{} definition",
    "what is {} in simple words",
    "explain {} like i am five",
    "{} in a nutshell",
    "give me a short explanation of {}",
    "i read about {}, what is it",
    "what exactly is {}",
    "what is {} good for",
    "what does {} do",
    "why {}",
    "i keep hearing about {}",
    "what should i know about {}",
    "{} - what is it",
    "so what is {} really",
    "why does {} matter",
    "how would you explain {}",
    "{} for beginners",
    "what is this {} thing",
    "purpose of {}",
    "what is the point of {}",
    "could you describe {}",
    "{} meaning",
    "what is {} for",
    "what does {} stand for",
    "is {} important",
    "how do you define {}",
    "the idea of {}",
    "what is the idea behind {}",
    "{} anyway",
]
ELLIPSIS: Final = [
    "and {}",
    "and {}",
    "and {}",
    "what about {}",
    "how about {}",
    "and what about {}",
    "and what is {}",
    "{}",
    "ok and {}",
    "and for {}",
    "and what does {} mean",
    "then {}",
    "also {}",
    "what is {} then",
    "and {} then",
    "and how about {}",
    "the same for {}",
    "now {}",
    "and the {}",
    "okay, {}",
    "fine, and {}",
]
ELLIPSIS_DO: Final = [
    "and how do i {}",
    "and to {}",
    "how do i {} then",
    "and {}",
    "ok and how can i {}",
    "and if i want to {}",
    "and can i {}",
    "and how to {}",
    "now how do i {}",
    "and which one to {}",
    "what if i want to {}",
]
# groups in which a short name alone is a question, after a topic of the same group
CHAINED: Final = frozenset(
    [
        "command",
        "flag",
        "key",
        "slash",
        "what",
        "exit",
        "conf",
        "server",
        "figure",
        "pick",
        "bound",
        "history",
        "spec",
        "kv",
    ]
)


def slot(kind: str, rng: Random) -> tuple[str, str]:
    """(as a person writes it, as the answer writes it) for a value in a question."""
    if kind == "ctx":
        k = rng.choice((2, 4, 8, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128))
        said = rng.choice((f"{k}k", f"{k}k", f"{k * 1024}", f"{k * 1024:,}", f"{k}K", f"{k} k"))
        return said, str(k * 1024)
    if kind == "shell":
        name = rng.choice(("bash", "zsh", "fish"))
        return name, name
    if kind == "temperature":
        value = rng.choice(
            ("0", "0.1", "0.2", "0.3", "0.4", "0.5", "0.6", "0.7", "0.8", "0.9", "1", "1.2", "1.5")
        )
        return value, value
    if kind == "word":
        word = rng.choice(
            (
                "STOP",
                "DONE",
                "###",
                "Observation:",
                "User:",
                "</s>",
                "---",
                "EOF",
                "FINISH",
                "BYE",
                "Q:",
            )
        )
        word = rng.choice(
            (word, "".join(rng.choices("ABCDEFGHIJKLMNOPRSTUVWXYZ", k=rng.randint(2, 6))))
        )
        return rng.choice((word, f'"{word}"')), word
    value = {
        "int": lambda: rng.choice(
            (rng.randint(1, 99), rng.randint(100, 9999), 50 * rng.randint(1, 40))
        ),
        "few": lambda: rng.randint(2, 32),
        "layers": lambda: rng.randint(1, 80),
        "port": lambda: rng.choice((8080, 8000, 5000, 1234, rng.randint(1024, 65535))),
    }[kind]()
    words = ("", "one", "two", "three", "four", "five", "six", "seven", "eight")
    said = words[value] if kind == "few" and value < 9 and rng.random() < 0.4 else str(value)
    return said, str(value)


def _inline(text: str, rng: Random) -> str:
    if "{kvn}" in text:
        total = rng.choice((2048, 4096, 8192, 16384, 32768, 131072))
        text = text.replace("{kvn}", f"{rng.randint(1, total)}/{total}")
    while "{few2}" in text:
        drafted = rng.randint(2, 400)
        text = text.replace("{few2}", f"{rng.randint(0, drafted)}/{drafted}", 1)
    return text.replace("<pct>", "")


class Topics:
    """The topics with a weighted draw, questions and follow-ups. `facts`: the parsed facts.json."""

    def __init__(self, facts: dict[str, Any]) -> None:
        self.lexicon: dict[str, list[str]] = dict(facts["lexicon"])
        self.lexicon["pct"] = [
            f"{n} {p}" for n in (10, 20, 37, 50, 63, 75, 90, 99) for p in ("percent", "%")
        ]
        self.all: list[dict[str, Any]] = facts["topics"]
        self.by_id = {t["id"]: t for t in self.all}
        self.groups: dict[str, list[dict[str, Any]]] = {}
        for topic in self.all:
            if topic.get("shorts") and topic["group"] in CHAINED:
                self.groups.setdefault(topic["group"], []).append(topic)
        counts = [sum(len(t.get(k, ())) for k in ("do", "ask", "what", "kw")) for t in self.all]
        self.weights = [1 + min(2.0, n / 12) for n in counts]

    def draw(self, rng: Random) -> dict[str, Any]:
        return rng.choices(self.all, self.weights)[0]

    def _say(self, pattern: str, rng: Random) -> str:
        return phrase(pattern, self.lexicon, rng)

    def _core(self, topic: dict[str, Any], rng: Random) -> str:
        kinds = [
            (k, w) for k, w in (("do", 4), ("ask", 4), ("what", 3), ("kw", 1.6)) if topic.get(k)
        ]
        kind = rng.choices([k for k, _ in kinds], [w for _, w in kinds])[0]
        text = self._say(rng.choice(topic[kind]), rng)
        if kind == "do":
            frames = TO_DO
            if topic["group"] in ("flag", "flagvalue") and rng.random() < 0.3:
                frames = TO_DO_FLAG
            elif topic["group"] in ("key", "slash", "ui") and rng.random() < 0.3:
                frames = TO_DO_KEY
            return f"{rng.choice(frames)} {text}".strip()
        if kind == "what":
            return rng.choice(TO_KNOW).format(text)
        if kind == "kw" and rng.random() < 0.3:
            words = text.split(" ")
            rng.shuffle(words)
            return " ".join(words)
        return text

    def question(self, topic: dict[str, Any], rng: Random) -> tuple[str, str]:
        """A question on the topic and its answer."""
        text = _inline(self._core(topic, rng), rng)
        answer = topic["answer"]
        if "slot" in topic:
            said, value = slot(topic["slot"], rng)
            text, answer = text.replace("{n}", said), answer.replace("{v}", value)
        return roughen(text, rng), answer

    def after(
        self, topic: dict[str, Any], rng: Random
    ) -> tuple[str, str, dict[str, Any] | None] | None:
        """A question that leans on the topic before it, its answer, and the topic it leads to."""
        own: list[list[str]] = topic.get("follow", [])
        group = [t for t in self.groups.get(topic["group"], ()) if t is not topic]
        if own and (not group or rng.random() < 0.5):
            pattern, answer = rng.choice(own)
            led = self.by_id[answer[1:]] if answer.startswith("@") else None
            text = roughen(self._say(pattern, rng), rng, dress=False)
            return text, led["answer"] if led else answer, led
        if not group:
            return None
        other = rng.choice(group)
        if other.get("do") and rng.random() < 0.4:
            text = rng.choice(ELLIPSIS_DO).format(self._say(rng.choice(other["do"]), rng))
        else:
            text = rng.choice(ELLIPSIS).format(rng.choice(other["shorts"]))
        return roughen(_inline(text, rng), rng, dress=False), other["answer"], other

    def every_pattern(self) -> Iterator[tuple[str, str]]:
        """(topic id, pattern) of the whole table, for tests."""
        for topic in self.all:
            for kind in ("do", "ask", "what", "kw"):
                for pattern in topic.get(kind, ()):
                    yield topic["id"], pattern
            for pattern, _ in topic.get("follow", ()):
                yield topic["id"], pattern


def references(pattern: str) -> list[str]:
    """The lexicon names that a pattern uses."""
    return re.findall(r"<(\w+)>", pattern)
