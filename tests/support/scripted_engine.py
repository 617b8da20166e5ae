"""ScriptedEngine: an engine without a model, for tests of front ends. Shipped for those of other
projects."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from localchat.engine.events import (
    Accepted,
    Done,
    EngineStats,
    Event,
    Finished,
    MetricsSnapshot,
    Prefill,
    Reasoning,
    Speculation,
    Text,
    Timings,
    Usage,
)
from localchat.engine.interface import EngineInfo, Vectors
from localchat.engine.loop_guard import LoopGuard
from localchat.engine.request import GenerateRequest, Messages
from localchat.engine.stream import Stream
from localchat.errors import ContextExceeded, EngineClosed, LocalchatError


@dataclass(frozen=True, slots=True)
class ScriptedAnswer:
    """One scripted answer."""

    pieces: tuple[str, ...] = ("Hello.",)
    """Sent one after the other."""
    reasoning: tuple[str, ...] = ()
    gap_s: float = 0.0
    """Time between two pieces."""
    error: LocalchatError | None = None
    """Replaces the end."""
    events: tuple[Event, ...] = ()
    """If given, they replace everything between Accepted and Done."""
    relaxed: tuple[str, ...] = ()
    """Keywords of schemas that the answer is not held to, reported by Accepted."""


Script = Callable[[GenerateRequest], ScriptedAnswer]


@dataclass(slots=True)
class ScriptedEngine:
    """See Engine."""

    script: Script = lambda request: ScriptedAnswer()
    """Called for each request, in a thread of its own: it may wait."""
    context_tokens: int = 4096
    model: str = "scripted"
    requests: list[GenerateRequest] = field(default_factory=list)
    """Every request so far."""
    cancelled: int = 0
    """Number of cancelled requests."""
    closed: bool = False

    def generate(self, request: GenerateRequest) -> Stream:
        cancelled_event = threading.Event()

        def cancel() -> None:
            self.cancelled += 1
            cancelled_event.set()

        stream = Stream(cancel)
        if self.closed:
            stream.put(EngineClosed("the model was unloaded"))
            return stream
        self.requests.append(request)
        arguments = (request, stream, cancelled_event)
        threading.Thread(target=self._answer, args=arguments, daemon=True).start()
        return stream

    def embed(self, texts: Sequence[str], *, truncate: bool = False) -> Vectors:
        if truncate:
            texts = [text[: self.context_tokens] for text in texts]
        longest = max(map(len, texts), default=0)
        if longest > self.context_tokens:
            raise ContextExceeded(
                "a text is too long", prompt_tokens=longest, context_tokens=self.context_tokens
            )
        return Vectors(
            ([float(len(text)), 1.0] for text in texts), [len(text.encode()) for text in texts]
        )

    def prompt_tokens(self, messages: Messages) -> list[int]:
        return self.tokenize(self.render(messages), special=True)

    def tokenize(self, text: str, *, special: bool = False) -> list[int]:
        return list(text.encode())

    def detokenize(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode("utf-8", "replace")

    def render(self, messages: Messages) -> str:
        return "".join(f"{message.role}: {message.content}\n" for message in messages.messages)

    def info(self) -> EngineInfo:
        return EngineInfo(
            model=self.model,
            path="",
            backend="scripted",
            architecture="script",
            quantization="",
            parameters=0,
            context_tokens=self.context_tokens,
            context_train=self.context_tokens,
            kv_type="f16",
            gpu_layers=0,
            layers=0,
            threads=1,
            file_bytes=0,
            predicted_bytes=0,
            actual_bytes=0,
            loaded=True,
            safe_mode=False,
            why="scripted answers",
            fingerprint="scripted",
            max_rows=4,
        )

    def stats(self) -> EngineStats:
        return EngineStats(MetricsSnapshot(phase="decode", kv_total_tokens=self.context_tokens))

    @property
    def alive(self) -> bool:
        """Whether it is still open."""
        return not self.closed

    @property
    def child_pid(self) -> int | None:
        """None: there is no process."""
        return None

    def close(self, deadline_s: float = 2.0) -> None:
        self.closed = True

    def _answer(
        self,
        request: GenerateRequest,
        stream: Stream,
        cancelled_event: threading.Event,
    ) -> None:
        began_s = time.monotonic()
        try:
            answer = self.script(request)
        except Exception as error:
            stream.put(EngineClosed(f"the script failed: {error!r}"))
            raise
        prompt_tokens = len(repr(request.prompt))
        room = max(1, self.context_tokens - prompt_tokens)
        limit = request.max_tokens or room
        seed = request.sampling.seed or 0
        stream.put(Accepted(prompt_tokens, limit, seed, answer.relaxed))
        stream.put(Prefill(prompt_tokens, 0, prompt_tokens))
        events = answer.events or self._default_events(request, answer)
        guard = LoopGuard(request)
        sent: list[Event] = []
        for event in events:
            if getattr(event, "choice", None) in guard.ended:
                continue
            if answer.gap_s and cancelled_event.wait(answer.gap_s):
                return
            end = guard.end(event)
            for item in (event, end) if end else (event,):
                sent.append(item)
                stream.put(item)
        events = tuple(sent)
        if answer.error is not None:
            stream.put(answer.error)
            return
        tokens = sum(isinstance(event, Text | Reasoning) for event in events)
        thoughts = sum(isinstance(event, Reasoning) for event in events)
        seconds = max(time.monotonic() - began_s, 1e-6)
        stream.put(
            Done(
                usage=Usage(prompt_tokens, 0, tokens, thoughts),
                timings=Timings(
                    load_s=0.0,
                    queue_s=0.0,
                    ttft_s=seconds / max(tokens, 1),
                    prefill_tokens_per_s=prompt_tokens / seconds,
                    decode_tokens_per_s=tokens / seconds,
                    tpot_ms_p50=1e3 * seconds / max(tokens, 1),
                    tpot_ms_p95=1e3 * seconds / max(tokens, 1),
                    tpot_ms_p99=1e3 * seconds / max(tokens, 1),
                    total_s=seconds,
                ),
                kv_used_tokens=prompt_tokens + tokens,
                kv_total_tokens=self.context_tokens,
                speculation=Speculation(),
                fingerprint="scripted",
            )
        )

    def _default_events(
        self, request: GenerateRequest, answer: ScriptedAnswer
    ) -> tuple[Event, ...]:
        events: list[Event] = []
        for choice in range(request.n):
            events += [Reasoning(choice, piece) for piece in answer.reasoning]
            events += [Text(choice, piece) for piece in answer.pieces]
            if answer.error is None:
                events.append(Finished(choice, "stop"))
        return tuple(events)
