"""Detokenizer: the tokens of one choice become text and typed events.

Text never ends in half a code point and never contains half a stop string.
"""

import codecs
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from localchat.chat_format.parser import Answer, Call, ChoiceParser, Part
from localchat.core.stop_strings import Scan, StopPatterns, StopScanner
from localchat.engine.events import Event, Reasoning, Text, TokenLogprob, ToolCall
from localchat.engine.repetition import LoopDetector, Repetition


class DecodedText(NamedTuple):
    """Text whose code points are complete."""

    text: str = ""
    tokens: int = 0
    """Tokens that it completes: all their bytes are out."""


class Detokenizer:
    """Decodes the token bytes of one choice.

    All pieces and the flush together are exactly `all_bytes.decode("utf-8", errors="replace")`, wherever the
    borders between tokens lie. Bytes that may begin a code point wait for the next token; bytes that no
    longer can are shown as U+FFFD at once. Tokens complete in order: one without bytes completes with the
    text before it.
    """

    def __init__(self, *, strip_leading_space: bool = False) -> None:
        """`strip_leading_space`: drop one space at the very beginning, which SentencePiece vocabularies
        put before the first word of a text."""
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
        """Decode the bytes of the next token."""
        if self._strip and token_bytes:
            self._strip = False
            token_bytes = token_bytes.removeprefix(b" ")
        if self._ends:
            return self._push_part(token_bytes)
        try:  # nothing waits, and most tokens end with a code point
            return DecodedText(token_bytes.decode(), 1)
        except UnicodeDecodeError:
            return self._push_part(token_bytes)

    def _push_part(self, token_bytes: bytes) -> DecodedText:
        """Decode bytes that do not begin or do not end with a code point."""
        self._taken += len(token_bytes)
        self._ends.append(self._taken)
        return DecodedText(self._decoder.decode(token_bytes), self._complete())

    def flush(self) -> DecodedText:
        """End the text: half a code point that still waits becomes U+FFFD. A later push begins anew."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return DecodedText(text, self._complete())

    def _complete(self) -> int:
        shown = self._taken - self.held_bytes
        ends = self._ends
        count = 0
        while ends and ends[0] <= shown:
            ends.popleft()
            count += 1
        return count


class OutputDelta(NamedTuple):
    """Events that became certain with a token."""

    events: list[Event]
    stop: str = ""
    """The stop string that ended the text, else empty."""
    repetition: Repetition | None = None
    """The loop that the text ends in."""


class _Entry(NamedTuple):
    end: int
    logprob: TokenLogprob


class ChoiceOutput:
    """Turns the tokens of one choice into events.

    Log probabilities are attached to the text that completes their token; those of reasoning, tool calls and
    stop strings are dropped.
    """

    def __init__(
        self,
        choice: int,
        piece: Callable[[int], bytes],
        stops: StopPatterns,
        parser: ChoiceParser | None,
        *,
        strip_leading_space: bool = False,
        keep_stop: bool = False,
        loop_detector: LoopDetector | None = None,
    ) -> None:
        """`keep_stop`: the text includes the stop string that ends it. `loop_detector` reads all text:
        reasoning and the arguments of tool calls too."""
        self._choice = choice
        self._loop_detector = loop_detector
        self._piece = piece
        self._detokenizer = Detokenizer(strip_leading_space=strip_leading_space)
        self._stops = StopScanner(stops, keep=keep_stop)
        self._parser = parser
        self._pending_logprobs: deque[TokenLogprob] = deque()
        self._entries: deque[_Entry] = deque()
        self._decoded_chars = 0
        self._emitted_chars = 0
        self._outside_answer = False
        self.has_tool_calls = False
        self.reasoning_tokens = 0
        """Tokens of reasoning so far, with the tag that ends it."""

    def push(
        self, token: int, logprob: TokenLogprob | None, *, may_stop: bool = True
    ) -> OutputDelta:
        """Take the next token. `may_stop`: a stop string in its text ends the choice."""
        if logprob is not None:
            self._pending_logprobs.append(logprob)
        text, completed = self._detokenizer.push(self._piece(token))
        self._decoded_chars += len(text)
        if logprob is not None or self._pending_logprobs:
            self._complete(completed)
        scan = self._stops.push(text) if may_stop else Scan(text)
        if self._parser is not None and self._parser.thinking:
            self.reasoning_tokens += 1
        events = self._emit(scan.text)
        if scan.stop:
            events += self._close()
        detector = self._loop_detector
        repetition = detector.push(text) if detector is not None and not scan.stop else None
        return OutputDelta(events, scan.stop, repetition)

    def finish(self) -> list[Event]:
        """End the choice: returns everything that waited."""
        text, completed = self._detokenizer.flush()
        self._decoded_chars += len(text)
        self._complete(completed)
        scan = self._stops.push(text)
        events = self._emit(scan.text + ("" if scan.stop else self._stops.flush()))
        events += self._close()
        logprobs = self._due_logprobs()
        if logprobs and not self._outside_answer:  # of tokens that print nothing
            events.append(Text(self._choice, "", logprobs))
        return events

    def _complete(self, count: int) -> None:
        for _ in range(min(count, len(self._pending_logprobs))):
            self._entries.append(_Entry(self._decoded_chars, self._pending_logprobs.popleft()))

    def _emit(self, text: str) -> list[Event]:
        self._emitted_chars += len(text)
        if not text and not self._entries:
            return []
        if self._parser is not None:
            return self._events(self._parser.feed(text))
        if not self._entries:
            return [Text(self._choice, text)]
        return self._events([Answer(text)] if text else [])

    def _close(self) -> list[Event]:
        if self._parser:
            return self._events(self._parser.finish())
        return []

    def _events(self, parts: list[Part]) -> list[Event]:
        events: list[Event] = []
        answers = sum(isinstance(part, Answer) for part in parts)
        logprobs = self._due_logprobs() if parts else ()
        for part in parts:
            self._outside_answer = not isinstance(part, Answer)
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

    def _due_logprobs(self) -> tuple[TokenLogprob, ...]:
        logprobs = []
        while self._entries and self._entries[0].end <= self._emitted_chars:
            logprobs.append(self._entries.popleft().logprob)
        return tuple(logprobs)
