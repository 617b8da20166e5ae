"""Makes questions look real: greetings, politeness, typos, missing words, odd capitals."""

from random import Random
from typing import Final

BEFORE: Final = [
    "hi, ",
    "hey, ",
    "hello, ",
    "hi! ",
    "ok, ",
    "okay, ",
    "so ",
    "so, ",
    "well, ",
    "quick question: ",
    "question: ",
    "sorry, ",
    "excuse me, ",
    "i am new here. ",
    "i am new to this. ",
    "one more thing: ",
    "another question: ",
    "please: ",
    "dear guide, ",
    "guide: ",
    "i was wondering, ",
    "just wondering, ",
    "sorry for asking, ",
    "a friend asks: ",
    "my boss wants to know: ",
    "maybe a dumb question: ",
    "and now: ",
    "next: ",
    "i just installed localchat. ",
    "i am confused. ",
    "um, ",
    "hmm, ",
    "i use linux. ",
    "i have a macbook. ",
    "i read the readme but: ",
    "i forgot: ",
    "remind me, ",
    "tell me, ",
    "say, ",
    "listen, ",
    "first of all, ",
    "for my understanding: ",
    "hopefully an easy one: ",
    "i am on a server. ",
    "good morning. ",
    "thanks. ",
]
AFTER: Final = [
    " please",
    " thanks",
    " in localchat",
    " with localchat",
    " on linux",
    " on my laptop",
    " here",
    " now",
    " exactly",
    " again",
    ", any idea",
    ", please help",
    " in general",
    " for me",
    " today",
    " right now",
    " at all",
    " on this machine",
    " if possible",
    " by the way",
    ", thank you",
    " somehow",
    " from here",
    " on ubuntu",
    " on my mac",
    " quickly",
    " as a beginner",
    " then",
    " too",
    " or what",
    " with this program",
    " using localchat",
    " in this tool",
    " easily",
    " pls",
    " plz",
    " thx",
]
FILLERS: Final = (
    "just",
    "actually",
    "simply",
    "really",
    "possibly",
    "maybe",
    "quickly",
    "also",
    "still",
)
WEAK: Final = {
    "the",
    "a",
    "an",
    "i",
    "do",
    "to",
    "is",
    "my",
    "of",
    "it",
    "does",
    "can",
    "for",
    "me",
    "in",
    "on",
}
CARELESS: Final = 0.34
ROWS: Final = ("qwertyuiop", "asdfghjkl", "zxcvbnm")
SHORT: Final = {
    "what is": "what's", "do not": "don't", "does not": "doesn't", "can not": "can't",
    "cannot": "can't",
    "i am": "i'm", "i would": "i'd", "you are": "you're", "it is": "it's", "will not": "won't",
    "how do i": "how do I", "please": "pls", "you": "u", "are": "r", "with": "w/", "without": "w/o",
    "graphics card": "gpu", "conversation": "chat", "colour": "color",
}  # fmt: skip
STRANGE: Final = {
    "how do i ": ("how i can ", "how i do to ", "how must i make to ", "how doing to ", "how i "),
    "how can i ": ("how i can ", "how it is possible to "),
    "how to ": ("how i ", "how doing to "),
    "what is ": ("what means ", "what is it ", "what it is "),
    "can i ": ("is possible that i ", "i can ", "it is possible to "),
    "is there ": ("exists ", "it gives ", "it has "),
    "does it ": ("it does ", "it "),
    "i want to ": ("i am wanting to ", "i would want to "),
    "why is ": ("why ", "for what is "),
    "do i need ": ("is it needed ", "must i have "),
    "which ": ("what ",),
    "it is ": ("is ", "he is "),
    "a model": ("model", "the model", "one model"),
    "my model": ("the mine model", "model of me"),
}
"""How people write who think in another language."""
HASTY: Final = {
    "what": "wat", "which": "wich", "how": "hw", "why": "y", "to": "2", "for": "4", "are": "r", "the": "teh",
    "you": "u", "because": "bc", "download": "dl", "about": "abt", "without": "w/o", "much": "mutch",
    "model": "modl", "settings": "setings", "temperature": "temprature", "delete": "delet", "change": "chang",
    "your": "ur", "does": "dos", "memory": "mem", "message": "msg", "please": "plz", "length": "lenght",
}  # fmt: skip
"""How people write in a hurry."""


TAILS: Final = (
    " pls", " plz", " help", " bro", " sir", " thx", " ty", " pls help", " idk", " lol", " asap", " quick", " man",
    " dude", " please help me", " help me", " no idea", " i dont know", " ???", " !!",
)  # fmt: skip
HEADS: Final = (
    "pls ", "plz ", "bro ", "sir ", "hey ", "help ", "yo ", "ok so ", "hi how ", "pls tell ", "i not know ",
    "dear sir ", "need help ", "im new ", "noob question ",
)  # fmt: skip
HELPERS: Final = frozenset(
    [
        "do",
        "does",
        "did",
        "is",
        "are",
        "was",
        "am",
        "be",
        "the",
        "a",
        "an",
        "to",
        "of",
        "it",
        "its",
        "i",
        "my",
        "me",
        "can",
        "could",
        "would",
        "should",
        "will",
        "that",
        "this",
        "there",
        "in",
        "on",
        "for",
        "please",
    ]
)
"""Words without which a question is still understood."""
BROKEN: Final = (
    ("i want to ", ("i want ", "want ", "me want ", "i wanna ", "wanna ")),
    ("how do i ", ("how i ", "how ", "how to ", "how me ", "how does i ", "how can ", "how do ")),
    ("how can i ", ("how i ", "how can ", "how to ", "how me can ")),
    ("how to ", ("how ", "hw to ", "how for ")),
    ("can i ", ("can ", "possible ", "i can ", "is possible ", "can me ")),
    ("is it possible to ", ("possible ", "is possible ", "it possible ")),
    ("does not ", ("not ", "no ", "dont ", "doesnt ", "is not ")),
    ("do not ", ("dont ", "not ", "no ")),
    ("is not ", ("not ", "isnt ", "no ")),
    ("cannot ", ("cant ", "can not ", "no can ")),
    ("what does ", ("what ", "what is ", "wat does ", "what do ")),
    ("does it ", ("it ", "do it ", "is it ", "it does ")),
    ("why is ", ("why ", "why it is ", "y is ")),
    ("what is the ", ("what ", "wich is the ", "what is ", "the ")),
    ("where are ", ("where ", "where is ", "were are ")),
    ("where is ", ("where ", "were is ", "wheres ")),
    ("which model ", ("wich model ", "what model ", "which one model ")),
    ("is there a ", ("is there ", "there is ", "exist ", "have ", "has it ")),
    ("the model ", ("model ", "modell ", "ai ")),
)
"""How beginners in English and people on a phone leave words out."""


def _strange(text: str, rng: Random) -> str:
    for usual, others in STRANGE.items():
        if usual in text and rng.random() < 0.7:
            text = text.replace(usual, rng.choice(others), 1)
    return text


def _hasty(text: str, rng: Random) -> str:
    if any(c.isdigit() for c in text):
        return text  # "4" for "for" next to a number would change the question
    return " ".join(HASTY.get(w, w) if rng.random() < 0.6 else w for w in text.split(" "))


def typo(word: str, rng: Random) -> str:
    """Make one typing error: swap, drop, double or hit a neighbouring key."""
    at = rng.randrange(1, len(word) - 1)
    kind = rng.random()
    if kind < 0.35:
        return word[:at] + word[at + 1] + word[at] + word[at + 2 :]
    if kind < 0.65:
        return word[:at] + word[at + 1 :]
    if kind < 0.8:
        return word[:at] + word[at] + word[at:]
    for row in ROWS:
        if (i := row.find(word[at])) >= 0:
            return word[:at] + row[max(0, i + rng.choice((-1, 1))) % len(row)] + word[at + 1 :]
    return word


def _typos(text: str, rng: Random) -> str:
    words = text.split(" ")
    able = [i for i, w in enumerate(words) if len(w) >= 4 and w.isalpha() and w.islower()]
    for i in rng.sample(able, min(len(able), rng.choice((1, 1, 1, 2)))):
        words[i] = typo(words[i], rng)
    return " ".join(words)


def _weaken(text: str, rng: Random) -> str:
    kept = [w for w in text.split(" ") if w.lower() not in WEAK or rng.random() < 0.35]
    return " ".join(kept) or text


def _broken(text: str, rng: Random) -> str:
    for usual, others in BROKEN:
        if usual in text and rng.random() < 0.75:
            text = text.replace(usual, rng.choice(others), 1)
    return text


def _bare(text: str, rng: Random) -> str:
    """The words that carry the meaning, most of the others left out."""
    kept = [w for w in text.split(" ") if w not in HELPERS or rng.random() < 0.12]
    return " ".join(kept) if len(kept) > 1 else text


def _careless(text: str, rng: Random) -> str:
    """A question by someone with little English, little time or a small keyboard: much at once."""
    if "\n" in text or len(text) > 160:
        return _typos(text, rng)
    draw = rng.random()
    if draw < 0.4:
        text = _broken(_weaken(text, rng) if rng.random() < 0.5 else text, rng)
    elif draw < 0.7:
        text = _bare(text, rng)
    elif draw < 0.85:
        text = _strange(text, rng)
    if rng.random() < 0.3:
        text = _hasty(text, rng)
    for _ in range(rng.choice((0, 0, 1, 1, 2))):
        text = _typos(text, rng)
    if rng.random() < 0.7:
        text = text.replace("'", "").replace(",", "")
    if rng.random() < 0.12:
        text += rng.choice(TAILS)
    if rng.random() < 0.06:
        text = rng.choice(HEADS) + text
    named = any(
        w.isupper() and len(w) > 1 for w in text.split(" ")
    )  # names in capitals stay as they are
    if not named and rng.random() < 0.5:
        text = text.lower()
    if rng.random() < 0.15:
        text = text[:1].upper() + text[1:]
    elif rng.random() < 0.03 and not any(c in text for c in "-/_.:"):
        text = text.upper()
    return text


def _shorten(text: str, rng: Random) -> str:
    padded = f" {text} "
    for long, short in SHORT.items():
        if f" {long} " in padded and rng.random() < 0.4:
            padded = padded.replace(f" {long} ", f" {short} ", 1)
    return padded[1:-1]


def _fill(text: str, rng: Random) -> str:
    words = text.split(" ")
    if "i" in words[:-1]:
        words.insert(words.index("i") + 1, rng.choice(FILLERS))
    return " ".join(words)


def _case(text: str, rng: Random) -> str:
    draw = rng.random()
    if draw < 0.5:
        return text
    if draw < 0.53 and not any(c in text for c in "-/_."):
        return text.upper()
    text = text[:1].upper() + text[1:]
    if rng.random() < 0.7:
        text = " ".join("I" if w == "i" else w for w in text.split(" "))
    return text


def roughen(text: str, rng: Random, *, dress: bool = True) -> str:
    """The text as a person in a hurry might type it. With `dress`, greetings and politeness may be added.
    A third is careless: bad English, several typing errors, words left out.
    """
    if rng.random() < CARELESS:
        return _careless(text, rng) + rng.choices(("", "?", "??", "!", " ?"), (72, 22, 3, 2, 1))[0]
    if dress and rng.random() < 0.12:
        text = rng.choice(BEFORE) + text
    if dress and rng.random() < 0.14:
        text = text.rstrip("?") + rng.choice(AFTER)
    if rng.random() < 0.05:
        text = _strange(text, rng)
    if rng.random() < 0.05:
        text = _hasty(text, rng)
    if rng.random() < 0.06:
        text = _fill(text, rng)
    if rng.random() < 0.1:
        text = _weaken(text, rng)
    if rng.random() < 0.3:
        text = _shorten(text, rng)
    if rng.random() < 0.2:
        text = _typos(text, rng)
    text = _case(text, rng)
    if text[-1:].isalnum() or text[-1:] in "`)_\"'":
        text += rng.choices(("", "?", ".", "??", "!", " ?", "..."), (44, 44, 6, 1.5, 1.5, 2, 1))[0]
    return text
