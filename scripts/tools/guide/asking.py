"""Questions about the topics of facts.json: every phrasing the table knows, and the follow-ups."""

import re
from collections.abc import Iterator
from itertools import accumulate
from random import Random
from typing import Any, Final

from grammar import phrase
from noise import roughen

# Groups whose short names alone are questions, after a topic of the same group.
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

TEMPERATURES: Final = [
    "0",
    "0.1",
    "0.2",
    "0.3",
    "0.4",
    "0.5",
    "0.6",
    "0.7",
    "0.8",
    "0.9",
    "1",
    "1.2",
    "1.5",
]
STOPS: Final = [
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
]
KINDS: Final = (
    ("said", 8), ("plain", 3.5), ("do", 4), ("ask", 4), ("what", 3), ("kw", 1.6),
)  # fmt: skip
"""Kinds of phrasings and their weights. Wordings by hand (`said`) weigh most: templates alone are
learned by heart, and questions put in other words then meet a neighbouring topic."""
ABSENT: Final = (
    "pro version", "premium version", "enterprise edition", "translator", "spell checker", "dictionary",
    "notebook", "character cards", "personas", "roleplay mode", "autopilot", "leaderboard", "arena",
    "auto-update", "parental control", "music player", "prompt library", "template store", "turbo mode",
    "eco mode", "training mode", "model editor", "model store", "chat rooms", "email sending",
    "shopping list", "avatar", "games", "ads", "screenshot tool", "map", "whiteboard", "split screen",
    "macro recorder", "weather widget", "stock ticker", "to-do list", "mail client", "camera", "emoji picker",
    "sticker pack", "news feed", "wallet", "rewards", "achievements", "tutorial videos", "support hotline",
    "chat with a human", "call button", "night shift", "sound effects", "background music", "font picker",
    "drawing mode",
    "vim mode", "kids mode", "beta program", "referral code", "gift card", "invoice page", "widgets",
)  # fmt: skip
"""What people look for in such a program, and localchat has not."""
EXITS: Final = tuple(
    code for code in (*range(8, 130), *range(131, 256)) if code not in (137, 139, 141)
)
FAMILIES: Final = {
    "llama3.1": ("llama 3.1|llama3.1|llama-3.1|meta llama 3.1", "8b 70b"),
    "llama3.2": ("llama 3.2|llama3.2|llama-3.2", "1b 3b"),
    "llama3.3": ("llama 3.3|llama3.3|llama-3.3", "70b"),
    "qwen2.5": ("qwen2.5|qwen 2.5|qwen-2.5", "0.5b 1.5b 3b 7b 14b 32b 72b"),
    "qwen3": ("qwen3|qwen 3|qwen-3", "0.6b 1.7b 4b 8b 14b 32b 30b-a3b"),
    "qwen2.5-coder": ("qwen coder|qwen2.5-coder|qwen 2.5 coder|qwen2.5 coder", "1.5b 3b 7b 14b 32b"),
    "mistral": ("mistral", "7b"),
    "gemma3": ("gemma 3|gemma3|gemma-3|gemma", "270m 1b 4b 12b 27b"),
    "phi4": ("phi4|phi-4|phi 4", "14b"),
    "deepseek-r1": ("deepseek r1|deepseek-r1|deepseek", "1.5b 7b 8b 14b 32b 70b"),
    "smollm2": ("smollm2|smollm|smollm 2", "135m 360m 1.7b"),
}  # fmt: skip
"""Families of the catalogue: how people name them, and their sizes. A test asks the catalogue."""
SEVERAL: Final = {
    "llama|llama 3|llama3|llama-3": (
        "`localchat pull llama3.1:8b`; for little memory `llama3.2:3b`, for much `llama3.3:70b`."
    ),
    "qwen|alibaba's qwen|the qwen models": (
        "`localchat pull qwen2.5:7b`, or the newer `qwen3:8b`, which thinks; `qwen2.5-coder:7b` is for code."
    ),
}
"""Names of families without a version, and what to pull."""
USUAL: Final = {
    "qwen2.5": "7b", "qwen3": "8b", "qwen2.5-coder": "7b", "gemma3": "4b", "deepseek-r1": "7b",
    "smollm2": "1.7b",
}  # fmt: skip
"""The size of a family that is meant where none is named."""
BARE_NAMES: Final = {"llama|llama3|llama 3|llama-3": "llama3.1:8b", "qwen": "qwen2.5:7b"}
"""Families without a version, and the model that is meant."""
ALONE: Final = frozenset(("talk", "absent", "self"))  # never half of a double question
PAIR_CHARS: Final = 420  # limit of each half of a double answer
FEW: Final = ("", "one", "two", "three", "four", "five", "six", "seven", "eight")


def slot(kind: str, rng: Random) -> tuple[str, str]:
    """A value for a slot: (as a person writes it, as the answer writes it)."""
    if kind == "ctx":
        k = rng.choice((2, 4, 8, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128))
        said = rng.choice((f"{k}k", f"{k}k", f"{k * 1024}", f"{k * 1024:,}", f"{k}K", f"{k} k"))
        return said, str(k * 1024)
    if kind == "shell":
        name = rng.choice(("bash", "zsh", "fish"))
        return name, name
    if kind == "temperature":
        heat = rng.choice(TEMPERATURES)
        return heat, heat
    if kind == "word":
        letters = "".join(rng.choices("ABCDEFGHIJKLMNOPRSTUVWXYZ", k=rng.randint(2, 6)))
        word = rng.choice((rng.choice(STOPS), letters))
        return rng.choice((word, f'"{word}"')), word
    if kind == "few":
        few = rng.randint(2, 32)
        said = FEW[few] if few < len(FEW) and rng.random() < 0.4 else str(few)
        return said, str(few)
    if kind == "family":
        return family(rng)
    if kind == "run_name":
        return run_name(rng)
    if kind == "absent":
        name = rng.choice(ABSENT)
        return name, name
    choices = {
        "int": (rng.randint(1, 99), rng.randint(100, 9999), 50 * rng.randint(1, 40)),
        "layers": (rng.randint(1, 80),),
        "exit": (
            rng.choice(EXITS),
            rng.choice((7, 8, 9, 10, 11, 12, 15, 20, 42, 99, 126, 127, 255)),
        ),
        "port": (8080, 8000, 5000, 1234, rng.randint(1024, 65535)),
    }
    value = str(rng.choice(choices[kind]))
    return value, value


def family(rng: Random) -> tuple[str, str]:
    """A family named without a size, and what to pull of it."""
    at = rng.randrange(len(FAMILIES) + 2 * len(SEVERAL))
    if at >= len(FAMILIES):
        names, told = rng.choice(list(SEVERAL.items()))
        return rng.choice(names.split("|")), told
    name, (said, sizes) = list(FAMILIES.items())[at]
    usual = USUAL.get(name, sizes.split()[0])
    there = ", ".join(f"`{size}`" for size in sizes.split())
    told = f"`localchat pull {name}:{usual}`" + (f". Sizes: {there}." if " " in sizes else "")
    return rng.choice(said.split("|")), told


def run_name(rng: Random) -> tuple[str, str]:
    """A model as other programs name it, and its name here: a family, or a family with a size."""
    if rng.random() < 0.2:
        said, name = rng.choice(list(BARE_NAMES.items()))
        return rng.choice(said.split("|")), name
    name, (said, sizes) = rng.choice(list(FAMILIES.items()))
    if rng.random() < 0.5:
        exact = f"{name}:{rng.choice(sizes.split())}"
        return exact, exact
    return rng.choice(said.split("|")), f"{name}:{USUAL.get(name, sizes.split()[0])}"


def _inline(text: str, rng: Random) -> str:
    if "{kvn}" in text:
        total = rng.choice((2048, 4096, 8192, 16384, 32768, 131072))
        text = text.replace("{kvn}", f"{rng.randint(1, total)}/{total}")
    while "{few2}" in text:
        drafted = rng.randint(2, 400)
        text = text.replace("{few2}", f"{rng.randint(0, drafted)}/{drafted}", 1)
    return text.replace("<pct>", "")


class Topics:
    """The topics, with a weighted draw, questions and follow-ups. `facts`: the parsed facts.json."""

    def __init__(self, facts: dict[str, Any]) -> None:
        self.frames: dict[str, list[str]] = facts["frames"]
        self.lexicon: dict[str, list[str]] = dict(facts["lexicon"])
        self.lexicon["pct"] = [
            f"{n} {p}" for n in (10, 20, 37, 50, 63, 75, 90, 99) for p in ("percent", "%")
        ]
        self.all: list[dict[str, Any]] = facts["topics"]
        self.leaning: dict[str, list[list[str]]] = facts["leaning"]["groups"]
        self.example: list[str] = facts["leaning"]["example"]
        self.any: list[list[str]] = facts["leaning"]["any"]
        self.refused: list[list[str]] = facts["leaning"]["refused"]
        self.by_id = {t["id"]: t for t in self.all}
        self.groups: dict[str, list[dict[str, Any]]] = {}
        for topic in self.all:
            if topic.get("shorts") and topic["group"] in CHAINED:
                self.groups.setdefault(topic["group"], []).append(topic)
        counts = [sum(len(t.get(k, ())) for k in dict(KINDS)) for t in self.all]
        self.near: dict[str, list[dict[str, Any]]] = {}
        for topic in self.all:
            self.near.setdefault(topic["group"], []).append(topic)
        self.weights = list(accumulate(1 + min(2.0, n / 12) for n in counts))

    def draw(self, rng: Random) -> dict[str, Any]:
        return rng.choices(self.all, cum_weights=self.weights)[0]

    def _say(self, pattern: str, rng: Random) -> str:
        return phrase(pattern, self.lexicon, rng)

    def _core(self, topic: dict[str, Any], rng: Random) -> str:
        kinds = [(k, w) for k, w in KINDS if topic.get(k)]
        kind = rng.choices([k for k, _ in kinds], [w for _, w in kinds])[0]
        text = self._say(rng.choice(topic[kind]), rng)
        if kind == "do":
            frames = self.frames["to_do"]
            if topic["group"] in ("flag", "flagvalue") and rng.random() < 0.3:
                frames = self.frames["to_do_flag"]
            elif topic["group"] in ("key", "slash", "ui") and rng.random() < 0.3:
                frames = self.frames["to_do_key"]
            return f"{rng.choice(frames)} {text}".strip()
        if kind == "what":
            return rng.choice(self.frames["to_know"]).format(text)
        if kind == "kw" and rng.random() < 0.3:
            words = text.split(" ")
            rng.shuffle(words)
            return " ".join(words)
        return text

    def pasted(self, topic: dict[str, Any], rng: Random) -> tuple[str, str]:
        """Lines from a screen that the topic is about, usually with a short question, and its answer."""
        text: str = rng.choice(topic["says"])
        while "{w}" in text:
            text = text.replace("{w}", rng.choice(self.lexicon["model_word"]), 1)
        while "{n}" in text:
            text = text.replace("{n}", str(rng.randint(1, 99)), 1)
        ask = rng.choice(self.frames["pasted"])
        forms = (f"{text}\n\n{ask}", f"{text}\n\n{ask}", f"{ask}\n{text}", f"{ask}: {text}", text)
        return rng.choice(forms), topic["answer"]

    def pair(self, rng: Random) -> tuple[str, str]:
        """Two questions in one message, and both answers."""
        one = self._short(self.all, rng)
        near = [t for t in self.near[one["group"]] if t is not one]
        two = self._short(near if near and rng.random() < 0.5 else self.all, rng)
        tasks = "do" in one and "do" in two and rng.random() < 0.5
        (first, answer), (second, other) = (self._phrased(t, rng, tasks) for t in (one, two))
        if tasks:
            frame = rng.choice(self.frames["to_do"])
            text = f"{frame} {first}{rng.choice(self.frames['joined_tasks'])} {second}".strip()
        else:
            text = rng.choice(self.frames["joined"]).format(first.rstrip("?. "), second)
        return roughen(text, rng), "\n\n".join(dict.fromkeys((answer, other)))

    def _short(self, topics: list[dict[str, Any]], rng: Random) -> dict[str, Any]:
        """A topic that can be half of a double question; any topic if none of these can."""
        for _ in range(20):
            topic = self.draw(rng) if topics is self.all else rng.choice(topics)
            if topic["group"] not in ALONE and len(topic["answer"]) <= PAIR_CHARS:
                return topic
        return self._short(self.all, rng)

    def question(self, topic: dict[str, Any], rng: Random) -> tuple[str, str]:
        """A question on the topic and its answer."""
        if "says" in topic and rng.random() < 0.4:
            return self.pasted(topic, rng)
        text, answer = self._phrased(topic, rng)
        return roughen(text, rng), answer

    def _phrased(self, topic: dict[str, Any], rng: Random, task: bool = False) -> tuple[str, str]:
        """A question without noise, and its answer. `task`: the bare task, to be joined with another."""
        text = self._say(rng.choice(topic["do"]), rng) if task else self._core(topic, rng)
        text, answer = _inline(text, rng), topic["answer"]
        if "slot" in topic:
            said, value = slot(topic["slot"], rng)
            text, answer = text.replace("{n}", said), answer.replace("{v}", value)
        return text, answer

    def after(
        self, topic: dict[str, Any], rng: Random
    ) -> tuple[str, str, dict[str, Any] | None] | None:
        """A question that depends on the topic before it, its answer, and the topic it leads to."""
        own: list[list[str]] = topic.get("follow", []) + self.leaning.get(topic["group"], [])
        group = [t for t in self.groups.get(topic["group"], ()) if t is not topic]
        if rng.random() < 0.15:
            own = [pair for pair in self.any if pair[1] != "=" or "slot" not in topic]
            group = []
        if own and (not group or rng.random() < 0.5):
            if "example" in topic and rng.random() < 0.3:
                asked = self._say(rng.choice(self.example), rng)
                return roughen(asked, rng, dress=False), f"```\n{topic['example']}\n```", topic
            pattern, answer = rng.choice(own)
            led = self.by_id[answer[1:]] if answer.startswith("@") else None
            if answer == "=":
                led = topic
            text = roughen(self._say(pattern, rng), rng, dress=False)
            return text, led["answer"] if led else answer, led
        if not group:
            return None
        other = rng.choice(group)
        if other.get("do") and rng.random() < 0.4:
            text = rng.choice(self.frames["ellipsis_do"]).format(
                self._say(rng.choice(other["do"]), rng)
            )
        else:
            text = rng.choice(self.frames["ellipsis"]).format(rng.choice(other["shorts"]))
        return roughen(_inline(text, rng), rng, dress=False), other["answer"], other

    def after_refusal(self, rng: Random) -> tuple[str, str]:
        """A question that follows a refusal, and its answer."""
        pattern, answer = rng.choice(self.refused)
        asked = roughen(self._say(pattern, rng), rng, dress=False)
        return asked, self.by_id[answer[1:]]["answer"]

    def every_pattern(self) -> Iterator[tuple[str, str]]:
        """(topic id, pattern) of the whole table, for tests."""
        for topic in self.all:
            for kind in dict(KINDS):
                for pattern in topic.get(kind, ()):
                    yield topic["id"], pattern
            for pattern, _ in topic.get("follow", ()):
                yield topic["id"], pattern
        for group, pairs in self.leaning.items():
            for pattern, _ in pairs:
                yield group, pattern
        for pattern in self.example:
            yield "example", pattern
        for pattern, _ in (*self.any, *self.refused):
            yield "any", pattern


def references(pattern: str) -> list[str]:
    """The lexicon names that a pattern uses."""
    return re.findall(r"<(\w+)>", pattern)
