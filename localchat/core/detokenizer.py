"""Converts the tokens of one choice into text (Detokenizer) and typed events (ChoiceOutput).

Text never ends within a code point and never contains part of a stop string.
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
    """Text with complete code points."""

    text: str = ""
    tokens: int = 0
    """Number of tokens whose bytes are all decoded with this text."""


class Detokenizer:
    """Decodes the token bytes of one choice.

    All pieces together equal `all_bytes.decode("utf-8", errors="replace")` without the start of a code point at
    the end, wherever the token boundaries lie. Bytes that may start a code point wait for the next token, and
    are dropped if a limit ends the text. Invalid bytes become U+FFFD at once. Tokens complete in order, and one
    without bytes completes with the text before it.
    """

    def __init__(self, *, strip_leading_space: bool = False) -> None:
        """`strip_leading_space`: drop the space that SentencePiece vocabularies add before the first word."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = strip_leading_space
        self._taken = 0
        self._ends: deque[int] = deque()

    @property
    def held_bytes(self) -> int:
        """Number of bytes that wait for the rest of their code point, 0 to 3."""
        return len(self._decoder.getstate()[0])

    @property
    def idle(self) -> bool:
        """Whether the text of the next token depends on its own bytes only."""
        return not self._ends and not self._strip

    def push(self, token_bytes: bytes) -> DecodedText:
        """Decode the bytes of the next token."""
        if self._strip and token_bytes:
            self._strip = False
            token_bytes = token_bytes.removeprefix(b" ")
        if self._ends:
            return self._push_part(token_bytes)
        try:
            # No bytes wait, and most tokens end with a code point.
            return DecodedText(token_bytes.decode(), 1)
        except UnicodeDecodeError:
            return self._push_part(token_bytes)

    def _push_part(self, token_bytes: bytes) -> DecodedText:
        """Decode bytes that do not start or do not end with a code point."""
        self._taken += len(token_bytes)
        self._ends.append(self._taken)
        return DecodedText(self._decoder.decode(token_bytes), self._complete())

    def flush(self) -> DecodedText:
        """End the text. Drops the start of a code point. A later push starts a new text."""
        self._decoder.reset()
        return DecodedText("", self._complete())

    def _complete(self) -> int:
        shown = self._taken - self.held_bytes
        ends = self._ends
        count = 0
        while ends and ends[0] <= shown:
            ends.popleft()
            count += 1
        return count


class OutputDelta(NamedTuple):
    """Events of a token, and whether it ends the text."""

    events: list[Event]
    stop: str = ""
    """Stop string that ended the text. Empty: none."""
    repetition: Repetition | None = None
    """Loop at the end of the text."""


class _Entry(NamedTuple):
    end: int
    logprob: TokenLogprob


class ChoiceOutput:
    """Turns the tokens of one choice into events.

    Log probabilities are attached to the text that completes their token. Those of reasoning, tool calls and
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
        """`keep_stop`: the text includes the stop string that ends it.

        `loop_detector`: reads all text, reasoning and tool call arguments included.
        """
        self._choice = choice
        self.loop_detector = loop_detector
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
        """Tokens of reasoning so far, with the closing tag."""

    def push_plain(self, token: int) -> str | None:
        """Push a token without log probability. Return its text if it is shown at once and unchanged.

        None: the token was not pushed and needs `push`. The caller makes the event and asks `loop_detector`.
        """
        if not self._detokenizer.idle:
            return None
        try:
            text = self._piece(token).decode()
        except UnicodeDecodeError:
            return None
        if not self._stops.passes(text):
            return None
        if self._parser is not None and not self._parser.passes(text):
            return None
        return text

    def push(
        self, token: int, logprob: TokenLogprob | None, *, may_stop: bool = True
    ) -> OutputDelta:
        """Push the next token. `may_stop`: a stop string in its text ends the choice."""
        if logprob is not None:
            self._pending_logprobs.append(logprob)
        text, completed = self._detokenizer.push(self._piece(token))
        self._decoded_chars += len(text)
        if logprob is not None or self._pending_logprobs:
            self._complete(completed)
        scan = Scan(text)
        if may_stop:
            scan = self._stops.push(text)
        if self._parser is not None and self._parser.thinking:
            self.reasoning_tokens += 1
        events = self._emit(scan.text)
        if scan.stop:
            events += self._close()
        repetition = None
        if self.loop_detector is not None and not scan.stop:
            repetition = self.loop_detector.push(text)
        return OutputDelta(events, scan.stop, repetition)

    def finish(self) -> list[Event]:
        """End the choice. Return the events of everything that waited."""
        text, completed = self._detokenizer.flush()
        self._decoded_chars += len(text)
        self._complete(completed)
        scan = self._stops.push(text)
        last_text = scan.text
        if not scan.stop:
            last_text += self._stops.flush()
        events = self._emit(last_text)
        events += self._close()
        logprobs = self._due_logprobs()
        if logprobs and not self._outside_answer:
            # These belong to tokens without text.
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
        if not text:
            return []
        return self._events([Answer(text)])

    def _close(self) -> list[Event]:
        if self._parser:
            return self._events(self._parser.finish())
        return []

    def _events(self, parts: list[Part]) -> list[Event]:
        events: list[Event] = []
        answers = sum(isinstance(part, Answer) for part in parts)
        logprobs: tuple[TokenLogprob, ...] = ()
        if parts:
            logprobs = self._due_logprobs()
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
