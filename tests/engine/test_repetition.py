"""Loops of small models, and texts that only look like loops."""

import random

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
        ("\u00a0" * 900, 470),
        ("\u200b\u200d" * 450, 470),
        ("😂" * 2000, 1100),
        ("0, " * 2000, 2200),
    ],
    ids=["lines", "blanks", "broken", "wide", "invisible", "emoji", "zeros"],
)
def test_what_says_nothing_ends_too(text: str, most: int) -> None:
    found = loop_of(f"It is {text}")
    assert found is not None
    assert found[0] < most


def test_invisible_signs_are_called_blanks() -> None:
    assert Repetition("\u200b\u2060", 450, 900, 2).name() == "blanks"


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
    ids=map(str, range(19)),
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


COUNTED_LOOPS = {
    "scenes": "In Act V, Scene {n}, Hamlet is talking to his friend Horatio about death. ",
    "ordinals": "In the {n}th act the king meets the queen and they talk about the war. ",
    "chapter": "Chapter {n}: the hero meets a dragon.\nHe runs away.\n\n",
    "twice": "Scene {n} is about love. After Scene {n} the people of the town went home again. ",
    # SmolLM2's answer to "Make a weekly workout plan as a table."
    "workout": "Today:\nMonday: {n}x{n}\nTuesday: {n}x{n}\nWednesday: {n}x{n}\nThursday: {n}x{n}\n\n",
}


@pytest.mark.parametrize("name", COUNTED_LOOPS)
def test_prose_that_only_counts_on_is_a_loop(name: str) -> None:
    form = COUNTED_LOOPS[name]
    text = "The play has five acts. " + "".join(form.format(n=number) for number in range(7, 99))
    found = loop_of(text)
    assert found is not None
    end, repetition = found
    assert end < 2600
    assert repetition.times >= 10
    kept = without_repeats(text[:end], repetition)
    assert kept.startswith("The play has five acts. ")
    assert len(kept) < 24 + 4 * len(form)
    assert loop_of(text, "Write 200 scenes.") is None


COUNTED_JSON = {
    "keys": '"item{n}": "Item {n}", ',
    "keys over lines": '  "item{n}": "value",\n',
    "keys of numbers": '"item{n}": {n}, ',
    "keys of objects": '"item{n}": {{"name": "Item {n}", "price": 10, "tags": ["a", "b"]}},\n',
    "keys of long objects": '"item{n}": {{"name": "Item {n}", "text": "'
    + "a word " * 20
    + '"}},\n',
    "keys without blanks": '"k{n}":"v{n}",',
    "strings": '"item {n}", ',
}


@pytest.mark.parametrize("piece", [1, 4, 23])
@pytest.mark.parametrize("name", COUNTED_JSON)
def test_json_that_only_counts_on_is_a_loop(name: str, piece: int) -> None:
    text = '{"a": [' + "".join(COUNTED_JSON[name].format(n=number) for number in range(1, 400))
    text = text[:12_000]
    text = text[:12_000]
    found = loop_of(text, piece=piece)
    assert found is not None
    end, repetition = found
    assert end < 5300 and 24 <= repetition.times < 130
    assert loop_of(text, "A JSON object with 400 items.") is None
    assert loop_of(text[: len(text) // 20]) is None


JSON_TABLES = {
    "squares": "".join(f'"{n}": {n * n}, ' for n in range(300)),
    "times table": "".join(f'"7x{n}": {7 * n}, ' for n in range(300)),
    "measurements": "".join(f'"t{n}": 0.{n * 7919 % 997}, ' for n in range(300)),
    "answers": "".join(f'"q{n}": "{random.Random(n).choice("abcd")}", ' for n in range(300)),
    "countdown": "".join(f'"day {n}": "left", ' for n in range(200, 0, -1)),
    "records": "".join(f'{{"id": {n}, "name": "User {n}"}}, ' for n in range(300)),
    "years": "".join(f'"{1900 + n}": {{"gdp": {n * 613 % 89}}},\n' for n in range(120)),
    "codes": "".join(f'"E{n}": "{WORDS[n * 9 : n * 9 + 20]}",\n' for n in range(80)),
    "a form": "".join(f'"question_{n}": null, ' for n in range(1, 51)),
    "numbers in strings": "".join(f'"{n}", ' for n in range(500)),
}


@pytest.mark.parametrize("name", JSON_TABLES)
def test_tables_in_json_are_no_loop(name: str) -> None:
    assert loop_of("{" + JSON_TABLES[name]) is None
    assert loop_of("{" + JSON_TABLES[name] + WORDS) is None


def test_roman_numerals_and_number_words_count_too() -> None:
    acts = ["IV", "V", "VI", "VII", "VIII", "IX", "X", "XI", "XII", "XIII", "XIV", "XV", "XVI"]
    words = ["two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven"]
    words += ["twelve", "thirteen", "fourteen", "twenty-one", "thirty-two", "forty"]
    said = (
        "In Act {}, Hamlet is talking to his friend Horatio about death, and the king about life. "
    )
    for numbers in (acts * 2, words * 2):
        assert loop_of("".join(said.format(number) for number in numbers)) is not None


PHRASES = (
    "the cat sat on the mat and looked at the moon.",
    "a dog ran over the green hill to the river.",
    "she told him that the story was not over yet.",
    "the king of the land was kind and very wise.",
)


@pytest.mark.parametrize("end", [".", " — so they say…"])
def test_few_phrases_in_varying_order_are_a_loop(end: str) -> None:
    order = random.Random(1)
    phrases = [phrase.replace(".", end) for phrase in PHRASES]
    text = WORDS + " ".join(order.choice(phrases) for _ in range(400))
    found = loop_of(text)
    assert found is not None
    assert found[0] < len(WORDS) + 5000
    assert found[1].piece in text
    kept = without_repeats(text[: found[0]], found[1])
    assert kept.startswith(WORDS)


NAMES = ("Anna", "Bob", "Carla", "David", "Emma", "Frank", "Grace", "Hugo", "Iris", "Jack")
WANTED = {
    "sums in words": "".join(
        f"If you multiply 7 by {n}, you get the number {7 * n}.\n" for n in range(1, 200)
    ),
    "bottles": "".join(
        f"{n} bottles of beer on the wall, {n} bottles of beer. Take one down and pass it around, "
        f"{n - 1} bottles of beer on the wall.\n"
        for n in range(99, 0, -1)
    ),
    "inserts": "".join(
        f"INSERT INTO users (id, name, mail) VALUES ({n}, 'User {n}', 'user{n}@example.com');\n"
        for n in range(100)
    ),
    "enum": "enum Error {\n"
    + "".join(f"    NETWORK_FAILURE_OF_KIND_{n} = {n},\n" for n in range(99)),
    "html": "".join(
        f'<li class="item"><a href="/page/{n}">Link to page {n}</a></li>\n' for n in range(99)
    ),
    "unit tests": "".join(
        f"def test_add_{n}():\n    assert add({n}, {n + 1}) == {2 * n + 1}\n\n" for n in range(99)
    ),
    "json": "".join(
        f'{{"id": {n}, "title": "A title of this item", "done": false}},\n' for n in range(99)
    ),
    "coins": " ".join(random.Random(2).choices(("heads", "tails"), k=700)),
    "bits": "\n".join(" ".join(random.Random(n).choices("01", k=16)) for n in range(99)),
    "board": "\n".join(" ".join(random.Random(n).choices("XO.", k=16)) for n in range(99)),
    "csv of answers": "".join(
        f"{n},{','.join(random.Random(n).choices(('yes', 'no', 'maybe'), k=5))}\n"
        for n in range(99)
    ),
    "log": "".join(
        f"2024-03-01 12:{n % 60:02}:{n * 7 % 60:02} INFO worker {n % 4} finished the job {n} in time\n"
        for n in range(99)
    ),
    "meetings": "".join(
        f"{one} met {two} in the garden, and they spoke about the weather of the last days.\n"
        for one in NAMES
        for two in NAMES
    ),
    "counting": ", ".join(str(number) for number in range(3000)),
    "days of Christmas": "\n".join(
        f"On day {n} of Christmas my true love gave to me "
        + ", ".join(f"{m} {PHRASES[m % 4][:-1]} {NAMES[m % 10]}" for m in range(n, 0, -1))
        for n in range(1, 10)
    ),
    "song": "".join(
        f"{NAMES[n]} walks down the street of {NAMES[-n - 1]} with {WORDS[n * 60 : n * 60 + 140]}\n"
        "Oh sing with me, sing with me, all night long,\n"
        "oh sing with me, sing with me, this is our song.\n\n"
        for n in range(10)
    ),
    "the same text twice": (WORDS + "\n\n") * 2,
}


@pytest.mark.parametrize("name", WANTED)
def test_lists_tables_code_and_songs_are_no_loop(name: str) -> None:
    assert loop_of(WANTED[name]) is None
    assert loop_of(WANTED[name] + WORDS) is None


def test_a_run_that_moves_from_sign_to_sign_is_a_loop() -> None:
    # As SmolLM2 wrote with a frequency penalty: each sign until the penalty made the next one likelier.
    text = "| Day 1 | Rest |\n" + "=" * 260 + "\n" + "+" * 210 + "\n" + "*" * 900 + "!" * 140
    assert LoopDetector("Make a weekly workout plan.").find(text) is not None


DRIFT = ("Tuesday ", "Monday ", "Sunday ", "Saturday ", "Four", "YA", "DED", "ab, ", "Z")
"""Pieces of an answer of SmolLM2 that drifted from one to the next."""


@pytest.mark.parametrize("times", [9, 15, 30])
def test_short_pieces_that_drift_are_a_loop(times: int) -> None:
    pieces = dict.fromkeys((*DRIFT, *(f"{word} " for word in WORDS.split())))
    text = "".join(piece * times for piece in pieces)
    found = loop_of(text)
    assert found is not None
    assert found[0] < 3000


def test_sentences_that_drift_are_a_loop() -> None:
    text = WORDS + "".join(
        f"You are going on a journey with your {friend}{end} " * 5
        for friend in ("friend", "best friend", "old friend", "family")
        for end in ("!", "!!", "!!!")
    )
    found = loop_of(text)
    assert found is not None
    assert found[0] < len(WORDS) + 2600


@pytest.mark.parametrize(
    "text",
    [
        # The rows of a picture, of numbers and of letters.
        ("." * 8 + "#" * 8 + "o" * 8 + "@" * 8 + "\n") * 40,
        ("0000000011111111222222223333333\n") * 40,
        "".join(f"{'W' * (5 + row % 7)}{'B' * (20 - row % 7)}\n" for row in range(60)),
        "".join("R" * (5 + row % 7) + "GGGGGG" + "BBBBBB" + "YYYYYY\n" for row in range(60)),
        # A laugh in a conversation, and a refrain.
        'She laughed: "Ha ha ha ha ha ha!" He asked what was so funny, and nobody knew what to answer him. '
        * 2
        + "".join(f"La la la la la, said number {word}. " for word in "abcdefghijklmnopqrstuvwxyz"),
    ],
)
def test_pictures_and_refrains_do_not_drift(text: str) -> None:
    assert LoopDetector()._drifting(text * 3) is None


def test_a_long_ruler_and_a_box_are_no_loops() -> None:
    box = "+" + "-" * 78 + "+\n" + ("|" + " " * 78 + "|\n") * 12 + "+" + "-" * 78 + "+\n"
    assert LoopDetector("Draw a box.").find("Here it is:\n" + box) is None
    assert LoopDetector("Draw a ruler.").find("Title\n" + "=" * 700 + "\nText " * 80) is None
