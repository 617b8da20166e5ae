"""Print the events of one request as they arrive, and collect the answer."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from localchat.cli.signals import immediate
from localchat.cli.streams import Terminal
from localchat.engine.events import (
    Accepted,
    Event,
    Loading,
    Prefill,
    Queued,
    Reasoning,
    Text,
    ToolCall,
)
from localchat.engine.stream import Stream
from localchat.session.answer_builder import AnswerBuilder
from localchat.session.engine_status import EngineStatus
from localchat.session.progress import progress_words


@dataclass(slots=True)
class ReceivedAnswer:
    """Answer to a request so far."""

    choices: tuple[AnswerBuilder, ...] = ()
    accepted: Accepted | None = None
    status: EngineStatus = field(default_factory=EngineStatus)
    """Progress and metrics of the request."""
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
    is_enough: Callable[[], bool] = lambda: False
    """Returns True if the text so far suffices, which ends the answer early."""


def receive(stream: Stream, display: AnswerDisplay, answer: ReceivedAnswer) -> None:
    """Read the stream to its end. Ctrl+C cancels it between two events and keeps the text so far.

    Raises what the stream raises. The `answer` then contains the text so far.
    """
    begun = False
    status = answer.status
    status.begin()
    try:
        with stream:
            events = iter(stream)
            while True:
                # Ctrl+C takes effect only while waiting, so that no event is lost halfway.
                with immediate():
                    event = next(events, None)
                if event is None:
                    break
                has_progress = status.update(event)
                match event:
                    case Text() | Reasoning() | ToolCall() if not begun:
                        begun = True
                        display.terminal.progress("")
                        display.on_begin()
                    case Queued() | Loading() | Prefill() if has_progress:
                        display.terminal.progress(progress_words(status, time.monotonic()))
                _collect(answer, event, display)
                if isinstance(event, Text) and display.is_enough():
                    break
    except KeyboardInterrupt:
        answer.interrupted = True
    finally:
        display.terminal.progress("")


def _collect(answer: ReceivedAnswer, event: Event, display: AnswerDisplay) -> None:
    for choice in answer.choices:
        choice.take(event)
    match event:
        case Text(choice=0, text=text) if display.print_text:
            display.terminal.answer(text)
        case Reasoning(choice=0, text=text) if display.reasoning:
            display.terminal.reasoning(text)
        case Accepted():
            answer.accepted = event
        case _:
            pass  # the choices and the status have the rest
