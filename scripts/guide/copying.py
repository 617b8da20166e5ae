"""Copying and editing: repeat, quote, rename, replace, lists to JSON, fill in the middle.

The texts are random words, invented words and code-like lines, so that the model learns to copy and
not the texts themselves. This is what makes speculation, editing and structured output real on the
guide.
"""

import json
from random import Random
from typing import Any, Final

from refusing import pseudo_word

FIRST: Final = (
    ("what is the first line?", 0), ("Show the first line.", 0), ("first line please", 0),
    ("what is the last line?", -1), ("Show the last line.", -1), ("only the last line", -1),
)  # fmt: skip


class Copying:
    """Draws copying tasks. `facts`: the parsed facts.json."""

    def __init__(self, facts: dict[str, Any]) -> None:
        self.ask: dict[str, list[str]] = facts["copying"]
        words = facts["words"]
        self.words: list[str] = (
            words["things"].split(" ") + words["attributes"].split(" ") + words["places"].split(" ")
        )
        self.words += [
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
            "old",
            "new",
            "red",
            "blue",
        ]
        self.names: list[str] = words["code_names"].split(" ")

    def word(self, rng: Random) -> str:
        draw = rng.random()
        if draw < 0.6:
            return rng.choice(self.words)
        if draw < 0.8:
            return pseudo_word(rng)
        if draw < 0.9:
            return str(rng.randint(0, 99999))
        return rng.choice((self.name(rng), rng.choice(self.words).capitalize()))

    def name(self, rng: Random) -> str:
        """An identifier."""
        draw = rng.random()
        if draw < 0.45:
            return rng.choice(self.names)
        if draw < 0.75:
            return f"{rng.choice(self.names)}_{rng.choice(self.names)}"
        if draw < 0.85:
            return rng.choice(
                ("foo", "bar", "baz", "x", "y", "tmp", "n", "i", "val", "res", "acc", "qux")
            )
        return rng.choice(
            (pseudo_word(rng), rng.choice(self.names) + rng.choice(self.names).capitalize())
        )

    def words_text(self, rng: Random, low: int = 1, high: int = 12) -> str:
        text = " ".join(self.word(rng) for _ in range(rng.randint(low, high)))
        if rng.random() < 0.2:
            text += rng.choice((".", "!", "?", "..."))
        return text

    def prose(self, rng: Random) -> str:
        lines = [self.words_text(rng, 3, 14) for _ in range(rng.choice((1, 1, 2, 3, 5, 8)))]
        return rng.choice(("\n", ". ", "\n\n")).join(lines)

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
        return text, [x for x in dict.fromkeys((a, b, c, d)) if _count(text, x)]

    def long_code(self, rng: Random) -> tuple[str, list[str]]:
        parts = [self.code(rng) for _ in range(rng.choice((1, 1, 2, 2, 3, 5, 8)))]
        names = list(dict.fromkeys(n for _, ns in parts for n in ns))
        return "\n\n".join(t for t, _ in parts), names

    def draw(self, rng: Random) -> list[tuple[str, str]]:
        """One task as (user, assistant) pairs; mostly one, sometimes an edit of the last answer
        follows.
        """
        kinds = (
            self._repeat,
            self._quote,
            self._fence,
            self._rename,
            self._swap_word,
            self._lists,
            self._record,
            self._edit_record,
            self._lines,
        )
        return rng.choices(kinds, (4, 2.5, 2, 5, 2, 4, 2, 2, 1.5))[0](rng)

    def _repeat(self, rng: Random) -> list[tuple[str, str]]:
        text = self.prose(rng) if rng.random() < 0.3 else self.words_text(rng)
        return [(_front(rng, rng.choice(self.ask["repeat"])).format(text), text)]

    def _quote(self, rng: Random) -> list[tuple[str, str]]:
        text = self.prose(rng)
        quoted = "\n".join(f"> {line}" if line else ">" for line in text.split("\n"))
        return [(rng.choice(self.ask["quote"]).format(text), quoted)]

    def _fence(self, rng: Random) -> list[tuple[str, str]]:
        text, _ = self.long_code(rng)
        return [(rng.choice(self.ask["fence"]).format(text), f"```\n{text}\n```")]

    def _rename(self, rng: Random) -> list[tuple[str, str]]:
        text, names = self.long_code(rng)
        turns: list[tuple[str, str]] = []
        old, new = rng.choice(names), self.name(rng)
        others = [n for n in names if n not in (old, new)]
        if others and rng.random() < 0.2:
            return self._rename_two(text, old, rng.choice(others), rng)
        said = rng.choice(("{}", "{}", "`{}`"))
        ask = _front(rng, rng.choice(self.ask["rename"])).format(
            a=said.format(old), b=said.format(new), t=text
        )
        text = _renamed(text, old, new)
        turns.append((ask, f"```\n{text}\n```"))
        if rng.random() < 0.3 and (
            left := [n for n in names if n not in (old, new) and _count(text, n)]
        ):
            old, new = rng.choice(left), self.name(rng)
            text = _renamed(text, old, new)
            turns.append(
                (
                    rng.choice(
                        (
                            "and rename {} to {}",
                            "now rename {} to {}",
                            "and {} to {}",
                            "Also change {} to {}.",
                        )
                    ).format(old, new),
                    f"```\n{text}\n```",
                )
            )
        return turns

    def _rename_two(self, text: str, one: str, two: str, rng: Random) -> list[tuple[str, str]]:
        left = [n for n in self.names if not _count(text, n)]
        first, second = rng.sample(left, 2)
        ask = rng.choice(
            (
                "rename {} to {} and {} to {}",
                "replace {} by {} and {} by {}",
                "change {} to {}, and {} to {}",
            )
        )
        ask = _front(rng, ask).format(one, first, two, second)
        edited = _renamed(_renamed(text, one, first), two, second)
        shown = rng.choice(
            (f"{text}\n\n{ask}", f"{ask}:\n\n{text}", f"{ask} in this code:\n\n{text}")
        )
        return [(shown, f"```\n{edited}\n```")]

    def _swap_word(self, rng: Random) -> list[tuple[str, str]]:
        words = [self.word(rng) for _ in range(rng.randint(3, 16))]
        old, new = rng.choice(words), self.word(rng)
        text = " ".join(words)
        ask = _front(rng, rng.choice(self.ask["rename"]).replace(" in this code", "")).format(
            a=old, b=new, t=text
        )
        return [(ask, " ".join(new if w == old else w for w in words))]

    def _lists(self, rng: Random) -> list[tuple[str, str]]:
        items = list(
            dict.fromkeys(
                " ".join(self.word(rng) for _ in range(rng.choice((1, 1, 1, 2))))
                for _ in range(rng.randint(2, 9))
            )
        )
        shown = rng.choice(
            (
                ", ".join(items),
                ", ".join(items),
                "\n".join(items),
                "; ".join(items),
                "\n".join(f"- {i}" for i in items),
            )
        )
        if "\n" in shown:
            shown = "\n" + shown
        forms = {
            "json": (self.ask["to_json"], json.dumps(items, ensure_ascii=False)),
            "list": (self.ask["to_bullets"], "\n".join(f"- {i}" for i in items)),
            "numbers": (
                self.ask["to_numbers"],
                "\n".join(f"{n}. {i}" for n, i in enumerate(items, 1)),
            ),
        }
        first = rng.choices(list(forms), (5, 2, 1))[0]
        asks, answer = forms[first]
        turns = [(_front(rng, rng.choice(asks)).format(shown).strip(), answer)]
        if rng.random() < 0.3:
            other = rng.choice([f for f in forms if f != first])
            how = {"json": "json", "list": "a bullet list", "numbers": "a numbered list"}[other]
            turns.append(
                (
                    rng.choice(
                        ("and as {}", "now as {}", "as {} please", "And as {}?", "make it {}")
                    ).format(how),
                    forms[other][1],
                )
            )
        return turns

    def _record(self, rng: Random) -> list[tuple[str, str]]:
        keys = list(dict.fromkeys(self.name(rng) for _ in range(rng.randint(1, 6))))
        record = {
            k: rng.choice((self.word(rng), rng.randint(0, 9999), rng.random() < 0.5)) for k in keys
        }
        shown = {k: str(v).lower() if isinstance(v, bool) else v for k, v in record.items()}
        pairs = rng.choice(("\n", ", ", "; ")).join(
            f"{k}{rng.choice((': ', ' = ', '='))}{v}" for k, v in shown.items()
        )
        record = {k: int(v) if isinstance(v, str) and v.isdigit() else v for k, v in record.items()}
        ask = rng.choice(
            (
                "Turn this into a JSON object: {}",
                "as a json object: {}",
                "{}\n\nAs JSON object.",
                "make a JSON object of {}",
                "write as json object:\n{}",
            )
        )
        return [(_front(rng, ask).format(pairs), json.dumps(record, ensure_ascii=False))]

    def _edit_record(self, rng: Random) -> list[tuple[str, str]]:
        record: dict[str, Any] = {
            self.name(rng): rng.choice((self.word(rng), rng.randint(0, 999)))
            for _ in range(rng.randint(1, 5))
        }
        key = rng.choice(list(record))
        value = rng.choice((self.word(rng), rng.randint(0, 999)))
        indent = rng.choice((None, None, 2))
        before = json.dumps(record, indent=indent, ensure_ascii=False)
        after = json.dumps(record | {key: value}, indent=indent, ensure_ascii=False)
        said = value if isinstance(value, int) or rng.random() < 0.5 else f'"{value}"'
        ask = rng.choice(
            (
                f"set {key} to {said}",
                f"change {key} to {said}",
                f"change the {key} to {said}",
                f"{key} should be {said}",
                f"replace the value of {key} by {said}",
            )
        )
        ask = _front(rng, ask)
        return [
            (
                rng.choice((f"{before}\n\n{ask}", f"{ask}:\n\n{before}", f"{ask} in {before}")),
                f"```json\n{after}\n```",
            )
        ]

    def _lines(self, rng: Random) -> list[tuple[str, str]]:
        lines = [self.words_text(rng, 2, 8) for _ in range(rng.randint(2, 7))]
        ask, at = rng.choice(FIRST)
        return [("\n".join(lines) + "\n\n" + ask, lines[at])]

    def infill(self, rng: Random) -> tuple[str, str, str]:
        """(prefix, suffix, middle) of a code-like text, cut at random places."""
        text, _ = self.long_code(rng)
        low, high = sorted(rng.sample(range(len(text) + 1), 2))
        return text[:low], text[high:], text[low:high]


def _front(rng: Random, form: str) -> str:
    """The form with a capital at its start, sometimes; a text that stands first keeps its own."""
    return form[:1].upper() + form[1:] if rng.random() < 0.35 else form


def _pieces(text: str, name: str) -> list[tuple[int, int]]:
    """Where `name` stands as a whole word."""
    found, at = [], 0
    while (at := text.find(name, at)) >= 0:
        end = at + len(name)
        before, after = text[at - 1 : at], text[end : end + 1]
        if not (before.isalnum() or before == "_" or after.isalnum() or after == "_"):
            found.append((at, end))
        at = end
    return found


def _count(text: str, name: str) -> int:
    return len(_pieces(text, name))


def _renamed(text: str, old: str, new: str) -> str:
    for at, end in reversed(_pieces(text, old)):
        text = text[:at] + new + text[end:]
    return text
