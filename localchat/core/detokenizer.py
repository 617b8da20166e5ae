"""One choice's text: tokens in, typed parts out. Never half a code point, never half a stop string."""

import codecs
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from localchat.chat_format.parser import Answer, Call, Parser, Part
from localchat.core.stop_strings import StopPatterns, StopScanner
from localchat.engine.events import Event, Reasoning, Text, TokenLogprob, ToolCall

# Token bytes to text, piece by piece: never half a code point, never a lost byte.


class DecodedText(NamedTuple):
    """Text that became whole, and how many more tokens it completes: their bytes are out
    entirely."""

    text: str = ""
    tokens: int = 0


class Detokenizer:
    """Decodes one choice. The pieces and the flush together are exactly `whole.decode("utf-8",
    errors="replace")` of all bytes, whatever the borders between tokens.

    Bytes that may begin a code point wait for the next token; bytes that no longer can are shown as
    U+FFFD at once. Tokens complete in order: one without bytes completes with the text before it.
    """

    def __init__(self, *, strip_leading_space: bool = False) -> None:
        """`strip_leading_space`: drop one space at the very beginning, which SentencePiece
        vocabularies put before the first word of a text."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = strip_leading_space
        self._taken = 0
        self._ends: deque[int] = deque()

    @property
    def held_bytes(self) -> int:
        """Bytes that wait for the rest of their code point, 0 to 3."""
        return len(self._decoder.getstate()[0])

    @property
    def waiting_tokens(self) -> int:
        """Tokens pushed and not yet completed."""
        return len(self._ends)

    def push(self, token_bytes: bytes) -> DecodedText:
        """Take the bytes of the next token."""
        if self._strip and token_bytes:
            self._strip = False
            token_bytes = token_bytes.removeprefix(b" ")
        self._taken += len(token_bytes)
        self._ends.append(self._taken)
        return DecodedText(self._decoder.decode(token_bytes), self._complete())

    def flush(self) -> DecodedText:
        """The end: half a code point that still waits becomes U+FFFD. A later push begins anew."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return DecodedText(text, self._complete())

    def _complete(self) -> int:
        shown = self._taken - self.held_bytes
        ends, count = self._ends, 0
        while ends and ends[0] <= shown:
            ends.popleft()
            count += 1
        return count


class OutputDelta(NamedTuple):
    """What became certain. `stop`: the stop string that ended the text, else empty."""

    events: list[Event]
    stop: str = ""


class _Entry(NamedTuple):
    end: int
    logprob: TokenLogprob


class ChoiceOutput:
    """Pieces of bytes become events of one choice. `logprobs` ride on the text that completes their token;
    those of reasoning and of tool calls are not told, those of a stop string neither.

    `called`: a tool was called.
    """

    def __init__(
        self,
        choice: int,
        piece: Callable[[int], bytes],
        stops: StopPatterns,
        splitter: Parser | None,
        *,
        strip_leading_space: bool = False,
    ) -> None:
        self._choice = choice
        self._piece = piece
        self._detokenizer = Detokenizer(strip_leading_space=strip_leading_space)
        self._stops = StopScanner(stops)
        self._splitter = splitter
        self._untold: deque[TokenLogprob] = deque()
        self._entries: deque[_Entry] = deque()
        self._heard = 0
        self._shown = 0
        self._thinking = False
        self.has_tool_calls = False

    def push(self, token: int, logprob: TokenLogprob | None) -> OutputDelta:
        """Take the next token."""
        if logprob is not None:
            self._untold.append(logprob)
        text, completed = self._detokenizer.push(self._piece(token))
        self._heard += len(text)
        if logprob is not None or self._untold:
            self._complete(completed)
        scan = self._stops.push(text)
        events = self._show(scan.text)
        if scan.stop:
            events += self._close()
        return OutputDelta(events, scan.stop)

    def finish(self) -> list[Event]:
        """The last token was said: everything that waited."""
        text, completed = self._detokenizer.flush()
        self._heard += len(text)
        self._complete(completed)
        scan = self._stops.push(text)
        events = self._show(scan.text + ("" if scan.stop else self._stops.flush()))
        events += self._close()
        left = self._due()
        if left and not self._thinking:  # of tokens that print nothing
            events.append(Text(self._choice, "", left))
        return events

    def _complete(self, count: int) -> None:
        for _ in range(min(count, len(self._untold))):
            self._entries.append(_Entry(self._heard, self._untold.popleft()))

    def _show(self, text: str) -> list[Event]:
        self._shown += len(text)
        if not text and not self._entries:
            return []
        if self._splitter is not None:
            return self._events(self._splitter.feed(text))
        return self._events([Answer(text)] if text else [])

    def _close(self) -> list[Event]:
        return self._events(self._splitter.finish()) if self._splitter else []

    def _events(self, parts: list[Part]) -> list[Event]:
        events: list[Event] = []
        answers = sum(isinstance(part, Answer) for part in parts)
        logprobs = self._due() if parts else ()
        for part in parts:
            self._thinking = not isinstance(part, Answer)
            match part:
                case Answer(text):
                    answers -= 1
                    events.append(Text(self._choice, text, () if answers else logprobs))
                case Call(number, id_, name, arguments):
                    self.has_tool_calls = True
                    events.append(ToolCall(self._choice, number, id_, name, arguments))
                case _:
                    events.append(Reasoning(self._choice, part.text))
        return events

    def _due(self) -> tuple[TokenLogprob, ...]:
        due = []
        while self._entries and self._entries[0].end <= self._shown:
            due.append(self._entries.popleft().logprob)
        return tuple(due)
