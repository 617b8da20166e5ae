"""Documents of generated text with planted facts, each beside others of the same wording."""

import random
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

_SYLLABLES = [f"{first}{last}" for first in "bcdfghjklmnprstvz" for last in ("a", "en", "or", "u")]
_FRAMES = (
    ("The lease of {a} ends on the {n}th of {m}.", "When do the leases at {a} end?"),
    ("A deposit of {n} euros is due for the flat in {a}.", "how much deposit is due for {a}'s flats"),
    ("The pump in the station {a} was replaced after {n} hours of running.",
     "After how many hours did they replace pumps in {a} station?"),
    ("Doctor {a} prescribed {n} milligrams of the new medicine.",
     "What amount of medicines was prescribed by doctor {a}?"),
    ("The bridge over the river {a} carries loads of {n} tonnes.",
     "What load can the bridges over {a} carry?"),
    ("The warranty of the machine {a} covers {n} months.", "How long do warranties cover {a} machines?"),
    ("Die Kündigungsfrist für den Vertrag {a} beträgt {n} Tage.",
     "Wie lange sind die Kündigungsfristen beim Vertrag {a}?"),
    ("Für die Wohnung {a} zahlt der Mieter {n} Euro im Jahr.",
     "Was müssen Mieter für die Wohnungen {a} jährlich zahlen?"),
    ("Das Gerät {a} wurde zuletzt vor {n} Tagen geprüft.", "wann wurden die Geräte {a} geprüft?"),
    ("The school in {a} teaches {n} children in its new building.",
     "How many children are taught by {a}'s school?"),
)  # fmt: skip
_MONTHS = ("January", "March", "May", "July", "October", "December")


class PlantedFact(NamedTuple):
    """A sentence of one document, and a question that it answers."""

    file: str
    number: int
    """Page of a DOCX file, line of a Markdown file."""
    sentence: str
    question: str


def write_documents(folder: Path, tokens: int, facts: int, seed: int = 1) -> list[PlantedFact]:
    """Write Markdown and DOCX files of about so many tokens (of four characters), and return the facts.

    Each fact has five others of the same wording about something else; two of them share a word of its name."""
    draw = random.Random(seed)
    words = [_word(draw) for _ in range(6000)]
    weights = [1 / (rank + 3) for rank in range(len(words))]
    names = iter(
        dict.fromkeys(f"{_word(draw).title()} {_word(draw).title()}" for _ in range(60 * facts))
    )
    paragraphs = [_paragraph(draw, words, weights) for _ in range(tokens * 4 // 620)]
    planted: dict[int, tuple[str, str]] = {}
    places = iter(draw.sample(range(len(paragraphs)), min(len(paragraphs), 6 * facts)))
    for number in range(facts):
        said, asked = _FRAMES[number % len(_FRAMES)]
        own = next(names)
        for other in range(6):
            name = own if not other else next(names)
            if other in (1, 2):
                name = " ".join((name.split()[0], own.split()[other - 1]))
            values = {"a": name, "n": draw.randrange(2, 9000), "m": draw.choice(_MONTHS)}
            sentence, place = said.format_map(values), next(places)
            at = paragraphs[place].index(". ") + 2
            paragraphs[place] = f"{paragraphs[place][:at]}{sentence} {paragraphs[place][at:]}"
            if not other:
                planted[place] = sentence, asked.format_map(values)
    found: list[PlantedFact] = []
    size = max(10, len(paragraphs) // 200)
    for number, start in enumerate(range(0, len(paragraphs), size)):
        part = {at: paragraphs[at] for at in range(start, min(start + size, len(paragraphs)))}
        write = _write_docx if number % 2 else _write_markdown
        numbers = write(folder / f"part{number:03}", list(part.values()))
        found += [
            PlantedFact(
                f"part{number:03}{'.docx' if number % 2 else '.md'}",
                numbers[at - start],
                *planted[at],
            )
            for at in part
            if at in planted
        ]
    return found


def _word(draw: random.Random) -> str:
    return "".join(draw.choices(_SYLLABLES, k=draw.choice((2, 2, 3))))


def _paragraph(draw: random.Random, words: Sequence[str], weights: Sequence[float]) -> str:
    sentences = []
    for _ in range(8):
        chosen = draw.choices(words, weights, k=draw.randrange(8, 16))
        sentences.append(f"{' '.join(chosen).capitalize()}.")
    return " ".join(sentences)


def _write_markdown(path: Path, paragraphs: Sequence[str]) -> list[int]:
    """Write them a line each, with an empty one between; return their lines."""
    path.with_suffix(".md").write_text("\n\n".join(paragraphs), encoding="utf-8")
    return [2 * at + 1 for at in range(len(paragraphs))]


def _write_docx(path: Path, paragraphs: Sequence[str], a_page: int = 4) -> list[int]:
    """Write them, so many a page; return their pages."""
    pages = [1 + at // a_page for at in range(len(paragraphs))]
    broken = "<w:lastRenderedPageBreak/>"
    body = "".join(
        f"<w:p><w:r>{broken if at and not at % a_page else ''}<w:t>{escape(text)}</w:t></w:r></w:p>"
        for at, text in enumerate(paragraphs)
    )
    space = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
    with zipfile.ZipFile(path.with_suffix(".docx"), "w", zipfile.ZIP_DEFLATED) as archive:
        xml = f'<w:document xmlns:w="{space}"><w:body>{body}</w:body></w:document>'
        archive.writestr("word/document.xml", xml)
    return pages
