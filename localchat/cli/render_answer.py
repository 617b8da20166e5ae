"""Take the events of one request: show them as they come, keep what is needed afterwards."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from localchat.cli.signals import immediate
from localchat.cli.streams import Terminal
from localchat.engine.events import (
    Accepted,
    Done,
    Event,
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
from localchat.units import sizes

# Words for what an engine does before it speaks.


def progress_line(event: Event) -> str:
    """One quiet line for a phase before the first text; empty for every other event."""
    match event:
        case Queued(ahead=ahead):
            return f"queued, {ahead} ahead"
        case Loading(done_bytes=done, total_bytes=total):
            return f"loading {sizes(done, total)}"
        case Prefill(done=done, cached=cached, total=total):
            came = f" of which {cached:,} cached" if cached else ""
            return f"prefill {done:,}/{total:,}{came}"
        case _:
            return ""


@dataclass(slots=True)
class Answer:
    """What came of a request, complete or not. Texts and reasoning are by choice."""

    texts: defaultdict[int, str] = field(default_factory=lambda: defaultdict(str))
    reasoning: defaultdict[int, str] = field(default_factory=lambda: defaultdict(str))
    reasons: dict[int, FinishReason] = field(default_factory=dict)
    accepted: Accepted | None = None
    prefill: Prefill | None = None
    figures: MetricsSnapshot | None = None
    done: Done | None = None
    interrupted: bool = False


@dataclass(frozen=True, slots=True)
class Display:
    """How an answer is shown while it comes. `live`: its text goes to stdout at once (one choice).
    `begun` is called once, before the first text: the engine is loaded then. `enough` ends the answer early
    when it is true of the text so far. `grown` is called with the answer after each piece of it."""

    terminal: Terminal
    live: bool = True
    reasoning: bool = True
    begun: Callable[[], None] = lambda: None
    enough: Callable[[str], bool] = lambda text: False
    grown: Callable[[Answer], None] = lambda answer: None


def take(stream: Stream, display: Display, answer: Answer | None = None) -> Answer:
    """Consume the stream. Ctrl+C cancels it between two events and keeps what was said. Raises what the
    stream raises; the text until then has been shown, and is in `answer` where the caller gives one."""
    answer = Answer() if answer is None else answer
    begun = False
    try:
        with stream:
            events = iter(stream)
            while True:
                with immediate():
                    event = next(events, None)
                match event:
                    case None:
                        break
                    case Text() | Reasoning() | ToolCall() if not begun:
                        begun = True
                        display.terminal.progress("")
                        display.begun()
                    case _ if line := progress_line(event):
                        display.terminal.progress(line)
                _keep(answer, event, display)
                if isinstance(event, Text) and display.enough(answer.texts[0]):
                    break
    except KeyboardInterrupt:
        answer.interrupted = True
    finally:
        display.terminal.progress("")
    return answer


def _keep(answer: Answer, event: object, display: Display) -> None:
    match event:
        case Text(choice=choice, text=text):
            answer.texts[choice] += text
            display.grown(answer)
            if display.live and choice == 0:
                display.terminal.answer(text)
        case Reasoning(choice=choice, text=text):
            answer.reasoning[choice] += text
            display.grown(answer)
            if display.reasoning and choice == 0:
                display.terminal.reasoning(text)
        case Finished(choice=choice, reason=reason):
            answer.reasons[choice] = reason
        case Accepted():
            answer.accepted = event
        case Prefill():
            answer.prefill = event
        case MetricsSnapshot():
            answer.figures = event
        case Done():
            answer.done = event
        case _:
            pass  # queue and load are progress; tool calls and prompt logprobs are not asked for here
