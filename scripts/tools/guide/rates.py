"""Questions about speed and time: tok/s that a memory bandwidth allows, and download times."""

from random import Random
from typing import Any, Final, NamedTuple

from grammar import phrase
from noise import roughen

WIDTHS: Final = ("{} GB/s", "{} GB/s", "{} gb/s", "{}GB/s", "{}gb/s", "{} GB per second", "{} gb/sec",
                 "{} gigabytes per second", "{} GBps")  # fmt: skip
WHY: Final = "since each token reads all weights once"


class Sum(NamedTuple):
    """Subject of a question with numbers; a short follow-up question changes one part of it."""

    kind: str
    subject: str
    detail: str


class Rates:
    """Draws questions about speed. `facts`: the parsed facts.json."""

    def __init__(self, facts: dict[str, Any]) -> None:
        self.speeds: dict[str, str] = facts["speeds"]
        self.files: dict[str, float] = facts["files"]
        self.downloads: dict[str, str] = facts["downloads"]
        self.ask: dict[str, Any] = facts["sums"]
        self.lexicon: dict[str, list[str]] = facts["lexicon"]
        self.names = {f"{gb:g}": name for name, gb in self.files.items()}

    def draw(self, rng: Random) -> tuple[str, str, Sum]:
        """A question, its answer, and its subject."""
        return self._speed(rng) if rng.random() < 0.75 else self._download(rng)

    def after(self, about: Sum, rng: Random) -> tuple[Sum, str, str]:
        """Subject of a short follow-up question, its text, and its answer."""
        widths = [k.split("/")[1] for k in self.speeds if k.startswith(f"{about.subject}/")]
        if widths and rng.random() < 0.6:
            about = about._replace(detail=rng.choice(widths))
            said = self._width(about.detail, rng)
        else:
            sizes = [k.split("/")[0] for k in self.speeds if k.endswith(f"/{about.detail}")]
            about = about._replace(subject=rng.choice(sizes or [about.subject]))
            said = rng.choice(
                (f"{about.subject} GB", f"a {about.subject} gb model", f"{about.subject}gb")
            )
        return about, said, self._answer(about)

    def _say(self, pattern: str, rng: Random, **values: str) -> str:
        text = phrase(pattern, self.lexicon, rng)
        for name, value in values.items():
            text = text.replace(f"{{{name}}}", value)
        return " ".join(text.split())

    @staticmethod
    def _width(width: str, rng: Random) -> str:
        if len(width) > 3 and rng.random() < 0.4:
            return rng.choice(("{:g} TB/s", "{:g}TB/s", "{:g} tb/s")).format(int(width) / 1000)
        return rng.choice(WIDTHS).format(width)

    def _answer(self, about: Sum) -> str:
        size, width = about.subject, about.detail
        value = self.speeds.get(f"{size}/{width}")
        if value:
            return f"At most about {value} tok/s: {width} / {size}, {WHY}."
        return (
            f"Divide: {width} / {size} tok/s at most, bandwidth over the bytes of the weights. "
            "That sum is not in my table; `localchat fit MODEL` predicts the speed on this machine."
        )

    def _speed(self, rng: Random) -> tuple[str, str, Sum]:
        """A question with the file's size in GB, or with the billions of parameters of a model, meaning
        its Q4_K_M file.
        """
        size, width = rng.choice(list(self.speeds)).split("/")
        if rng.random() < 0.15:
            size, width = f"{rng.randint(2, 60)}.{rng.randint(1, 9)}", str(rng.randint(10, 4000))
        about = Sum("speed", size, width)
        file = rng.choice((f"{size} GB", f"{size} GB", f"{size}GB", f"{size}gb", f"{size} gb"))
        answer = self._answer(about)
        if size in self.names and f"{size}/{width}" in self.speeds and rng.random() < 0.4:
            name = self.names[size]
            file = rng.choice(
                (name, name.upper(), f"{name} q4_k_m", f"{name} Q4_K_M", f"{name} 4 bit")
            )
            answer = f"At most about {self.speeds[f'{size}/{width}']} tok/s: {width} / {size}; "
            answer += f"{'an' if name[0] == '8' else 'a'} {name.upper()} at Q4_K_M has {size} GB, and each token reads all of it."
        pattern = rng.choice(self.ask["speed"])
        text = self._say(pattern, rng, f=file, w=self._width(width, rng))
        return roughen(text, rng), answer, about

    def _download(self, rng: Random) -> tuple[str, str, Sum]:
        key = rng.choice(list(self.downloads))
        size, line = key.split("/")
        wide = [f"{line} Mbit/s", f"{line} mbit/s", f"{line} mbit", f"{line} mbps", f"{line} Mbps"]
        if line == "1000":
            wide += ["1 Gbit/s", "1 gbit/s", "a gigabit"]
        text = self._say(
            rng.choice(self.ask["download"]), rng, w=rng.choice(wide),
            f=rng.choice((f"{size} GB", f"{size}gb", f"{size} gb", f"{size} gigabytes")),
        )  # fmt: skip
        return roughen(text, rng), f"About {self.downloads[key]}.", Sum("download", size, line)
