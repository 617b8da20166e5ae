"""Print the events of one request as they arrive, and collect the answer."""

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from localchat.cli.signals import immediate
from localchat.cli.streams import Terminal
from localchat.engine.events import (
    Accepted,
    Done,
    Finished,
    FinishReason,
    Loading,
    MetricsSnapshot,
    Prefill,
    Queued,
    Reasoning,
    Text,
    ToolCall,
)
from localchat.engine.stream import Stream
from localchat.session.engine_status import EngineStatus
from localchat.session.progress import progress_words


@dataclass(slots=True)
class ReceivedAnswer:
    """Answer to a request so far. Texts and reasoning are stored by choice."""

    texts: defaultdict[int, str] = field(default_factory=lambda: defaultdict(str))
    reasoning: defaultdict[int, str] = field(default_factory=lambda: defaultdict(str))
    reasons: dict[int, FinishReason] = field(default_factory=dict)
    ends: dict[int, Finished] = field(default_factory=dict)
    accepted: Accepted | None = None
    prefill: Prefill | None = None
    metrics: MetricsSnapshot | None = None
    done: Done | None = None
    interrupted: bool = False


@dataclass(frozen=True, slots=True)
class AnswerDisplay:
    """How an answer is printed while it arrives."""

    terminal: Terminal
    print_text: bool = True
    """Print the text of choice 0 to stdout at once."""
    reasoning: bool = True
    """Print the reasoning to stderr."""
    on_begin: Callable[[], None] = lambda: None
    """Called once before the first text, when the engine is loaded."""
    is_enough: Callable[[str], bool] = lambda text: False
    """Returns True if the text so far suffices, which ends the answer early."""


def receive(
    stream: Stream, display: AnswerDisplay, answer: ReceivedAnswer | None = None
) -> ReceivedAnswer:
    """Read the stream to its end. Ctrl+C cancels it between two events and keeps the text so far.

    Raises what the stream raises. A given `answer` then contains the text so far.
    """
    if answer is None:
        answer = ReceivedAnswer()
    begun = False
    status = EngineStatus()
    status.begin()
    try:
        with stream:
            events = iter(stream)
            while True:
                # Ctrl+C takes effect only while waiting, so that no event is lost halfway.
                with immediate():
                    event = next(events, None)
                match event:
                    case None:
                        break
                    case Text() | Reasoning() | ToolCall() if not begun:
                        begun = True
                        display.terminal.progress("")
                        display.on_begin()
                    case Accepted() | Queued() | Loading() | Prefill():
                        if status.update(event):
                            display.terminal.progress(progress_words(status, time.monotonic()))
                _collect(answer, event, display)
                if isinstance(event, Text) and display.is_enough(answer.texts[0]):
                    break
    except KeyboardInterrupt:
        answer.interrupted = True
    finally:
        display.terminal.progress("")
    return answer


def _collect(answer: ReceivedAnswer, event: object, display: AnswerDisplay) -> None:
    match event:
        case Text(choice=choice, text=text):
            answer.texts[choice] += text
            if display.print_text and choice == 0:
                display.terminal.answer(text)
        case Reasoning(choice=choice, text=text):
            answer.reasoning[choice] += text
            if display.reasoning and choice == 0:
                display.terminal.reasoning(text)
        case Finished(choice=choice, reason=reason):
            answer.reasons[choice] = reason
            answer.ends[choice] = event
        case Accepted():
            answer.accepted = event
        case Prefill():
            answer.prefill = event
        case MetricsSnapshot():
            answer.metrics = event
        case Done():
            answer.done = event
        case _:
            pass  # queue and load are progress; a prompt asks for no tool calls or prompt logprobs
