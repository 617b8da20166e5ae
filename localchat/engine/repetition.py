"""Loop detector: finds answers that repeat the same piece of text forever.

Small models fall into loops that only a token limit would end, minutes later. A piece of prose counts as a
loop after about eight repeats. Zeros, rulers, table cells and markup need a much longer run, because users
ask for them. A prompt that asks for N repeats gets them.
"""

import re
import zlib
from itertools import groupby
from typing import Final

import msgspec

from localchat.engine.near_repetition import recount, stale_words
from localchat.engine.periods import periods, run_length
from localchat.engine.request import GenerateRequest, Infill, Messages, TextPrompt

_MIN_PROSE_CHARS: Final = 600
"""Shortest run of repeated prose that counts as a loop."""
_MIN_REPEATS: Final = ((150, 8), (300, 6), (1500, 4))
"""(longest piece in characters, repeats that make it a loop). Longer pieces never count."""
_MIN_ANY_REPEATS: Final = min(repeats for _, repeats in _MIN_REPEATS)
_MIN_PLAIN_CHARS: Final = 2048
"""Shortest run of digits, punctuation, markup or a single letter that counts."""
_MIN_EMOJI_CHARS: Final = 1024
_SHIFTING_CHARS: Final = 1024
_MIN_SHIFTING_RUN: Final = 100
_LONG_RUN: Final = re.compile(rf"(.)\1{{{_MIN_SHIFTING_RUN - 1},}}", re.DOTALL)
_MIN_SHIFTING_SHARE: Final = 0.9
"""Share of the last 1,024 characters in long runs that counts as a loop.

The runs have two or more different signs."""
_DRIFT_CHARS: Final = 2048
_DRIFT_RUN: Final = re.compile(r"(.{1,64}?)\1{2,}", re.DOTALL)
"""Three or more repeats of a short piece."""
_MIN_DRIFT_SHARE: Final = 0.7
"""Share of the last 2,048 characters in such runs that counts as a loop."""
_MIN_DRIFT_PIECES: Final = 4
"""Different pieces of such a loop."""
_MAX_DRIFT_LINES: Final = 8
"""Texts with more lines may be tables, songs, or pictures of letters."""
_DRIFT_PROBE_CHARS: Final = 512
_MAX_DRIFT_PROBE_BYTES: Final = 180
"""Compressed size of the last 512 characters from which no loop is searched. Prose has about 300."""
_MIN_BLANK_CHARS: Final = 400
"""Shortest run of white space or replacement characters that counts."""
_MIN_NUMBERED_LINES: Final = 10
"""Lines that differ only in their number and count as a loop."""
_MIN_NUMBERED_CONTENT: Final = 20
"""Characters of words in each of these lines."""
_MAX_SILENT_TOKENS: Final = 256
"""Consecutive tokens without any text that count as a loop."""
_CHECK_INTERVAL_CHARS: Final = 64
_NEAR_INTERVAL: Final = 4
"""Checks per search for near repeats, which costs ten times as much and needs a longer run."""
_TAIL_CHARS: Final = 6144
_MAX_WANTED_REPEATS: Final = 10_000
"""Larger numbers in a prompt are not numbers of repeats."""
_BORDERS: Final = tuple(
    map(re.compile, (r"\n+", r"[.!?…](?=\s)\s|[。！？]", r",\s*(?=[{\[])", r"[,;]\s", r"\s"))
)
"""Ends of a line, a sentence, a JSON item, a clause and a word."""
_LINE: Final = re.compile(r"[^\n]*\n")
_NUMBER: Final = re.compile(r"(?m)^([^\w\n]*(?:[^\W\d]+ )?)\d+")
_NO_CONTENT: Final = re.compile(
    r"<[^<>]*>|\"[^\"\n]*\"\s*:|\\[nrt]|\b(?:null|none|true|false|nan|n/a)\b", re.IGNORECASE
)
"""Markup, JSON keys and constants."""
_NO_LETTERS: Final = re.compile(r"[\W\d_]+")
_EMOJI: Final = re.compile("[\U0001f000-\U0001ffff]")


class Repetition(msgspec.Struct, frozen=True, omit_defaults=True):
    """A loop at the end of a text."""

    piece: str
    times: int
    chars: int
    """Characters of all repeats."""
    kept: int
    """Characters of the first repeat."""

    @property
    def surplus(self) -> int:
        """Characters of all repeats but the first."""
        return self.chars - self.kept

    def name(self, max_chars: int = 48) -> str:
        """Return the piece on one line, shortened to `max_chars`."""
        text = " ".join(self.piece.split())
        if _is_blank(text):
            return "empty lines" if "\n" in self.piece else "blanks"
        if len(text) <= max_chars:
            return f'"{text}"'
        return f'"{text[: max_chars - 1].rstrip()}…"'

    def sentence(self, noun: str = "answer") -> str:
        """Describe the loop of a text that `noun` names."""
        return f"The {noun} repeated {self.name()} {self.times} times"


def without_repeats(text: str, repetition: Repetition | None) -> str:
    """Remove all repeats but the first from the end of a text."""
    if repetition is None or not 0 < repetition.surplus <= len(text):
        return text
    # The loop may be in another part of the answer, such as its reasoning.
    repeats = text[max(0, len(text) - repetition.chars) :]
    if repetition.piece.strip() not in repeats:
        return text
    return text[: len(text) - repetition.surplus]


class LoopDetector:
    """Checks the text of one choice every 64 characters. Most checks cost a few string searches."""

    def __init__(self, prompt: str = "") -> None:
        """prompt: the last message, which may ask for repeats."""
        self._prompt_words = set(_content(prompt).split())
        self._wanted = _wanted_repeats(prompt)
        self._tail = ""
        self._pending: list[str] = []
        self._pending_chars = 0
        self._silent_tokens = 0
        self._checks = 0

    def push(self, text: str) -> Repetition | None:
        """Add the next token's text, and return the loop at the end, if any."""
        if not text:
            self._silent_tokens += 1
            if self._silent_tokens >= _MAX_SILENT_TOKENS:
                return Repetition("", self._silent_tokens, 0, 0)
            return None
        self._silent_tokens = 0
        self._pending.append(text)
        self._pending_chars += len(text)
        if self._pending_chars < _CHECK_INTERVAL_CHARS:
            return None
        self._tail = (self._tail + "".join(self._pending))[-_TAIL_CHARS:]
        self._pending.clear()
        self._pending_chars = 0
        self._checks += 1
        return self.find(self._tail, near=self._checks % _NEAR_INTERVAL == 0)

    def find(self, text: str, *, near: bool = True) -> Repetition | None:
        """Return the loop at the end of a text, if any. near: whether near repeats count too."""
        if len(text) < _MIN_BLANK_CHARS:
            return None
        loop = self._exact(text) or self._numbered(text)
        if loop is None and near:
            loop = self._near(text) or self._shifting(text) or self._drifting(text)
        return loop

    def _exact(self, text: str) -> Repetition | None:
        """Find equal repeats of one piece."""
        for period in periods(text):
            run = run_length(text, period)
            times = run // period
            if times < _MIN_ANY_REPEATS:
                continue
            first = text[len(text) - run : len(text) - run + period]
            start = _piece_start(first)
            piece = first[start:] + first[:start]
            if self._is_loop(piece, times, run):
                return Repetition(piece, times, run, start + period)
        return None

    def _is_loop(self, piece: str, times: int, run: int) -> bool:
        content = _content(piece)
        if not content or len(set(piece)) == 1:
            return run >= _min_plain_run(piece) and times > self._wanted
        if self._was_requested(content, times):
            return False
        for max_length, repeats in _MIN_REPEATS:
            if len(piece) <= max_length:
                return times >= repeats and run >= _MIN_PROSE_CHARS
        return False

    def _numbered(self, text: str) -> Repetition | None:
        """Find lines that differ only in their leading number."""
        # The last line may be incomplete, and blank lines may separate the others.
        complete = text[: text.rfind("\n") + 1]
        last = _last_two_lines(complete)
        if len(last) < 2 or _without_number(last[0]) != _without_number(last[1]):
            return None
        lines = [match for match in _LINE.finditer(complete) if match[0].strip()]
        if len(lines) < _MIN_NUMBERED_LINES:
            return None
        content = _content(_without_number(lines[-1][0]))
        if len(content) < _MIN_NUMBERED_CONTENT:
            return None
        repeats = list(
            next(
                group
                for _, group in groupby(reversed(lines), lambda line: _without_number(line[0]))
            )
        )
        times = len(repeats)
        first = repeats[-1]
        run = len(text) - first.start()
        if times < _MIN_NUMBERED_LINES or run < _MIN_PROSE_CHARS:
            return None
        if self._was_requested(content, times):
            return None
        return Repetition(first[0].strip(), times, run, len(first[0]))

    def _near(self, text: str) -> Repetition | None:
        """Find repeats that differ in a number or come in varying order."""
        loop = recount(text)
        if loop is not None and loop.times > self._wanted:
            # Start the piece at the start of a sentence.
            start = loop.start + _piece_start(loop.piece)
            end = start + loop.kept
            chars = len(text) - loop.start
            return Repetition(text[start:end].strip(), loop.times, chars, end - loop.start)
        loop = stale_words(text, self._wanted)
        if loop is None:
            return None
        return Repetition(loop.piece, loop.times, len(text) - loop.start, loop.kept)

    def _shifting(self, text: str) -> Repetition | None:
        """Find a run of one sign after a run of another.

        A frequency penalty moves a loop to the next sign before it is long enough by itself.
        """
        tail = text[-_SHIFTING_CHARS:]
        if len(tail) < _SHIFTING_CHARS or self._wanted:
            return None
        return _runs(tail, _LONG_RUN, 2, _MIN_SHIFTING_SHARE)

    def _drifting(self, text: str) -> Repetition | None:
        """Find runs of short pieces, each after a run of another: `Monday Monday Monday Sunday Sunday Sunday`.

        Small models drift so from word to word or from sentence to sentence.
        """
        tail = text[-_DRIFT_CHARS:]
        if len(tail) < _DRIFT_CHARS or self._wanted or tail.count("\n") > _MAX_DRIFT_LINES:
            return None
        end = tail[-_DRIFT_PROBE_CHARS:].encode(errors="replace")
        if len(zlib.compress(end, 1)) > _MAX_DRIFT_PROBE_BYTES:
            return None
        # Digits and emoji may be a table or a picture.
        if 2 * sum(sign.isalpha() for sign in tail) < len(tail):
            return None
        return _runs(tail, _DRIFT_RUN, _MIN_DRIFT_PIECES, _MIN_DRIFT_SHARE)

    def _was_requested(self, content: str, times: int) -> bool:
        """Whether the prompt asks for this many repeats of these words."""
        words = set(content.split())
        return times <= self._wanted and bool(words) and words <= self._prompt_words


def _runs(
    tail: str, pattern: re.Pattern[str], min_pieces: int, min_share: float
) -> Repetition | None:
    """Return the last run of a text that consists mostly of runs. None if too few pieces differ."""
    runs = [(run[1], len(run[0])) for run in pattern.finditer(tail)]
    covered = sum(length for _, length in runs)
    pieces = {piece for piece, _ in runs}
    if len(pieces) < min_pieces or covered < min_share * len(tail):
        return None
    piece, length = runs[-1]
    return Repetition(piece, length // len(piece), len(tail), len(piece))


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
    """Return the detector for a choice, or None if the request turns loop detection off."""
    if not request.loop_guard or request.ignore_eos:
        return None
    return LoopDetector(prompt_end(request))


def _piece_start(piece: str) -> int:
    """Return the index of the first complete line, sentence, item or word in a piece."""
    for pattern in _BORDERS:
        if match := pattern.search(piece):
            return match.end() % len(piece)
    return 0


def _min_plain_run(piece: str) -> int:
    """Return the shortest run that counts as a loop, for a piece without words."""
    if _is_blank(piece.replace("\ufffd", "")):
        return _MIN_BLANK_CHARS
    if _EMOJI.search(piece):
        return _MIN_EMOJI_CHARS
    return _MIN_PLAIN_CHARS


def _is_blank(text: str) -> bool:
    """Return whether a text has only white space and invisible characters."""
    return not any(char.isprintable() and char != " " for char in text)


def _last_two_lines(text: str) -> list[str]:
    """Return the last two lines that are not blank, the last one first. text: complete lines."""
    lines: list[str] = []
    while text and len(lines) < 2:
        text, _, line = text.rpartition("\n")
        if line.strip():
            lines.append(line)
    return lines


def _without_number(line: str) -> str:
    return _NUMBER.sub(r"\1#", line).strip()


def _content(text: str) -> str:
    """Return the words of a text in lower case, without markup and numbers."""
    return _NO_LETTERS.sub(" ", _NO_CONTENT.sub(" ", text)).casefold().strip()


def _wanted_repeats(prompt: str) -> int:
    """Return the largest number of repeats that a prompt may ask for, plus one."""
    numbers = [int(digits) for digits in re.findall(r"(?<!\d)\d{1,5}(?!\d)", prompt)]
    return max((number + 1 for number in numbers if number <= _MAX_WANTED_REPEATS), default=0)
