"""Copying and editing tasks: repeat, quote, rename, replace, fill in the middle.

The texts are random words, invented words and code-like lines, so the model learns to copy instead of
learning the texts. Speculation, editing and structured output on the guide depend on this skill.
"""

import json
from random import Random
from typing import Any, Final

from editing import Editing
from reading import Reading
from scraps import Scraps, count, front, renamed

FIRST: Final = (
    ("what is the first line?", 0), ("Show the first line.", 0), ("first line please", 0),
    ("what is the last line?", -1), ("Show the last line.", -1), ("only the last line", -1),
)  # fmt: skip


class Copying:
    """Draws copying tasks, editing tasks among them. `facts`: the parsed facts.json."""

    def __init__(self, facts: dict[str, Any]) -> None:
        self.ask: dict[str, list[str]] = facts["copying"]
        self.scraps = Scraps(facts)
        self.editing = Editing(facts, self.scraps)
        self.reading = Reading(facts, self.scraps)

    def draw(self, rng: Random) -> list[tuple[str, str]]:
        """One task as (user, assistant) pairs; usually one, sometimes followed by an edit of the answer."""
        kinds = (
            self._repeat,
            self._quote,
            self._fence,
            self._rename,
            self._swap_word,
            self._edit_record,
            self._lines,
            self.editing.draw,
            self.reading.draw,
        )
        return rng.choices(kinds, (4, 3, 1.6, 4, 2, 1.6, 1.6, 9, 3.5))[0](rng)

    def _repeat(self, rng: Random) -> list[tuple[str, str]]:
        text = self.scraps.prose(rng) if rng.random() < 0.3 else self.scraps.words_text(rng)
        return [(front(rng, rng.choice(self.ask["repeat"])).format(text), text)]

    def _quote(self, rng: Random) -> list[tuple[str, str]]:
        text = self.scraps.prose(rng)
        quoted = "\n".join(f"> {line}" if line else ">" for line in text.split("\n"))
        return [(rng.choice(self.ask["quote"]).format(text), quoted)]

    def _fence(self, rng: Random) -> list[tuple[str, str]]:
        text, _ = self.scraps.long_code(rng)
        return [(rng.choice(self.ask["fence"]).format(text), f"```\n{text}\n```")]

    def _rename(self, rng: Random) -> list[tuple[str, str]]:
        text, names = self.scraps.long_code(rng)
        turns: list[tuple[str, str]] = []
        old, new = rng.choice(names), self.scraps.name(rng)
        others = [n for n in names if n not in (old, new)]
        if others and rng.random() < 0.2:
            return self._rename_two(text, old, rng.choice(others), rng)
        said = rng.choice(("{}", "{}", "`{}`"))
        ask = front(rng, rng.choice(self.ask["rename"])).format(
            a=said.format(old), b=said.format(new), t=text
        )
        text = renamed(text, old, new)
        turns.append((ask, f"```\n{text}\n```"))
        if rng.random() < 0.3 and (
            left := [n for n in names if n not in (old, new) and count(text, n)]
        ):
            old, new = rng.choice(left), self.scraps.name(rng)
            text = renamed(text, old, new)
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
        left = [n for n in self.scraps.names if not count(text, n)]
        first, second = rng.sample(left, 2)
        ask = rng.choice(
            (
                "rename {} to {} and {} to {}",
                "replace {} by {} and {} by {}",
                "change {} to {}, and {} to {}",
            )
        )
        ask = front(rng, ask).format(one, first, two, second)
        edited = renamed(renamed(text, one, first), two, second)
        shown = rng.choice(
            (f"{text}\n\n{ask}", f"{ask}:\n\n{text}", f"{ask} in this code:\n\n{text}")
        )
        return [(shown, f"```\n{edited}\n```")]

    def _swap_word(self, rng: Random) -> list[tuple[str, str]]:
        words = [self.scraps.word(rng) for _ in range(rng.randint(3, 16))]
        old, new = rng.choice(words), self.scraps.word(rng)
        text = " ".join(words)
        ask = front(rng, rng.choice(self.ask["rename"]).replace(" in this code", "")).format(
            a=old, b=new, t=text
        )
        return [(ask, " ".join(new if w == old else w for w in words))]

    def _edit_record(self, rng: Random) -> list[tuple[str, str]]:
        record: dict[str, Any] = {
            self.scraps.name(rng): rng.choice((self.scraps.word(rng), rng.randint(0, 999)))
            for _ in range(rng.randint(1, 5))
        }
        key = rng.choice(list(record))
        value = rng.choice((self.scraps.word(rng), rng.randint(0, 999)))
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
        ask = front(rng, ask)
        return [
            (
                rng.choice((f"{before}\n\n{ask}", f"{ask}:\n\n{before}", f"{ask} in {before}")),
                f"```json\n{after}\n```",
            )
        ]

    def _lines(self, rng: Random) -> list[tuple[str, str]]:
        lines = [self.scraps.words_text(rng, 2, 8) for _ in range(rng.randint(2, 7))]
        ask, at = rng.choice(FIRST)
        return [("\n".join(lines) + "\n\n" + ask, lines[at])]

    def infill(self, rng: Random) -> tuple[str, str, str]:
        """(prefix, suffix, middle) of a code-like text, cut at random places."""
        text, _ = self.scraps.long_code(rng)
        low, high = sorted(rng.sample(range(len(text) + 1), 2))
        return text[:low], text[high:], text[low:high]
