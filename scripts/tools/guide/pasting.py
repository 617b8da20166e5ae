"""Texts with a task that the guide cannot do: pasted code, diffs, logs, mails, tables, or a line of text."""

from random import Random
from typing import Any

from grammar import phrase
from noise import roughen, typo
from scraps import Scraps


class Pasting:
    """Draws pasted texts. `facts`: the parsed facts.json. `abroad`: some are in other languages."""

    def __init__(
        self, facts: dict[str, Any], lexicon: dict[str, list[str]], *, abroad: bool = True
    ) -> None:
        self.words: dict[str, Any] = facts["pastes"]
        self.lexicon = lexicon
        self.scraps = Scraps(facts)
        answers = [t["answer"] for t in facts["topics"] if "\n" not in t["answer"]]
        self.about_localchat = [
            part
            for answer in answers
            for part in answer.split(". ")
            if 20 < len(part) < 120 and "{" not in part
        ]
        tongues = facts["foreign"].values() if abroad else ()
        self.abroad = [p for t in tongues if isinstance(t, dict) for p in t["other"]]

    def draw(self, rng: Random) -> tuple[str, str]:
        """A text with a task that the guide cannot do, and the refusal."""
        kind = rng.choices(("task", "code", "log", "prose", "table"), (14, 5, 4, 4, 1.5))[0]
        if kind == "task":
            return self._task(rng), self.words["answer"]
        text = {"code": self._code, "log": self._log, "prose": self.prose, "table": self._table}[
            kind
        ](rng)
        ask = phrase(rng.choice(self.words[kind]), self.lexicon, rng)
        forms = (
            f"{text}\n\n{ask}",
            f"{text}\n\n{ask}",
            f"{text}\n\n{ask}",
            f"{ask}\n\n{text}",
            f"{ask}:\n{text}",
        )
        return rng.choice(forms), self.words["answer"]

    def _task(self, rng: Random) -> str:
        """A task with its text in one line, in the words of people in a hurry."""
        task = phrase(rng.choice(self.words["tasks"]), self.lexicon, rng)
        before, _, after = task.partition("{t}")
        if before:
            before = roughen(before.strip(), rng, dress=False).rstrip("?!. ")
            before += rng.choice((" ", " ", " ", "\n", "")) if before[-1:] == ":" else " "
        if after and rng.random() < 0.3:
            after = " " + roughen(after.strip(), rng, dress=False)
        text = self._line(rng)
        text = rng.choice((text, text, text, f'"{text}"', f"'{text}'"))
        return f"{before}{text}{after}"

    def _line(self, rng: Random) -> str:
        """A sentence or two of any kind: about life, about localchat, in another language, or random words."""
        draw = rng.random()
        text: str
        if draw < 0.35:
            text = rng.choice(self.words["subjects_of_tasks"])
        elif draw < 0.6:
            text = " ".join(self.scraps.said(rng) for _ in range(rng.choice((1, 1, 2, 3))))
        elif draw < 0.78:
            text = rng.choice(self.about_localchat)
        elif draw < 0.86 and self.abroad:
            text = phrase(rng.choice(self.abroad), self.lexicon, rng)
        else:
            text = self.scraps.words_text(rng, 2, 9)
        if rng.random() < 0.3:
            words = text.split(" ")
            at = rng.randrange(len(words))
            if len(words[at]) >= 4 and words[at].isalpha():
                words[at] = typo(words[at], rng)
            text = " ".join(words)
        return text.lower().rstrip(".") if rng.random() < 0.35 else text

    def prose(self, rng: Random) -> str:
        """A few sentences, sometimes as a mail."""
        text = " ".join(self.scraps.said(rng) for _ in range(rng.choice((1, 2, 3, 4, 6))))
        if rng.random() < 0.35:
            one, two = rng.sample(self.words["people"], 2)
            hail = rng.choice(("Dear {},", "Hi {},", "Hello {},", "Dear team,")).format(one)
            bye = rng.choice(("Best,", "Kind regards,", "Thanks,", "Bye,"))
            text = f"{hail}\n\n{text}\n\n{bye}\n{two}"
        return text

    def _filled(self, text: str, rng: Random) -> str:
        while "{w}" in text:
            text = text.replace("{w}", self.scraps.name(rng), 1)
        while "{n}" in text:
            text = text.replace("{n}", str(rng.randint(1, rng.choice((9, 99, 999)))), 1)
        return text

    def _code(self, rng: Random) -> str:
        if rng.random() < 0.45:
            return self._filled(rng.choice(self.words["snippets"]).strip("\n"), rng)
        text, names = self.scraps.long_code(rng)
        draw = rng.random()
        if draw < 0.2:
            new = text.replace(rng.choice(names), self.scraps.name(rng), 1)
            signs = [f"-{line}" for line in text.split("\n")[:4]]
            signs += [f"+{line}" for line in new.split("\n")[:4]]
            name = self.scraps.name(rng)
            head = f"diff --git a/{name}.py b/{name}.py\n" if draw < 0.12 else ""
            return f"{head}@@ -{rng.randint(1, 90)},6 +{rng.randint(1, 90)},7 @@\n" + "\n".join(
                signs
            )
        if draw < 0.45:
            first = rng.choice(
                (
                    "import os\nimport sys",
                    "#!/bin/sh",
                    "#include <stdio.h>",
                    "import json",
                    "set -e",
                )
            )
            text = f"{first}\n\n{text}"
        if draw > 0.8:
            text = f"```{rng.choice(('', 'python', 'sh', 'c', 'js'))}\n{text}\n```"
        return text

    def _log(self, rng: Random) -> str:
        events: list[str] = self.words["events"]
        if rng.random() < 0.25:
            trace = "\n".join(
                self._filled('  File "{w}.py", line {n}, in {w}\n    {w} = {w}({n})', rng)
                for _ in range(rng.randint(1, 3))
            )
            last = self._filled(rng.choice([e for e in events if "Error:" in e]), rng)
            return f"Traceback (most recent call last):\n{trace}\n{last}"
        day, form = rng.randint(1, 28), rng.randint(0, 3)
        lines = []
        for _ in range(rng.choice((1, 2, 3, 5, 8))):
            clock = f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}:{rng.randint(0, 59):02}"
            service, level = rng.choice(self.words["services"]), rng.choice(self.words["levels"])
            front = (
                f"Nov {day} {clock} web1 {service}[{rng.randint(100, 9999)}]: ",
                f"2026-11-{day:02}T{clock}Z {level} ",
                f"[{clock}] {level}: ",
                "",
            )[form]
            lines.append(front + self._filled(rng.choice(events), rng))
        return "\n".join(lines)

    def _table(self, rng: Random) -> str:
        rows = [
            f"{name},{rng.randint(18, 90)},{rng.choice(self.words['cities'])}"
            for name in rng.sample(self.words["people"], rng.randint(2, 6))
        ]
        return "\n".join(("name,age,city", *rows))
