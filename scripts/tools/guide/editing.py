"""Editing tasks on a given text: rename, quote, change case, replace, remove. Others are refused.

topics/copying.toml has the phrasings. Every answer can be computed from the question.
"""

import json
from collections.abc import Callable
from random import Random
from typing import Any, Final, TypeAlias

from scraps import Scraps, count, front, renamed

Turns: TypeAlias = list[tuple[str, str]]
ORDINALS: Final = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh")
FEW: Final = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


class Editing:
    """Draws editing tasks. `facts`: the parsed facts.json."""

    def __init__(self, facts: dict[str, Any], scraps: Scraps) -> None:
        self.ask: dict[str, list[str]] = facts["copying"]
        self.scraps = scraps
        self.kinds: dict[Callable[[Random], Turns], float] = {
            self._rename: 5,
            self._replace: 3,
            self._part: 5,
            self._some_words: 3,
            self._case: 2,
            self._remove: 2.5,
            self._unlist: 2,
            self._change_list: 2,
        }

    def draw(self, rng: Random) -> Turns:
        """One task as (user, assistant) pairs."""
        return rng.choices(list(self.kinds), list(self.kinds.values()))[0](rng)

    def _asked(self, kind: str, text: str, rng: Random, **values: str) -> str:
        """The task with its text: after a colon, above it, or below it."""
        form = rng.choice(self.ask[kind])
        task = form.format(**values)
        task = task if form.startswith(("{", "`")) else front(rng, task)
        forms = [f"{task}: {text}", f"{task}:\n{text}", f"{task}:\n\n{text}"]
        if "\n" not in text:
            forms += [f"{task}: {text}", f"{task}: {text}", f'{task}: "{text}"']
        if not task.endswith((" of", " in", " from")):
            forms += [f"{text}\n\n{task}"] * 2
        elif "\n" not in text:
            forms += [f"{task} {text}"] * 2
        return rng.choice(forms)

    def _rename(self, rng: Random) -> Turns:
        """A name in a single line of code."""
        text, names = self.scraps.line_of_code(rng)
        old, new = rng.choice(names), self.scraps.name(rng)
        turns = [
            (self._asked("edit_name", text, rng, a=old, b=new), _fenced(renamed(text, old, new)))
        ]
        if rng.random() < 0.2:
            text, third = renamed(text, old, new), self.scraps.name(rng)
            ask = rng.choice(("now {} instead", "and to {}", "call it {}", "no, {}")).format(third)
            turns.append((ask, _fenced(renamed(text, new, third))))
        return turns

    def _replace(self, rng: Random) -> Turns:
        """A word in a sentence or in lines."""
        text = self.scraps.prose(rng) if rng.random() < 0.3 else self.scraps.sentence(rng)
        whole = [w for w in text.replace("\n", " ").split(" ") if w.isalnum()]
        if not whole:
            return self._rename(rng)
        old, new = rng.choice(whole), self.scraps.word(rng)
        return [(self._asked("edit_word", text, rng, a=old, b=new), renamed(text, old, new))]

    def _part(self, rng: Random) -> Turns:
        """A sentence, a line or an item by its number."""
        kind = rng.choice(("sentence", "sentence", "line", "item"))
        if kind == "item":
            parts = self.scraps.items(rng, 2, 7)
            text = ", ".join(parts)
        else:
            parts = [self.scraps.sentence(rng) for _ in range(rng.randint(2, 6))]
            text = (" " if kind == "sentence" else "\n").join(parts)
        at = rng.randrange(min(len(parts), len(ORDINALS)))
        which = ORDINALS[at]
        if at == len(parts) - 1 and rng.random() < 0.5:
            which = "last"
        if rng.random() < 0.4:
            return [(self._asked("quote_part", text, rng, n=which, k=kind), f"> {parts[at]}")]
        return [(self._asked("get_part", text, rng, n=which, k=kind), parts[at])]

    def _some_words(self, rng: Random) -> Turns:
        """The first or the last N words."""
        words = [self.scraps.word(rng) for _ in range(rng.randint(2, 14))]
        n = rng.randint(1, min(9, len(words)))
        end = rng.choice(("first", "first", "last"))
        said = rng.choice((str(n), FEW[n]))
        task = "word" if n == 1 else "words"
        if n == 1 and rng.random() < 0.5:
            said = ""
        ask = self._asked("some_words", " ".join(words), rng, e=end, n=said, w=task)
        return [(ask.replace("  ", " "), " ".join(words[:n] if end == "first" else words[-n:]))]

    def _case(self, rng: Random) -> Turns:
        words = [rng.choice(self.scraps.known) for _ in range(rng.randint(1, 7))]
        text = self.scraps.said(rng).lower() if rng.random() < 0.35 else " ".join(words)
        if rng.random() < 0.35:
            return [(self._asked("lower", text.upper(), rng), text)]
        if rng.random() < 0.45:
            return [(self._asked("title", text, rng), text.title())]
        return [(self._asked("upper", text, rng), text.upper())]

    def _remove(self, rng: Random) -> Turns:
        """A text without one word, or without duplicates."""
        if rng.random() < 0.4:
            items = self.scraps.items(rng, 2, 5)
            twice = items + rng.choices(items, k=rng.randint(1, 2))
            rng.shuffle(twice)
            glue = rng.choice((", ", "\n"))
            return [(self._asked("unique", glue.join(twice), rng), glue.join(dict.fromkeys(twice)))]
        words = [self.scraps.word(rng) for _ in range(rng.randint(3, 12))]
        gone = rng.choice(words)
        kept = [w for w in words if w != gone]
        if not kept:
            return self._rename(rng)
        return [(self._asked("remove", " ".join(words), rng, a=gone), " ".join(kept))]

    def _unlist(self, rng: Random) -> Turns:
        """A bullet list, a JSON list or lines to one line with commas; words to lines."""
        items = self.scraps.items(rng)
        draw = rng.random()
        if draw < 0.3:
            return [(self._asked("to_lines", ", ".join(items), rng), "\n".join(items))]
        shown = rng.choice(
            ("\n".join(f"- {i}" for i in items), json.dumps(items, ensure_ascii=False),
             "\n".join(items))
        )  # fmt: skip
        return [(self._asked("to_commas", shown, rng), ", ".join(items))]

    def _change_list(self, rng: Random) -> Turns:
        """A list with an item added, or only its lines with a word."""
        if rng.random() < 0.5:
            items, new = self.scraps.items(rng), self.scraps.word(rng)
            as_json = rng.random() < 0.5
            before, after = ([*items], [*items, new])
            shown = [
                json.dumps(x, ensure_ascii=False) if as_json else ", ".join(x)
                for x in (before, after)
            ]
            return [(self._asked("add_item", shown[0], rng, a=new), shown[1])]
        lines = [self.scraps.words_text(rng, 2, 6) for _ in range(rng.randint(2, 6))]
        word = rng.choice(rng.choice(lines).rstrip(".!?").split(" "))
        kept = [line for line in lines if count(line, word)]
        if not kept:
            return self._rename(rng)
        return [(self._asked("grep", "\n".join(lines), rng, a=word), "\n".join(kept))]


def _fenced(text: str) -> str:
    return f"```\n{text}\n```"
