"""Engine of a route: a small model answers, and a large one where a rule or a doubt asks for it.

If the small model's answer is checked before it is shown, its text is buffered until it is complete. Events
about its progress pass at once.
"""

import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import msgspec

from localchat.config.routes import Route
from localchat.engine.events import (
    Done,
    EngineStats,
    Event,
    Finished,
    Reasoning,
    Text,
    ToolCall,
    Usage,
)
from localchat.engine.interface import Engine, EngineInfo, Vectors
from localchat.engine.request import GenerateRequest, Messages, TextPrompt
from localchat.engine.stream import Stream
from localchat.errors import EngineClosed
from localchat.tries.best_answer import LogprobMean
from localchat.tries.judge import sum_usage
from localchat.tries.relay import Relay

_NO_USAGE = Usage(0, 0, 0)


@dataclass(slots=True)
class RouteFigures:
    """Answers and tokens of each model of a route, since it was opened."""

    small: int = 0
    """Answers of the small model."""
    large: int = 0
    """Answers of the large model."""
    small_tokens: int = 0
    large_tokens: int = 0
    discarded_tokens: int = 0
    """Tokens of the small model in answers that the large model replaced."""


class RouteEngine:
    """See Engine. The large model is opened when it is first needed."""

    def __init__(self, route: Route, small: Engine, open_large: Callable[[], Engine]) -> None:
        self.route = route
        self.figures = RouteFigures()
        self.last_answer = ""
        """Which model answered last, and why."""
        self._small = small
        self._open_large = open_large
        self._large: Engine | None = None
        self._lock = threading.Lock()
        self._closed = False

    def generate(self, request: GenerateRequest) -> Stream:
        answer = _RoutedAnswer(self, request)
        answer.relay.start()
        return answer.relay.stream

    @property
    def small(self) -> Engine:
        """Engine of the small model."""
        return self._small

    @property
    def large(self) -> Engine:
        """Engine of the large model, which is opened if necessary. Raises LocalchatError."""
        with self._lock:
            if self._closed:
                raise EngineClosed("the engine was closed")
            if self._large is None:
                self._large = self._open_large()
            return self._large

    def count_small(self, tokens: int) -> None:
        """Count an answer of the small model."""
        with self._lock:
            self.figures.small += 1
            self.figures.small_tokens += tokens
            self.last_answer = "the small model answered"

    def count_large(self, tokens: int, discarded: int, reason: str) -> None:
        """Count an answer of the large model. `discarded`: tokens of the small model that it replaces."""
        with self._lock:
            self.figures.large += 1
            self.figures.large_tokens += tokens
            self.figures.discarded_tokens += discarded
            self.last_answer = f"the large model answered: {reason}"

    def sentence(self) -> str:
        """Return who answered last, and the share of the small model."""
        figures = self.figures
        route = self.route
        answers = figures.small + figures.large
        if not answers:
            return f"{route.word}: {route.small} first, then {route.large}"
        share = f"{figures.small:,} of {answers:,} answers ({figures.small / answers:.0%})"
        return f"{route.word}: {self.last_answer}; {share} by {route.small}"

    # Everything else is the small model's.

    def embed(self, texts: Sequence[str], *, truncate: bool = False) -> Vectors:
        return self._small.embed(texts, truncate=truncate)

    def rerank(self, query: str, texts: Sequence[str]) -> Vectors:
        return self._small.rerank(query, texts)

    def prompt_tokens(self, messages: Messages) -> list[int]:
        return self._small.prompt_tokens(messages)

    def tokenize(self, text: str, *, special: bool = False) -> list[int]:
        return self._small.tokenize(text, special=special)

    def detokenize(self, tokens: Sequence[int]) -> str:
        return self._small.detokenize(tokens)

    def render(self, messages: Messages) -> str:
        return self._small.render(messages)

    def info(self) -> EngineInfo:
        """Describe the small model under the name of the route, with the figures."""
        info = self._small.info()
        return msgspec.structs.replace(info, model=self.route.word, why=self.sentence())

    def stats(self) -> EngineStats:
        """Return the stats of the small model with the counts of the route."""
        return msgspec.structs.replace(self._small.stats(), routed=asdict(self.figures))

    @property
    def alive(self) -> bool:
        """Return True if the small model's process runs."""
        return bool(getattr(self._small, "alive", True))

    @property
    def child_pid(self) -> int | None:
        """Process id of the small model."""
        pid = getattr(self._small, "child_pid", None)
        return pid if isinstance(pid, int) else None

    def close(self, deadline_s: float = 2.0) -> None:
        with self._lock:
            self._closed = True
            large = self._large
        self._small.close(deadline_s)
        if large is not None:
            large.close(deadline_s)


class _RoutedAnswer:
    """Answer to one request of a route."""

    def __init__(self, engine: RouteEngine, request: GenerateRequest) -> None:
        self._engine = engine
        self._request = request
        self.relay = Relay("route", self._produce)

    def _produce(self) -> None:
        engine = self._engine
        if reason := _rule(engine.route, self._request):
            self._answer_with_large(reason, _NO_USAGE)
        # A check reads one text, so requests for several choices pass without it.
        elif engine.route.doubt is not None and self._request.n == 1:
            self._check_small(engine.route.doubt)
        else:
            self._answer_with_small()

    def _answer_with_small(self) -> None:
        for event in self.relay.generate(self._engine.small, self._request):
            if isinstance(event, Done):
                self._engine.count_small(event.usage.completion_tokens)
            self.relay.send(event)

    def _check_small(self, doubt: float) -> None:
        """Show the small model's answer unless its mean log probability is below `doubt`."""
        logprobs = self._request.logprobs
        # The mean log probability needs that of each token; the client gets what it asked for.
        request = msgspec.structs.replace(
            self._request, logprobs=0 if logprobs is None else logprobs
        )
        buffered: list[Event] = []
        mean = LogprobMean()
        done: Done | None = None
        for event in self.relay.generate(self._engine.small, request):
            match event:
                case Text():
                    mean.add(event)
                    if logprobs is None:
                        event = msgspec.structs.replace(event, logprobs=())
                    buffered.append(event)
                case Reasoning() | ToolCall() | Finished():
                    buffered.append(event)
                case Done():
                    done = event
                case _:
                    self.relay.send(event)
        if done is None:
            return
        value = mean.value
        if value is not None and value < doubt:
            reason = f"mean log probability {value:.2f} is below {doubt:g}"
            self._answer_with_large(reason, done.usage)
            return
        self._engine.count_small(done.usage.completion_tokens)
        self.relay.send(*buffered, done)

    def _answer_with_large(self, reason: str, spent: Usage) -> None:
        """Let the large model answer. `spent`: usage of the small model before."""
        engine = self._engine
        for event in self.relay.generate(engine.large, self._request):
            if isinstance(event, Done):
                engine.count_large(event.usage.completion_tokens, spent.completion_tokens, reason)
                event = msgspec.structs.replace(event, usage=sum_usage(event.usage, [spent]))
            self.relay.send(event)


def _rule(route: Route, request: GenerateRequest) -> str:
    """Return the rule that sends a request to the large model at once, if any."""
    prompt = request.prompt
    texts = _texts(request)
    if route.longer_than is not None and sum(map(len, texts)) > route.longer_than:
        return f"longer than {route.longer_than:,} characters"
    last_text = texts[-1] if texts else ""
    if route.regex and re.search(route.regex, last_text, re.IGNORECASE):
        return f"it matches {route.regex!r}"
    if route.code and any("```" in text for text in texts):
        return "it has code"
    if route.tools and isinstance(prompt, Messages) and prompt.tools:
        return "it has tools"
    return ""


def _texts(request: GenerateRequest) -> list[str]:
    match request.prompt:
        case Messages(messages=messages):
            return [message.content for message in messages]
        case TextPrompt(text=text):
            return [text]
    return []
