"""Loops of small models, and texts that only look like loops."""

import pytest

from localchat.engine.repetition import LoopDetector, Repetition, without_repeats

ROW = "<tr><td></td><td></td><td></td></tr>\n"
WORDS = " ".join(f"word{chr(97 + number // 26)}{chr(97 + number % 26)}" for number in range(120))


def loop_of(text: str, prompt: str = "", piece: int = 4) -> tuple[int, Repetition] | None:
    """Return the loop that a detector finds, and the number of characters it had read."""
    detector = LoopDetector(prompt)
    for start in range(0, len(text), piece):
        if (repetition := detector.push(text[start : start + piece])) is not None:
            return min(start + piece, len(text)), repetition
    return None


LOOPS = {
    "a phrase": ("The capital is Paris, ", "la femme au martyre, "),
    "a word": ("It is ", "very "),
    "a line": ("Intro.\n", "The cat sat on the mat.\n"),
    "a sentence": ("Intro. ", "The dog is a loyal animal. "),
    "two sentences": ("Intro. ", "I am here. Where are you going today? "),
    "no spaces": ("", "我不知道。"),
    "a list of strings": ('["a", ', '"the same string", '),
    "equal objects": ('{"people": [', '{"name": "John", "age": 41}, '),
}


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("piece", [1, 4, 23])
def test_a_loop_ends_after_about_600_characters(name: str, piece: int) -> None:
    beginning, repeated = LOOPS[name]
    found = loop_of(beginning + repeated * 400, piece=piece)
    assert found is not None
    end, repetition = found
    assert end < len(beginning) + 720
    assert repetition.times >= 8
    assert "".join(sorted(repetition.piece)) == "".join(sorted(repeated))
    kept = without_repeats((beginning + repeated * 400)[:end], repetition)
    assert kept.startswith(beginning)
    assert len(kept) < len(beginning) + 3 * len(repeated)


def test_a_paragraph_needs_four_repeats() -> None:
    paragraph = f"It is a loyal animal that {WORDS}.\n\n"
    found = loop_of("Intro. " + paragraph * 9)
    assert found is not None
    assert found[1].times == 4


@pytest.mark.parametrize("form", ["{}. {}\n", "{}. {}\n\n", "**{}.** {}\n", "Question {}: {}\n"])
def test_lines_that_differ_in_their_number_are_a_loop(form: str) -> None:
    said = "The ability to communicate effectively with others."
    text = "".join(form.format(number, said) for number in range(1, 100))
    found = loop_of("Here it is.\n" + text)
    assert found is not None
    assert found[1].times < 13
    kept = without_repeats(("Here it is.\n" + text)[: found[0]], found[1])
    assert kept.strip() == "Here it is.\n" + form.format(1, said).strip()


@pytest.mark.parametrize(
    ("text", "most"),
    [
        ("\n" * 900, 470),
        (" " * 900, 470),
        ("\ufffd" * 900, 470),
        ("😂" * 2000, 1100),
        ("0, " * 2000, 2200),
    ],
    ids=["lines", "blanks", "broken", "emoji", "zeros"],
)
def test_what_says_nothing_ends_too(text: str, most: int) -> None:
    found = loop_of(f"It is {text}")
    assert found is not None
    assert found[0] < most


def test_tokens_that_print_nothing_are_a_loop() -> None:
    detector = LoopDetector()
    assert all(detector.push("") is None for _ in range(255))
    assert detector.push("") is not None


@pytest.mark.parametrize(
    ("text", "prompt"),
    [
        ("ha " * 300, "Write 'ha' 300 times."),
        ("I will not talk in class.\n" * 50, "Write 'I will not talk in class.' 50 times."),
        ("[" + "0, " * 1000 + "0]", "Give me a list of 1000 zeros."),
        ("0,0,0,0,0,0,0,0,0,0\n" * 90, "A CSV of zeros"),
        (ROW * 40, "An empty HTML table of 40 rows"),
        ("-" * 80 + "\n" + "| a | b |\n" + "=" * 500, ""),
        ("| | | | |\n" * 100, ""),
        ("- [ ] \n" * 100, ""),
        ("".join(f"{number}. item\n" for number in range(2000)), ""),
        ("".join(f"| {number % 7} | {number} |\n" for number in range(2000)), ""),
        ("".join(f"7 x {number} = {7 * number}\n" for number in range(300)), ""),
        ("".join(f'    case {number}: return "item{number}";\n' for number in range(99)), ""),
        ("".join(f"user{number}@example.com\n" for number in range(300)), ""),
        ("".join(f'{{"id": {n}, "name": "User {n}"}},\n' for n in range(200)), ""),
        ('{"piece": null, "color": null}, ' * 40, ""),
        ("".join(f"2024-01-{n % 28 + 1:02}, {n * 7 % 13}, {n * 3 % 11}\n" for n in range(300)), ""),
        ("import os\nimport sys\n" + "\n".join(f"def f{n}():\n    pass\n" for n in range(80)), ""),
        ("ATGC" * 140, ""),
        ("We will, we will rock you! " * 6 + "Sing it! " * 8, ""),
    ],
)
def test_wanted_repeats_are_no_loop(text: str, prompt: str) -> None:
    assert loop_of(text, prompt) is None
    assert loop_of(text + WORDS, prompt) is None


def test_more_repeats_than_wanted_are_a_loop() -> None:
    found = loop_of("ha " * 1300, "Write 'ha' 300 times.")
    assert found is not None
    assert 300 < found[1].times < 340


def test_repeats_of_another_part_of_an_answer_are_kept() -> None:
    repetition = Repetition("thinking. ", 70, 700, 10)
    assert without_repeats("An answer. " * 3, repetition) == "An answer. " * 3
    assert without_repeats("x" * 900, repetition) == "x" * 900
