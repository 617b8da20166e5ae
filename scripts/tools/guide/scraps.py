"""Random material for copying tasks: words, names, lines and code-like texts."""

from random import Random
from typing import Any, Final

from refusing import pseudo_word

SHORT_NAMES: Final = [
    "foo",
    "bar",
    "baz",
    "x",
    "y",
    "tmp",
    "n",
    "i",
    "val",
    "res",
    "acc",
    "qux",
    "a",
    "b",
]
PLAIN: Final = [
    "the",
    "a",
    "and",
    "of",
    "to",
    "in",
    "is",
    "was",
    "not",
    "very",
    "with",
    "for",
    "moved",
    "came",
    "went",
    "said",
    "has",
    "three",
    "seven",
]
LETTERS: Final = "abcdefghijklmnopqrstuvwxyz0123456789"


class Scraps:
    """Draws scraps of text. `facts`: the parsed facts.json."""

    def __init__(self, facts: dict[str, Any]) -> None:
        words = facts["words"]
        self.natural: dict[str, list[str]] = facts["pastes"]
        self.things: list[str] = words["things"].split(" ")
        self.known: list[str] = [
            word
            for name in ("things", "attributes", "places", "common")
            for word in words[name].split(" ")
        ] + PLAIN
        self.known += self.natural["people"] + self.natural["cities"] + self.natural["verbs"]
        self.names: list[str] = words["code_names"].split(" ")
        self.hosts: list[str] = words["hosts"].split(" ")

    def word(self, rng: Random) -> str:
        """A word, an invented word, a number or a name."""
        draw = rng.random()
        if draw < 0.6:
            return rng.choice(self.known) if draw > 0.05 else rng.choice(self.things) + "s"
        if draw < 0.76:
            return pseudo_word(rng)
        if draw < 0.8:
            return "".join(rng.choices(LETTERS, k=rng.randint(2, 6)))
        if draw < 0.9:
            return str(rng.randint(0, 99999 if draw < 0.85 else 99))
        return rng.choice((self.name(rng), rng.choice(self.known).capitalize()))

    def name(self, rng: Random) -> str:
        """An identifier."""
        draw = rng.random()
        if draw < 0.45:
            return rng.choice(self.names)
        if draw < 0.7:
            return f"{rng.choice(self.names)}_{rng.choice(self.names)}"
        if draw < 0.85:
            return rng.choice(SHORT_NAMES)
        if draw < 0.92:
            return pseudo_word(rng)
        return rng.choice(self.names) + rng.choice(self.names).capitalize()

    def words_text(self, rng: Random, low: int = 1, high: int = 12) -> str:
        """Some words in a row."""
        text = " ".join(self.word(rng) for _ in range(rng.randint(low, high)))
        if rng.random() < 0.2:
            text += rng.choice((".", "!", "?", "..."))
        return text

    def filled(self, text: str, rng: Random) -> str:
        """The text with people, things, days, places and numbers for its placeholders."""
        people, things = rng.sample(self.natural["people"], 2), rng.sample(self.things, 2)
        days = rng.sample(self.natural["days"], 2)
        for name, value in (
            ("p", people[0]), ("q", people[1]), ("x", things[0]), ("y", things[1]), ("d", days[0]),
            ("e", days[1]), ("c", rng.choice(self.natural["cities"])), ("n", str(rng.randint(2, 980))),
            ("v", rng.choice(self.natural["verbs"])),
        ):  # fmt: skip
            text = text.replace("{" + name + "}", value)
        return text

    def said(self, rng: Random) -> str:
        """A sentence that a person might write."""
        text = self.filled(rng.choice(self.natural["sentences"]), rng)
        return text[:1].upper() + text[1:] + rng.choice((".", ".", ".", ".", "!"))

    def sentence(self, rng: Random) -> str:
        """Words with an initial capital and a full stop."""
        if rng.random() < 0.45:
            return self.said(rng)
        text = " ".join(self.word(rng) for _ in range(rng.randint(2, 9)))
        return text[:1].upper() + text[1:] + rng.choice((".", ".", ".", "!", "?"))

    def prose(self, rng: Random) -> str:
        """One to eight lines or sentences."""
        if rng.random() < 0.4:
            return rng.choice((" ", "\n")).join(
                self.said(rng) for _ in range(rng.choice((1, 1, 2, 3, 5)))
            )
        lines = [self.words_text(rng, 3, 14) for _ in range(rng.choice((1, 1, 2, 3, 5, 8)))]
        return rng.choice(("\n", ". ", "\n\n")).join(lines)

    def items(self, rng: Random, low: int = 2, high: int = 9) -> list[str]:
        """Distinct short items of a list."""
        count = rng.randint(low, high)
        return list(
            dict.fromkeys(
                " ".join(self.word(rng) for _ in range(rng.choice((1, 1, 1, 2))))
                for _ in range(count)
            )
        )

    def address(self, rng: Random) -> str:
        """An email address that does not exist."""
        user = rng.choice((rng.choice(self.known), pseudo_word(rng), self.name(rng)))
        if rng.random() < 0.3:
            user += rng.choice(".-_") + rng.choice(
                (rng.choice(self.known), str(rng.randint(1, 99)))
            )
        return f"{user}@{rng.choice((rng.choice(self.hosts), pseudo_word(rng) + '.com'))}"

    def line_of_code(self, rng: Random) -> tuple[str, list[str]]:
        """A line of code and the identifiers in it."""
        a, b, c = (self.name(rng) for _ in range(3))
        n, m = rng.randint(0, 99), rng.randint(1, 9)
        text = rng.choice(
            (
                f"{a} = {a} + {m}",
                f"{a} = {b} + {c}",
                f"{a} += {b}",
                f"print({a})",
                f"print({a}, {b})",
                f"return {a} * {n}",
                f"{a} = {b}({c})",
                f"{a} = {b}({a}, {n})",
                f"if {a} > {n}: {b}({a})",
                f"{a} = [{b} for {b} in {c}]",
                f"for {a} in {b}: {c}({a})",
                f"def {a}({b}): return {b} + {n}",
                f"let {a} = {b}.{c}({n});",
                f"const {a} = {b} + {a};",
                f"int {a} = {n}; {b}({a});",
                f"SELECT {a} FROM {b} WHERE {a} = {n}",
                f"while {a} < {n}: {a} = {a} + {b}",
                f"{a}.{b}({c}) == {a}.{b}({n})",
                f'{a} = "{b}"',
                f"echo ${a} | {b} > {c}.txt",
                f"{a}: {b}",
                f"lambda {a}: {a} - {n}",
                f"assert {a} == {b}, {a}",
            )
        )
        return text, [x for x in dict.fromkeys((a, b, c)) if count(text, x)]

    def code(self, rng: Random) -> tuple[str, list[str]]:
        """A code-like text and the identifiers in it."""
        a, b, c, d = (self.name(rng) for _ in range(4))
        n, m, w = rng.randint(0, 999), rng.randint(0, 99), pseudo_word(rng)
        blocks = (
            f"{a} = {n}\nfor {b} in {c}:\n    {a} += {b}\nprint({a})",
            f"def {a}({b}, {c}):\n    {d} = {b} + {c}\n    return {d} * {n}",
            f"if {a} > {n}:\n    {b} = {a} - {m}\nelse:\n    {b} = {c}",
            f"{a} = [{b} for {b} in {c} if {b} != {n}]\nprint(len({a}))",
            f"class {a.capitalize()}:\n    def __init__(self, {b}):\n"
            f"        self.{b} = {b}\n        self.{c} = {n}",
            f"while {a} < {n}:\n    {a} = {a} + {m}\n    {b}.append({a})",
            f'{{\n  "{a}": {n},\n  "{b}": "{w}",\n  "{c}": [{m}, {n}]\n}}',
            f'[{a}]\n{b} = {n}\n{c} = "{w}"\n{d} = true',
            f'for {a} in *.txt; do\n  echo "${a}" >> {b}.log\ndone',
            f"const {a} = ({b}) => {b} + {n};\nconsole.log({a}({m}));",
            f"int {a} = {n};\nfor (int {b} = 0; {b} < {m}; {b}++) {{\n    {a} += {c}[{b}];\n}}",
            f"SELECT {a}, {b} FROM {c} WHERE {a} = {n} ORDER BY {b};",
            f"{a}: {n}\n{b}: {w}\n{c}:\n  - {m}\n  - {d}",
            f"with open({a}) as {b}:\n    {c} = {b}.read()\nprint({c}, {n})",
            f"try:\n    {a} = {b}({n})\nexcept ValueError:\n    {a} = {m}\nreturn {a}",
        )
        text = rng.choice(blocks)
        return text, [x for x in dict.fromkeys((a, b, c, d)) if count(text, x)]

    def long_code(self, rng: Random) -> tuple[str, list[str]]:
        """One to eight code-like texts."""
        parts = [self.code(rng) for _ in range(rng.choice((1, 1, 2, 2, 3, 5, 8)))]
        names = list(dict.fromkeys(n for _, ns in parts for n in ns))
        return "\n\n".join(t for t, _ in parts), names


def front(rng: Random, form: str) -> str:
    """The text with an initial capital, sometimes; a text that comes first keeps its own."""
    return form[:1].upper() + form[1:] if rng.random() < 0.35 else form


def _pieces(text: str, name: str) -> list[tuple[int, int]]:
    """Positions of `name` as a whole word."""
    found, at = [], 0
    while (at := text.find(name, at)) >= 0:
        end = at + len(name)
        before, after = text[at - 1 : at], text[end : end + 1]
        if not (before.isalnum() or before == "_" or after.isalnum() or after == "_"):
            found.append((at, end))
        at = end
    return found


def count(text: str, name: str) -> int:
    """How often `name` occurs in the text as a whole word."""
    return len(_pieces(text, name))


def renamed(text: str, old: str, new: str) -> str:
    """The text with `new` for every whole word `old`."""
    for at, end in reversed(_pieces(text, old)):
        text = text[:at] + new + text[end:]
    return text
