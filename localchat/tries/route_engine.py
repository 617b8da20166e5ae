"""Engine of a route: a small model answers first, a large one where a rule or the small one's doubt says so.

Where the small model's answer is looked at before it is shown, its text is held back until it is complete;
events about its progress go on.
"""

import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from localchat.config.routes import Route
from localchat.engine.events import (
    Accepted,
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
from localchat.tries import judge
from localchat.tries.collection import LogprobMean
from localchat.tries.model_judge import summed
from localchat.tries.route_figures import RouteFigures

_LOCK_S = 1.0


class RouteEngine:
    """See Engine. The large model is opened when it is first needed."""

    def __init__(
        self,
        route: Route,
        small: Engine,
        open_large: Callable[[], Engine],
        state_dir: Path | None = None,
    ) -> None:
        """`state_dir`: where the figures of all runs are kept; None: of this run alone."""
        self._route = route
        self._small = small
        self._open_large = open_large
        self._large: Engine | None = None
        self._lock = threading.Lock()
        self._figures = RouteFigures()
        path = None if state_dir is None else state_dir / "routes" / f"{route.name}.json"
        self._file = StateFile(path, RouteFigures, RouteFigures())
        self._last = ""
        self._closed = False

    # ------------------------------------------------------------------ answers

    def generate(self, request: GenerateRequest) -> Stream:
        run = _Run(self, request)
        threading.Thread(target=run.run, name="route", daemon=True).start()
        return run.stream

    def reason(self, request: GenerateRequest) -> str:
        """Why the large model answers this at once; empty: the small one begins."""
        route = self._route
        prompt = request.prompt
        texts = _texts(request)
        if route.longer_than is not None and sum(map(len, texts)) > route.longer_than:
            return f"longer than {route.longer_than:,} characters"
        last = texts[-1] if texts else ""
        if route.regex and re.search(route.regex, last, re.IGNORECASE):
            return f"it matches {route.regex!r}"
        if route.code and any("```" in text for text in texts):
            return "it has code"
        if route.tools and isinstance(prompt, Messages) and prompt.tools:
            return "it has tools"
        return ""

    def doubts(self, request: GenerateRequest, text: str, mean: LogprobMean) -> tuple[str, int]:
        """Why the small model's answer is not shown (empty: it is), and the tokens of its verdict."""
        bound = self._route.doubt
        value = mean.value
        if bound is not None and value is not None and value < bound:
            return f"mean log probability {value:.2f} is below {bound:g}", 0
        if not self._route.judge or not isinstance(request.prompt, Messages):
            return "", 0
        faults, spent = self._faults(request, request.prompt, text)
        return (f"it finds a fault: {faults[0]}" if faults else ""), spent

    def _faults(
        self, request: GenerateRequest, prompt: Messages, text: str
    ) -> tuple[list[str], int]:
        replace = msgspec.structs.replace
        asked = replace(
            prompt,
            messages=judge.fault_messages(prompt.messages, text),
            tools=(),
            tool_choice="none",
            continue_last=False,
        )
        verdict = replace(
            request,
            prompt=asked,
            grammar=judge.FAULTS_GRAMMAR,
            max_tokens=judge.JUDGE_TOKENS,
            sampling=replace(request.sampling, temperature=0.0),
            stop=(),
            n=1,
            logprobs=None,
        )
        pieces = []
        spent = 0
        is_whole = False
        with self._small.generate(verdict) as stream:
            for event in stream:
                if isinstance(event, Text):
                    pieces.append(event.text)
                elif isinstance(event, Finished):
                    is_whole = event.reason == "stop"
                elif isinstance(event, Done):
                    spent = event.usage.completion_tokens
        # As in a critique, a verdict that was cut off does not count.
        return (judge.found_faults("".join(pieces)) or []) if is_whole else [], spent

    @property
    def waits(self) -> bool:
        """Whether an answer of the small model is looked at before it is shown."""
        return self._route.waits

    @property
    def small(self) -> Engine:
        """The engine of the small model."""
        return self._small

    @property
    def large(self) -> Engine:
        """The engine of the large model, opened if it is not. Raises LocalchatError."""
        with self._lock:
            if self._closed:
                raise EngineClosed("the engine was closed")
            if self._large is None:
                self._large = self._open_large()
            return self._large

    def count(self, figures: RouteFigures, why: str) -> None:
        """Add an answer to the figures. `why`: who gave it, a phrase."""
        with self._lock:
            self._figures += figures
            self._last = why
        try:
            self._file.update(lambda before: before + figures, _LOCK_S)
        except OSError:
            return  # the figures of this run stay

    @property
    def figures(self) -> RouteFigures:
        """Of all runs, where they are kept."""
        if self._file.path is not None:
            return self._file.read()
        return self._figures

    def sentence(self) -> str:
        """Who answered last, the share of the small model, and the saving."""
        figures = self.figures
        answers = figures.small + figures.large
        if not answers:
            return f"{self._route.word}: {self._route.small} first, then {self._route.large}"
        with self._lock:
            last = self._last
            large = self._large
        told = f"{last}; " if last else ""
        share = f"{figures.small:,} of {answers:,} answers ({figures.share:.0%})"
        text = f"{self._route.word}: {told}{share} by {self._route.small}"
        if large is None:
            return text
        try:
            saved = figures.saved(self._small.info().file_bytes, large.info().file_bytes)
        except LocalchatError:
            return text
        return f"{text}, which saves {saved:.0%} of the reads of {self._route.large}"

    # ------------------------------------------------------------------ the rest of Engine

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
        """Of the small model, under the name of the route, with the figures."""
        info = self._small.info()
        return msgspec.structs.replace(info, model=self._route.word, why=self.sentence())

    def stats(self) -> EngineStats:
        """Of the small model, with the counts of the route."""
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
        """Whether the small model's process runs."""
        return bool(getattr(self._small, "alive", True))

    @property
    def child_pid(self) -> int | None:
        """Process id of the small model."""
        found = getattr(self._small, "child_pid", None)
        return found if isinstance(found, int) else None

    def close(self, deadline_s: float = 2.0) -> None:
        with self._lock:
            self._closed = True
            large = self._large
        self._small.close(deadline_s)
        if large is not None:
            large.close(deadline_s)


class _Run:
    """One request of a route, on a thread of its own."""

    def __init__(self, engine: RouteEngine, request: GenerateRequest) -> None:
        self._engine = engine
        self._request = request
        self.stream = Stream(self._cancel)
        self._inner: Stream | None = None
        self._cancelled = threading.Event()
        self._accepted = False

    def _cancel(self) -> None:
        self._cancelled.set()
        if self._inner is not None:
            self._inner.close()

    def run(self) -> None:
        """Answer; every failure ends the stream."""
        try:
            self._answer()
        except LocalchatError as problem:
            self.stream.put(problem)
        except Exception as problem:  # noqa: BLE001 - the request would wait for ever
            self.stream.put(LocalchatError(f"the route failed: {problem!r}"))

    def _answer(self) -> None:
        engine = self._engine
        request = self._request
        if why := engine.reason(request):
            self._large(f"the large model answered: {why}", Usage(0, 0, 0))
        elif engine.waits and request.n == 1:
            self._looked_at()
        else:
            for event in self._events(engine.small, request):
                if isinstance(event, Done):
                    tokens = event.usage.completion_tokens
                    engine.count(
                        RouteFigures(small=1, small_tokens=tokens), "the small model answered"
                    )
                self._send(event)

    def _looked_at(self) -> None:
        """Let the small model answer, and show it unless there is doubt."""
        engine = self._engine
        logprobs = self._request.logprobs
        request = msgspec.structs.replace(
            self._request, logprobs=0 if logprobs is None else logprobs
        )
        held: list[Event] = []
        mean = LogprobMean()
        pieces = []
        done = None
        for event in self._events(engine.small, request):
            match event:
                case Text():
                    mean.add(event)
                    pieces.append(event.text)
                    plain = msgspec.structs.replace(event, logprobs=())
                    held.append(event if logprobs is not None else plain)
                case Reasoning() | ToolCall() | Finished():
                    held.append(event)
                case Done():
                    done = event
                case _:
                    self._send(event)
        if done is None:
            return
        why, spent = engine.doubts(self._request, "".join(pieces), mean)
        if self._cancelled.is_set():
            return
        used = done.usage.completion_tokens
        if why:
            usage = msgspec.structs.replace(done.usage, completion_tokens=used + spent)
            self._large(f"the large model answered: {why}", usage)
            return
        figures = RouteFigures(small=1, small_tokens=used, discarded_tokens=spent)
        engine.count(figures, "the small model answered")
        total = msgspec.structs.replace(done.usage, completion_tokens=used + spent)
        self.stream.put(*held, msgspec.structs.replace(done, usage=total))

    def _large(self, why: str, spent: Usage) -> None:
        """Let the large model answer. `spent`: by the small one before."""
        for event in self._events(self._engine.large, self._request):
            if isinstance(event, Done):
                used = event.usage.completion_tokens
                self._engine.count(
                    RouteFigures(
                        large=1, large_tokens=used, discarded_tokens=spent.completion_tokens
                    ),
                    why,
                )
                event = msgspec.structs.replace(event, usage=summed(event.usage, [spent]))
            self._send(event)

    def _send(self, event: Event) -> None:
        """Pass an event on; a request is accepted once."""
        if isinstance(event, Accepted):
            if self._accepted:
                return
            self._accepted = True
        self.stream.put(event)

    def _events(self, engine: Engine, request: GenerateRequest) -> Stream:
        self._inner = engine.generate(request)
        if self._cancelled.is_set():
            self._inner.close()
        return self._inner


def _texts(request: GenerateRequest) -> list[str]:
    match request.prompt:
        case Messages(messages=messages):
            return [message.content for message in messages]
        case TextPrompt(text=text):
            return [text]
    return []
