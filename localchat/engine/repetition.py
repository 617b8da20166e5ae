"""Loop detector: notices an answer that repeats the same piece of text forever.

Small models fall into loops that only a limit would end, minutes later. A piece of prose counts as a loop
after about eight repeats. Zeros, rules, table cells and markup need a much longer run, because people ask
for them. A prompt that asks for N repeats gets them.
"""

import re
from itertools import groupby
from typing import Final

import msgspec

from localchat.engine.near_repetition import recount, stale_words
from localchat.engine.periods import periods, run_length
from localchat.engine.request import GenerateRequest, Infill, Messages, TextPrompt

_LEAST_CHARS: Final = 600
"""Shortest run of repeated prose that counts as a loop."""
_LEAST_REPEATS: Final = ((150, 8), (300, 6), (1500, 4))
"""Repeats that a loop has at least, by the longest period in characters that they apply to."""
_NUMBERED_REPEATS: Final = 10
"""Repeats of a numbered line, which differ in the number."""
_PLAIN_CHARS: Final = 2048
"""Shortest run of digits, punctuation, markup or one letter that counts."""
_EMOJI_CHARS: Final = 1024
_BLANK_CHARS: Final = 400
"""Shortest run of white space or replacement characters that counts."""
_SILENT_TOKENS: Final = 256
"""Tokens in a row that print nothing."""
_CHECK_EVERY: Final = 64
_TAIL_CHARS: Final = 6144
_LONGEST_WANTED: Final = 10_000
_NUMBERED_CONTENT: Final = 20
"""Characters of words that such a line has at least."""
_BORDERS: Final = tuple(
    map(re.compile, (r"\n+", r"[.!?…](?=\s)\s|[。！？]", r",\s*(?=[{\[])", r"[,;]\s", r"\s"))
)
_LINE: Final = re.compile(r"[^\n]*\n")
_NUMBER: Final = re.compile(r"(?m)^([^\w\n]*(?:[^\W\d]+ )?)\d+")
_NO_CONTENT: Final = re.compile(
    r"<[^<>]*>|\"[^\"\n]*\"\s*:|\\[nrt]|\b(?:null|none|true|false|nan|n/a)\b", re.IGNORECASE
)
"""Markup, JSON keys and constants."""
_NO_LETTERS: Final = re.compile(r"[\W\d_]+")
_EMOJI: Final = re.compile("[\U0001f000-\U0001ffff]")


class Repetition(msgspec.Struct, frozen=True, omit_defaults=True):
    """The end of a text that repeats one piece."""

    piece: str
    times: int
    chars: int
    """Characters of all the repeats, at the end of the text."""
    kept: int
    """Characters of the first of them."""

    @property
    def surplus(self) -> int:
        """Characters at the end of the text that only repeat."""
        return self.chars - self.kept

    def name(self, most: int = 48) -> str:
        """Return the piece on one line, shortened."""
        text = " ".join(self.piece.split())
        if not text:
            return "empty lines" if "\n" in self.piece else "blanks"
        if len(text) <= most:
            return f'"{text}"'
        return f'"{text[: most - 1].rstrip()}…"'

    def sentence(self, what: str = "answer") -> str:
        """Describe the loop. `what`: the noun for the text."""
        return f"The {what} repeated {self.name()} {self.times} times"


def without_repeats(text: str, repetition: Repetition | None) -> str:
    """Drop all but the first of the repeats that end a text."""
    if repetition is None or not 0 < repetition.surplus <= len(text):
        return text
    start = text[max(0, len(text) - repetition.chars) :]
    # The loop may be in another part of the answer, its reasoning for example.
    if repetition.piece.strip() not in start:
        return text
    return text[: len(text) - repetition.surplus]


class LoopDetector:
    """Watches the text of one choice. A check runs every 64 characters and takes some string searches."""

    def __init__(self, prompt: str = "") -> None:
        """`prompt`: the last message, which may ask for repeats."""
        self._prompt = _content(prompt)
        self._wanted = _wanted_repeats(prompt)
        self._tail = ""
        self._new: list[str] = []
        self._unchecked = 0
        self._silent = 0

    def push(self, text: str) -> Repetition | None:
        """Add the text of the next token. Returns the loop that the text ends in, if it does."""
        if not text:
            self._silent += 1
            if self._silent >= _SILENT_TOKENS:
                return Repetition("", self._silent, 0, 0)
            return None
        self._silent = 0
        self._new.append(text)
        self._unchecked += len(text)
        if self._unchecked < _CHECK_EVERY:
            return None
        self._unchecked = 0
        self._tail = (self._tail + "".join(self._new))[-_TAIL_CHARS:]
        self._new.clear()
        return self.find(self._tail)

    def find(self, text: str) -> Repetition | None:
        """Return the loop that a text ends in."""
        if len(text) < _BLANK_CHARS:
            return None
        for period in periods(text):
            run = run_length(text, period)
            if run // period < _LEAST_REPEATS[-1][1]:
                continue
            first = text[len(text) - run : len(text) - run + period]
            start = _piece_start(first)
            piece = first[start:] + first[:start]
            if self._is_loop(piece, run):
                return Repetition(piece, run // period, run, start + period)
        return self._numbered(text) or self._near(text)

    def _near(self, text: str) -> Repetition | None:
        """Find repeats that differ in a number or come in varying order."""
        loop = recount(text)
        if loop is not None and loop.times > self._wanted:
            # Begin the piece at the beginning of a sentence.
            start = loop.start + _piece_start(loop.piece)
            end = start + loop.kept
            chars = len(text) - loop.start
            return Repetition(text[start:end].strip(), loop.times, chars, end - loop.start)
        loop = stale_words(text, self._wanted)
        if loop is None:
            return None
        return Repetition(loop.piece, loop.times, len(text) - loop.start, loop.kept)

    def _is_loop(self, piece: str, run: int) -> bool:
        times = run // len(piece)
        content = _content(piece)
        if not content or len(set(piece)) == 1:
            least = _PLAIN_CHARS
            if not piece.strip(" \t\n\r\ufffd"):
                least = _BLANK_CHARS
            elif _EMOJI.search(piece):
                least = _EMOJI_CHARS
            return run >= least and times > self._wanted
        if times <= self._wanted and self._is_wanted(content):
            return False
        repeats = next((count for longest, count in _LEAST_REPEATS if len(piece) <= longest), None)
        return repeats is not None and times >= repeats and run >= _LEAST_CHARS

    def _is_wanted(self, content: str) -> bool:
        """Whether the prompt has the words of a piece."""
        words = set(content.split())
        return bool(words) and words <= set(self._prompt.split())

    def _numbered(self, text: str) -> Repetition | None:
        """Find equal lines that only their leading number tells apart."""
        # The last line may be incomplete, and blank lines may separate the others.
        whole = text[: text.rfind("\n") + 1]
        lines = [match for match in _LINE.finditer(whole) if match[0].strip()]
        if len(lines) < _NUMBERED_REPEATS:
            return None
        equal = next(group for _, group in groupby(reversed(lines), _without_number))
        repeats = list(equal)
        times = len(repeats)
        first = repeats[-1]
        content = _content(_without_number(first))
        run = len(text) - first.start()
        if times < _NUMBERED_REPEATS or run < _LEAST_CHARS or len(content) < _NUMBERED_CONTENT:
            return None
        if times <= self._wanted and self._is_wanted(content):
            return None
        return Repetition(first[0].strip(), times, run, len(first[0]))


def prompt_end(request: GenerateRequest) -> str:
    """Return the end of a request's prompt, which may ask for repeats."""
    match request.prompt:
        case Messages(messages=messages):
            texts = [message.content for message in messages if message.role == "user"]
            return texts[-1][-_TAIL_CHARS:] if texts else ""
        case TextPrompt(text=text):
            return text[-_TAIL_CHARS:]
        case Infill(prefix=prefix):
            return prefix[-_TAIL_CHARS:]
    return ""


def detector_for(request: GenerateRequest) -> LoopDetector | None:
    """Make the detector of a choice; None where the request wants none."""
    if not request.loop_guard or request.ignore_eos:
        return None
    return LoopDetector(prompt_end(request))


def _piece_start(piece: str) -> int:
    """Return where a line, sentence, item or word begins in a piece that may begin in the middle of one."""
    for pattern in _BORDERS:
        if match := pattern.search(piece):
            return match.end() % len(piece)
    return 0


def _without_number(line: re.Match[str]) -> str:
    return _NUMBER.sub(r"\1#", line[0]).strip()


def _content(text: str) -> str:
    """Return the words of a text in lower case, without markup and numbers."""
    return _NO_LETTERS.sub(" ", _NO_CONTENT.sub(" ", text)).casefold().strip()


def _wanted_repeats(prompt: str) -> int:
    """Return the largest number in a prompt that may be a number of repeats."""
    numbers = [int(digits) for digits in re.findall(r"(?<!\d)\d{1,5}(?!\d)", prompt)]
    # One more, as a loop of a text that was asked for is no harm before that.
    return max((number + 1 for number in numbers if number <= _LONGEST_WANTED), default=0)
