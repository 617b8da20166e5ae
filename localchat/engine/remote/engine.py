"""RemoteEngine: any OpenAI-compatible server as an engine (vLLM, SGLang, llama-server, another localchat).

What a server sends is taken as it comes; what it does not send is not invented: times are measured here, at
our edge, and tokens are counted by its usage, or by its chunks where it sends none. A lost connection is tried
again before the first token, never after it: half an answer is kept, and said to be half.
"""

import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import httpx2

from localchat.engine.events import Accepted, EngineStats, Event, MetricsSnapshot
from localchat.engine.interface import EngineInfo, Vectors
from localchat.engine.remote.client import RemoteCall, RemoteClient, whole
from localchat.engine.remote.request_body import body_of, gap_of, path_of
from localchat.engine.remote.response_stream import ResponseStream
from localchat.engine.remote.server_timings import count
from localchat.engine.request import GenerateRequest, Infill, Messages
from localchat.engine.stream import Stream
from localchat.errors import (
    ContextExceeded,
    EngineClosed,
    LocalchatError,
    TemplateError,
    UsageError,
)

_SILENCE_S: Final = 300.0
_TRIES: Final = 4
_LONGEST_WAIT_S: Final = 30.0
_BUSY: Final = frozenset({408, 425, 429, 500, 502, 503, 504})
_NEW_LIMIT: Final = "max_completion_tokens"
"""What OpenAI calls `max_tokens` of its newer models, which refuse the older name."""
_NO_ROUTE: Final = frozenset({404, 405})
_NO_LIST: Final = frozenset({400, 403, 404, 405, 501})
_FIGURES_EVERY_S: Final = 0.1
_MOST_ANSWER_BYTES: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class RemoteOptions:
    """Where the server is. url: with or without /v1. model: the server's name of it; empty: its first.
    key: sent as a bearer token and nowhere shown. silence_s: seconds without a byte that end a stream."""

    url: str
    model: str = ""
    key: str = ""
    silence_s: float = _SILENCE_S


class RemoteEngine:
    """See Engine. Raises UsageError for a URL or a key that is none; what the network says comes with each
    call.

    `say` gets sentences for the user, from a thread of the engine.
    """

    def __init__(self, options: RemoteOptions, *, say: Callable[[str], None]) -> None:
        self._options = options
        self._server = RemoteClient(options.url, options.key, options.silence_s)
        self._say = say
        self._lock = threading.Lock()
        self._card: dict[str, Any] | None = None
        self._now = MetricsSnapshot(phase="decode")
        self._calls: set[RemoteCall] = set()
        self._finished = 0
        self._told = ""
        self._has_infill = True
        self._limit = "max_tokens"
        self._answered = False
        self._closed = threading.Event()

    # ------------------------------------------------------------------------ Engine

    def generate(self, request: GenerateRequest) -> Stream:
        call = RemoteCall()
        stream = Stream(call.hang_up)
        answer = ResponseStream(request, time.perf_counter())
        with self._lock:
            self._calls.add(call)
        threading.Thread(
            target=self._answer, args=(answer, stream, call), name="remote", daemon=True
        ).start()
        return stream

    def embed(self, texts: Sequence[str]) -> Vectors:
        body = {"model": self._model(), "input": list(texts), "encoding_format": "float"}
        found = self._server.ask("embeddings", body, patience_s=self._options.silence_s)
        data = found.get("data")
        if not isinstance(data, list) or len(data) != len(texts):
            raise self._server.odd("embeddings", "no vector for each text")
        try:
            ranked = sorted(data, key=lambda one: int(one.get("index", 0)))
            vectors = [[float(number) for number in one["embedding"]] for one in ranked]
        except (AttributeError, KeyError, TypeError, ValueError) as problem:
            raise self._server.odd("embeddings", "what are no vectors") from problem
        usage = found.get("usage")
        total = count(usage.get("prompt_tokens")) if isinstance(usage, dict) else 0
        return Vectors(vectors, (total, *[0] * (len(vectors) - 1)))  # servers tell the sum alone

    def tokenize(self, text: str, *, special: bool = False) -> list[int]:
        body = {
            "model": self._model(),
            "content": text,
            "prompt": text,
            "add_special_tokens": False,
            "parse_special": special,
        }
        tokens = self._server.ask("tokenize", body, root=True).get("tokens")
        try:
            assert isinstance(tokens, list)
            return [int(token["id"] if isinstance(token, dict) else token) for token in tokens]
        except (AssertionError, KeyError, TypeError, ValueError) as problem:
            raise self._server.odd("tokenize", "no tokens") from problem

    def detokenize(self, tokens: Sequence[int]) -> str:
        body = {"model": self._model(), "tokens": list(tokens)}
        found = self._server.ask("detokenize", body, root=True)
        text = found.get("content", found.get("prompt"))
        if not isinstance(text, str):
            raise self._server.odd("detokenize", "no text")
        return text

    def render(self, messages: Messages) -> str:
        body = body_of(GenerateRequest(messages), self._model())
        text = self._server.ask("apply-template", body, root=True).get("prompt")
        if not isinstance(text, str):
            raise self._server.odd("apply-template", "no prompt")
        return text

    def info(self) -> EngineInfo:
        card = self._model_card()
        found = card.get("meta")
        meta: dict[str, Any] = found if isinstance(found, dict) else {}
        keys = ("max_model_len", "context_length", "max_context_length")
        named = [count(card.get(key)) for key in keys]
        # The context that is in force stands before the one that the model was trained for.
        context = next(filter(None, (count(meta.get("n_ctx")), *named)), 0)
        with self._lock:
            told = self._told
        return EngineInfo(
            model=self._model(),
            path=self._server.base,
            backend="remote",
            architecture="",
            quantization="",
            parameters=count(meta.get("n_params")),
            context_tokens=context,
            context_train=count(meta.get("n_ctx_train")),
            kv_type="",
            gpu_layers=0,
            layers=0,
            threads=0,
            file_bytes=0,
            predicted_bytes=0,
            actual_bytes=0,
            loaded=True,
            safe_mode=False,
            why=f"{self._server.base} answers; times are measured here{told}",
            fingerprint="",
            warning="" if context else "the server does not say how long its context is",
        )

    def stats(self) -> EngineStats:
        with self._lock:
            return EngineStats(self._now, finished=self._finished)

    def close(self, deadline_s: float = 2.0) -> None:
        self._closed.set()
        with self._lock:
            calls = list(self._calls)
        for call in calls:
            call.hang_up()
        self._server.close()

    @property
    def alive(self) -> bool:
        """As far as is known here."""
        return not self._closed.is_set()

    @property
    def child_pid(self) -> int | None:
        """There is no process of ours."""
        return None

    # ------------------------------------------------------------------------ an answer

    def _answer(self, answer: ResponseStream, stream: Stream, call: RemoteCall) -> None:
        try:
            if not self._closed.is_set():
                self._ask(answer, stream, call)
            if self._closed.is_set():
                stream.put(EngineClosed("the engine was closed"))
        except LocalchatError as problem:
            stream.put(EngineClosed("the engine was closed") if self._closed.is_set() else problem)
        except httpx2.InvalidURL as problem:
            stream.put(UsageError(f"{self._server.base} is no address of a server: {problem}"))
        except (httpx2.HTTPError, RuntimeError, OSError) as problem:
            if self._closed.is_set():
                stream.put(EngineClosed("the engine was closed"))
            elif not call.gone.is_set():
                stream.put(self._server.lost(problem, begun=answer.begun))
        finally:
            with self._lock:
                self._calls.discard(call)
                self._finished += answer.finished

    def _ask(self, answer: ResponseStream, stream: Stream, call: RemoteCall) -> None:
        """Until there is an answer, or nobody wants one any more, or it was tried often enough."""
        attempt = 0
        shortened = False
        problem: LocalchatError
        while not call.gone.is_set():
            path, body, root = self._question(answer.request)
            wait_s = None
            try:
                with self._server.stream(path, body, call, root=root) as response:
                    if response.status_code == 200:
                        self._listen(response, answer, stream, call)
                        return
                    if path == "infill" and response.status_code in _NO_ROUTE:
                        self._has_infill = False
                        continue
                    problem = self._server.refusal(response)
                    if self._limit != _NEW_LIMIT and _wants_new_limit(problem.message):
                        self._limit = _NEW_LIMIT
                        continue
                    if not shortened and answer.shortened(problem):
                        shortened = True
                        continue
                    wait_s = _retry_after(response)
                    settled = isinstance(problem, ContextExceeded | TemplateError)
                    if settled or response.status_code not in _BUSY or _final(response):
                        raise problem
            except (httpx2.TransportError, ConnectionError) as error:
                if answer.begun or call.gone.is_set():
                    raise
                problem = self._server.lost(error)
            attempt += 1
            if attempt == _TRIES:
                raise problem
            wait_s = min(wait_s if wait_s is not None else 2.0 ** (attempt - 1), _LONGEST_WAIT_S)
            self._say(f"{problem.message}; trying again in {wait_s:.0f} s")
            call.gone.wait(wait_s)

    def _question(self, request: GenerateRequest) -> tuple[str, Mapping[str, Any], bool]:
        """Path, body, and whether the path stands at the root."""
        model = self._model()
        if isinstance(request.prompt, Infill) and self._has_infill and request.grammar is None:
            return "infill", gap_of(request, model), True
        ours = (self._card or {}).get("owned_by") == "localchat"
        body = body_of(request, model, stream=True, ours=ours)
        if ours:
            body["timings"] = True
        if "messages" in body and "max_tokens" in body:
            body[self._limit] = body.pop("max_tokens")
        return path_of(request), body, False

    def _listen(
        self, response: httpx2.Response, answer: ResponseStream, stream: Stream, call: RemoteCall
    ) -> None:
        """Lines of an event stream, as events. The server is free to put other fields and comments in."""
        kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind == "text/html":
            raise self._server.odd("the question", "a page of HTML")
        self._answered = True
        if not answer.accepted:
            answer.accepted = True
            request = answer.request
            stream.put(Accepted(0, request.max_tokens or 0, request.sampling.seed or 0))
        if kind == "application/json":
            found = answer.take_chunk(self._object(response), self._server.base)
            self._tell(answer, stream, found)
            answer.complete = True
        else:
            for line in self._server.lines(response):
                if call.gone.is_set():
                    return
                if line.startswith("data:"):
                    found = answer.take(line[5:].strip(), self._server.base)
                    self._tell(answer, stream, found)
                if answer.complete:
                    break
        events = list(answer.end(time.perf_counter()))
        with self._lock:
            own = answer.own.sentence
            self._told = f"; measured there: {own}" if own else ""
        self._tell(answer, stream, events)

    def _object(self, response: httpx2.Response) -> dict[str, Any]:
        """The whole answer of a server that does not stream."""
        try:
            found = json.loads(whole(response, _MOST_ANSWER_BYTES))
        except ValueError as problem:
            raise self._server.odd("the question", "what is no JSON") from problem
        if not isinstance(found, dict):
            raise self._server.odd("the question", "no JSON object")
        return found

    def _tell(self, answer: ResponseStream, stream: Stream, events: Iterable[Event]) -> None:
        """Events, and the figures with the first token and ten times a second from then on."""
        for event in events:
            stream.put(event)
        now_s = time.perf_counter()
        if answer.begun and now_s >= answer.figures_due_s:
            answer.figures_due_s = now_s + _FIGURES_EVERY_S
            with self._lock:
                self._now = answer.figures(len(self._calls))
            stream.put(self._now)

    # ------------------------------------------------------------------------ the model

    def _model(self) -> str:
        return self._options.model or str(self._model_card().get("id", ""))

    def _model_card(self) -> dict[str, Any]:
        """What /v1/models says of our model; asked once. A server that has no such list, or that answers and
        has none that can be read, is taken at the user's word. Raises NetworkError, ModelMissing."""
        with self._lock:
            if self._card is not None:
                return self._card
        wanted = self._options.model
        try:
            found = self._server.ask("models").get("data")
        except LocalchatError as problem:
            without = self._answered or problem.details.get("status") in _NO_LIST
            if not (wanted and without):
                raise
            found = None
        cards = [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []
        if not cards and not wanted:
            raise self._server.odd("models", "no model")
        named = [one for one in cards if one.get("id") == wanted]
        card = named[0] if named else ({} if wanted else cards[0])
        with self._lock:
            self._card = card
        return card


def _wants_new_limit(message: str) -> bool:
    return _NEW_LIMIT in message and "instead" in message.lower()


def _final(response: httpx2.Response) -> bool:
    """Whether the server says that asking again is of no use."""
    return bool(response.headers.get("x-should-retry", "") == "false")


def _retry_after(response: httpx2.Response) -> float | None:
    try:
        return max(0.0, float(response.headers.get("Retry-After", "")))
    except ValueError:
        return None
