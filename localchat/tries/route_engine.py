"""Engine of a route: a small model answers, and a large one where a rule or a doubt asks for it.

If the small model's answer is checked before it is shown, its text is buffered until it is complete. Events
about its progress pass at once.
"""

import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

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
from localchat.errors import EngineClosed, LocalchatError
from localchat.state_file import StateFile
from localchat.tries.best_answer import LogprobMean
from localchat.tries.judge import Judge, sum_usage
from localchat.tries.relay import Relay

_LOCK_TIMEOUT_S = 1.0
_NO_USAGE = Usage(0, 0, 0)


class RouteFigures(msgspec.Struct, frozen=True, omit_defaults=True):
    """Answers and tokens of each model of a route."""

    small: int = 0
    """Answers of the small model."""
    large: int = 0
    """Answers of the large model."""
    small_tokens: int = 0
    large_tokens: int = 0
    discarded_tokens: int = 0
    """Tokens of the small model in verdicts, and in answers that the large model replaced."""

    @property
    def share(self) -> float:
        """Share of the answers that the small model gave."""
        return self.small / max(self.small + self.large, 1)

    def saved(self, small_bytes: int, large_bytes: int) -> float:
        """Return the share of weight reads saved against the large model alone. Negative if it cost more."""
        alone = (self.small_tokens + self.large_tokens) * large_bytes
        if not alone:
            return 0.0
        routed = (self.small_tokens + self.discarded_tokens) * small_bytes
        routed += self.large_tokens * large_bytes
        return 1 - routed / alone

    def __add__(self, other: "RouteFigures") -> "RouteFigures":
        names = self.__struct_fields__
        return RouteFigures(**{name: getattr(self, name) + getattr(other, name) for name in names})


class RouteEngine:
    """See Engine. The large model is opened when it is first needed."""

    def __init__(
        self,
        route: Route,
        small: Engine,
        open_large: Callable[[], Engine],
        state_dir: Path | None = None,
    ) -> None:
        """`state_dir`: folder for the figures of all runs. None counts this run alone."""
        self.route = route
        self._small = small
        self._open_large = open_large
        self._large: Engine | None = None
        self._lock = threading.Lock()
        self._figures = RouteFigures()
        path = None
        if state_dir is not None:
            path = state_dir / "routes" / f"{route.name}.json"
        self._file = StateFile(path, RouteFigures, RouteFigures())
        self._last_answer = ""
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

    def count(self, figures: RouteFigures, why: str) -> None:
        """Add an answer to the figures. `why` says which model gave it."""
        with self._lock:
            self._figures += figures
            self._last_answer = why
        try:
            self._file.update(lambda before: before + figures, _LOCK_TIMEOUT_S)
        except OSError:
            return  # the figures of this run are complete anyway

    @property
    def figures(self) -> RouteFigures:
        """Figures of all runs if they are stored, else of this run."""
        if self._file.path is not None:
            return self._file.read()
        return self._figures

    def sentence(self) -> str:
        """Return who answered last, the share of the small model, and the saving."""
        figures = self.figures
        route = self.route
        answers = figures.small + figures.large
        if not answers:
            return f"{route.word}: {route.small} first, then {route.large}"
        with self._lock:
            last_answer = self._last_answer
            large = self._large
        text = f"{figures.small:,} of {answers:,} answers ({figures.share:.0%}) by {route.small}"
        if last_answer:
            text = f"{last_answer}; {text}"
        text = f"{route.word}: {text}"
        if large is None:
            return text
        try:
            saved = figures.saved(self._small.info().file_bytes, large.info().file_bytes)
        except LocalchatError:
            return text
        return f"{text}, which saves {saved:.0%} of the reads of {route.large}"

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
        figures = self.figures
        return msgspec.structs.replace(
            self._small.stats(),
            routed={
                "small": figures.small,
                "large": figures.large,
                "small_tokens": figures.small_tokens,
                "large_tokens": figures.large_tokens,
                "discarded_tokens": figures.discarded_tokens,
            },
        )

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
        elif engine.route.waits and self._request.n == 1:
            self._check_small()
        else:
            self._answer_with_small()

    def _answer_with_small(self) -> None:
        for event in self.relay.generate(self._engine.small, self._request):
            if isinstance(event, Done):
                self._count_small(event.usage.completion_tokens)
            self.relay.send(event)

    def _check_small(self) -> None:
        """Show the small model's answer unless there is doubt about it."""
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
        text = "".join(event.text for event in buffered if isinstance(event, Text))
        doubt, judge_usage = self._doubt(text, mean)
        if self.relay.cancelled:
            return
        usage = sum_usage(done.usage, judge_usage)
        if doubt:
            self._answer_with_large(doubt, usage)
            return
        judge_tokens = usage.completion_tokens - done.usage.completion_tokens
        self._count_small(done.usage.completion_tokens, judge_tokens)
        self.relay.send(*buffered, msgspec.structs.replace(done, usage=usage))

    def _doubt(self, text: str, mean: LogprobMean) -> tuple[str, list[Usage]]:
        """Return the doubt about the small model's answer, and the usage of a verdict."""
        route = self._engine.route
        value = mean.value
        if route.doubt is not None and value is not None and value < route.doubt:
            return f"mean log probability {value:.2f} is below {route.doubt:g}", []
        if not route.judge or not isinstance(self._request.prompt, Messages):
            return "", []
        judge = Judge(
            lambda request: self.relay.generate(self._engine.small, request), self._request
        )
        faults = judge.faults(text)
        if not faults:
            return "", judge.spent
        return f"it finds a fault: {faults[0]}", judge.spent

    def _answer_with_large(self, reason: str, spent: Usage) -> None:
        """Let the large model answer. `spent`: usage of the small model before."""
        engine = self._engine
        for event in self.relay.generate(engine.large, self._request):
            if isinstance(event, Done):
                figures = RouteFigures(
                    large=1,
                    large_tokens=event.usage.completion_tokens,
                    discarded_tokens=spent.completion_tokens,
                )
                engine.count(figures, f"the large model answered: {reason}")
                event = msgspec.structs.replace(event, usage=sum_usage(event.usage, [spent]))
            self.relay.send(event)

    def _count_small(self, tokens: int, judge_tokens: int = 0) -> None:
        figures = RouteFigures(small=1, small_tokens=tokens, discarded_tokens=judge_tokens)
        self._engine.count(figures, "the small model answered")


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
