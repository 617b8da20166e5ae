"""Small questions about a given text: a number, address or name, who does what, a field of a table.

Every answer is in the question.
"""

from random import Random
from typing import Any

from scraps import Scraps


class Reading:
    """Draws such tasks. `facts`: the parsed facts.json."""

    def __init__(self, facts: dict[str, Any], scraps: Scraps) -> None:
        self.words: dict[str, Any] = facts["pastes"]
        self.kinds: dict[str, dict[str, list[str]]] = facts["pastes"]["pick"]
        self.scraps = scraps

    def draw(self, rng: Random) -> list[tuple[str, str]]:
        """One task as (user, assistant) pairs."""
        return rng.choices((self._pick, self._who, self._cell), (5, 2.5, 2))[0](rng)

    def _item(self, kind: str, rng: Random) -> str:
        if kind == "version":
            return ".".join(str(rng.randint(0, 30)) for _ in range(rng.choice((2, 3, 3))))
        if kind == "date":
            day, year = rng.choice(self.words["days"]), rng.randint(1990, 2029)
            return f"{day} {year}" if day[0].isdigit() and rng.random() < 0.6 else str(day)
        if kind == "time":
            return f"{rng.randint(0, 23)}:{rng.randint(0, 59):02}"
        return str(rng.randint(2, 10 ** rng.randint(1, 5) + 2))

    def _pick(self, rng: Random) -> list[tuple[str, str]]:
        kind = rng.choice(list(self.kinds))
        item = self._item(kind, rng)
        text = self.scraps.filled(rng.choice(self.kinds[kind]["texts"]), rng).replace("{i}", item)
        ask = rng.choice(self.kinds[kind]["asks"])
        return [(self._asked(ask, text, rng), item)]

    @staticmethod
    def _asked(ask: str, text: str, rng: Random) -> str:
        ask = ask[:1].upper() + ask[1:] if rng.random() < 0.5 else ask
        forms = (
            f"{ask}: {text}", f'{ask}: "{text}"', f"{ask}? {text}", f"{text}\n\n{ask}?", f"{text}\n\n{ask}",
            f'{ask}? "{text}"', f"{ask}:\n\n{text}", f"{ask}? Text: {text}", f"Text: {text}\n{ask}?",
        )  # fmt: skip
        return rng.choice(forms)

    def _who(self, rng: Random) -> list[tuple[str, str]]:
        """Persons and their actions, from two to four sentences."""
        count = rng.choice((2, 3, 3, 4))
        people = rng.sample(self.words["people"], count)
        things, cities = (
            rng.sample(self.scraps.things, count),
            rng.sample(self.words["cities"], count),
        )
        acts = rng.sample(self.words["verbs"], count)
        kinds = [rng.choice(("lives", "acts")) for _ in people]
        said = [
            f"{p} lives in {c}." if k == "lives" else f"{p} {v}s the {x}."
            for p, c, v, x, k in zip(people, cities, acts, things, kinds, strict=True)
        ]
        at = rng.randrange(count)
        if kinds[at] == "acts":
            ask, answer = rng.choice(
                (
                    (f"who {acts[at]}s the {things[at]}", people[at]),
                    (f"what does {people[at]} {acts[at]}", f"the {things[at]}"),
                )
            )
        else:
            ask, answer = rng.choice(
                (
                    (f"who lives in {cities[at]}", people[at]),
                    (f"where does {people[at]} live", f"in {cities[at]}"),
                )
            )
        return [(self._asked(ask, " ".join(said), rng), answer)]

    def _cell(self, rng: Random) -> list[tuple[str, str]]:
        """One field of a small table."""
        people = rng.sample(self.words["people"], rng.randint(2, 5))
        rows = [(p, str(rng.randint(18, 90)), rng.choice(self.words["cities"])) for p in people]
        name, age, city = rng.choice(rows)
        ask, answer = rng.choice(
            (
                (f"how old is {name}?", age),
                (f"what is the age of {name}?", age),
                (f"which city is {name} from?", city),
                (f"where does {name} live?", city),
                (f"{name}'s age?", age),
            )
        )
        ask = ask[:1].upper() + ask[1:] if rng.random() < 0.5 else ask
        head = rng.choice(
            (("name", "age", "city"), ("person", "age", "town"), ("who", "years", "home"))
        )
        text = "\n".join(",".join(row) for row in (head, *rows))
        return [(rng.choice((f"{text}\n\n{ask}", f"{ask}\n\n{text}")), answer)]
