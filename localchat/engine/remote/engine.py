"""RemoteEngine: any OpenAI-compatible server as an engine (vLLM, SGLang, llama-server, another localchat).

Times are measured at this end. Tokens are counted by the server's usage, or by its chunks if it reports no
usage. A lost connection is retried only before the first token. After that, the partial answer is kept and
reported as partial.
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import httpx2

from localchat.engine.events import Accepted, EngineStats, Event, MetricsSnapshot
from localchat.engine.interface import EngineInfo, Vectors
from localchat.engine.open_call import OpenCall
from localchat.engine.remote.client import RemoteClient
from localchat.engine.remote.dialect import Dialect
from localchat.engine.remote.request_body import request_body, request_path
from localchat.engine.remote.response_stream import ResponseStream
from localchat.engine.remote.server_timings import count
from localchat.engine.request import GenerateRequest, Messages
from localchat.engine.stream import Stream
from localchat.errors import (
    ContextExceeded,
    EngineClosed,
    LocalchatError,
    TemplateError,
    UsageError,
)
from localchat.http_transport import may_retry, retry_after_s

_SILENCE_S: Final = 300.0
_MAX_ATTEMPTS: Final = 4
_MAX_WAIT_S: Final = 30.0
_NO_LIST_STATUSES: Final = frozenset({400, 403, 404, 405, 501})
_METRICS_INTERVAL_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class RemoteOptions:
    """Address and options of a server."""

    url: str
    """Address, with or without /v1."""
    model: str = ""
    """Name of the model on the server. Empty: the first one."""
    key: str = ""
    """Bearer token, which is never shown."""
    silence_s: float = _SILENCE_S
    """Seconds without data that end a stream."""


class RemoteEngine:
    """See Engine. Network errors are raised by each call."""

    def __init__(self, options: RemoteOptions, *, notify: Callable[[str], None]) -> None:
        """Raises UsageError for an invalid URL or key.

        notify: receives sentences for the user, from a thread of the engine.
        """
        self._options = options
        self._client = RemoteClient(options.url, options.key, options.silence_s)
        self._notify = notify
        self._lock = threading.Lock()
        self._model_entry: dict[str, Any] | None = None
        self._now = MetricsSnapshot(phase="decode")
        self._calls: set[OpenCall] = set()
        self._finished = 0
        self._dialect = Dialect(self._client.base, notify)
        self._answered = False
        self._closed = threading.Event()

    def generate(self, request: GenerateRequest) -> Stream:
        call = OpenCall()
        stream = Stream(call.cancel)
        answer = ResponseStream(request, time.perf_counter())
        with self._lock:
            self._calls.add(call)
        threading.Thread(
            target=self._run, args=(answer, stream, call), name="remote", daemon=True
        ).start()
        return stream

    def embed(self, texts: Sequence[str], *, truncate: bool = False) -> Vectors:
        body = {"model": self._model(), "input": list(texts), "encoding_format": "float"}
        reply = self._client.request_json("embeddings", body, timeout_s=self._options.silence_s)
        data = reply.get("data")
        if not isinstance(data, list) or len(data) != len(texts):
            raise self._client.unexpected_reply("embeddings", "no vector for each text")
        try:
            items = sorted(data, key=lambda item: int(item.get("index", 0)))
            vectors = [[float(number) for number in item["embedding"]] for item in items]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise self._client.unexpected_reply("embeddings", "invalid vectors") from error
        usage = reply.get("usage")
        total = count(usage.get("prompt_tokens")) if isinstance(usage, dict) else 0
        # Servers report only the total.
        return Vectors(vectors, (total, *[0] * (len(vectors) - 1)))

    def prompt_tokens(self, messages: Messages) -> list[int]:
        """Return the tokens of the rendered text.

        Only the server could separate markup in a message from its own.
        """
        return self.tokenize(self.render(messages), special=True)

    def tokenize(self, text: str, *, special: bool = False) -> list[int]:
        body = {
            "model": self._model(),
            "content": text,
            "prompt": text,
            "add_special_tokens": False,
            "parse_special": special,
        }
        tokens = self._client.request_json("tokenize", body, root=True).get("tokens")
        try:
            assert isinstance(tokens, list)
            return [int(token["id"] if isinstance(token, dict) else token) for token in tokens]
        except (AssertionError, KeyError, TypeError, ValueError) as error:
            raise self._client.unexpected_reply("tokenize", "no tokens") from error

    def detokenize(self, tokens: Sequence[int]) -> str:
        body = {"model": self._model(), "tokens": list(tokens)}
        reply = self._client.request_json("detokenize", body, root=True)
        text = reply.get("content", reply.get("prompt"))
        if not isinstance(text, str):
            raise self._client.unexpected_reply("detokenize", "no text")
        return text

    def render(self, messages: Messages) -> str:
        body = request_body(
            GenerateRequest(messages), self._model(), to_localchat=self._is_localchat
        )
        text = self._client.request_json("apply-template", body, root=True).get("prompt")
        if not isinstance(text, str):
            raise self._client.unexpected_reply("apply-template", "no prompt")
        return text

    def info(self) -> EngineInfo:
        entry = self._server_entry()
        meta = entry.get("meta")
        if not isinstance(meta, dict):
            meta = {}
        keys = ("max_model_len", "context_length", "max_context_length")
        # The context in use takes precedence over the trained context.
        contexts = (count(meta.get("n_ctx")), *(count(entry.get(key)) for key in keys))
        context = next(filter(None, contexts), 0)
        return EngineInfo(
            model=self._model(),
            path=self._client.base,
            backend="remote",
            parameters=count(meta.get("n_params")),
            context_tokens=context,
            context_train=count(meta.get("n_ctx_train")),
            loaded=True,
            why=f"{self._client.base} answers; times are measured here",
            warning="" if context else "the server does not report the length of its context",
            media=_media(entry),
        )

    def stats(self) -> EngineStats:
        with self._lock:
            return EngineStats(self._now, finished=self._finished)

    def close(self, deadline_s: float = 2.0) -> None:
        self._closed.set()
        with self._lock:
            calls = list(self._calls)
        for call in calls:
            call.cancel()
        self._client.close()

    @property
    def alive(self) -> bool:
        """Whether the engine is open."""
        return not self._closed.is_set()

    @property
    def child_pid(self) -> int | None:
        """Process id, always None, because the model runs elsewhere."""
        return None

    def _run(self, answer: ResponseStream, stream: Stream, call: OpenCall) -> None:
        try:
            if not self._closed.is_set():
                self._request_with_retries(answer, stream, call)
            if self._closed.is_set():
                stream.put(EngineClosed("the model was unloaded"))
        except LocalchatError as error:
            stream.put(EngineClosed("the model was unloaded") if self._closed.is_set() else error)
        except httpx2.InvalidURL as error:
            stream.put(UsageError(f"{self._client.base} is not the address of a server: {error}"))
        except (httpx2.HTTPError, RuntimeError, OSError) as error:
            if self._closed.is_set():
                stream.put(EngineClosed("the model was unloaded"))
            elif not call.cancelled.is_set():
                stream.put(self._client.connection_error(error, partial=answer.begun))
        except Exception as error:  # noqa: BLE001 - otherwise the request would wait forever
            stream.put(LocalchatError(f"the request to {self._client.base} failed: {error!r}"))
        finally:
            with self._lock:
                self._calls.discard(call)
                self._finished += answer.finished

    def _request_with_retries(self, answer: ResponseStream, stream: Stream, call: OpenCall) -> None:
        """Send the request until it is answered, cancelled, or out of attempts."""
        attempt = 0
        shortened = False
        failure: LocalchatError
        while not call.cancelled.is_set():
            path, body = self._request_parts(answer.request)
            wait_s = None
            try:
                with self._client.stream(path, body, call) as response:
                    if response.status_code == 200:
                        self._read_answer(response, answer, stream, call)
                        return
                    failure = self._client.status_error(response)
                    if self._dialect.learn(failure, body):
                        continue
                    if not shortened and answer.shorten_answer(failure):
                        shortened = True
                        continue
                    wait_s = retry_after_s(response.headers.get("retry-after"))
                    certain = isinstance(failure, ContextExceeded | TemplateError)
                    if certain or not may_retry(response):
                        raise failure
            except (httpx2.TransportError, ConnectionError) as error:
                if answer.begun or call.cancelled.is_set():
                    raise
                failure = self._client.connection_error(error)
                if failure.details.get("certain"):
                    raise failure from error
            attempt += 1
            if attempt == _MAX_ATTEMPTS:
                raise failure
            wait_s = min(wait_s if wait_s is not None else 2.0 ** (attempt - 1), _MAX_WAIT_S)
            self._notify(f"{failure.message}; trying again in {wait_s:.0f} s")
            call.cancelled.wait(wait_s)

    def _request_parts(self, request: GenerateRequest) -> tuple[str, dict[str, Any]]:
        """Return the path and the body."""
        body = request_body(request, self._model(), stream=True, to_localchat=self._is_localchat)
        if self._is_localchat:
            body["timings"] = True
        if self._owner == "llamacpp" and "repetition_penalty" in body:
            body["repeat_penalty"] = body.pop("repetition_penalty")
        return request_path(request), self._dialect.translate(body)

    def _read_answer(
        self, response: httpx2.Response, answer: ResponseStream, stream: Stream, call: OpenCall
    ) -> None:
        """Convert the lines of an event stream to events. Unknown fields and comments are ignored."""
        kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind == "text/html":
            raise self._client.unexpected_reply("the request", "an HTML page")
        self._answered = True
        if not answer.accepted:
            answer.accepted = True
            request = answer.request
            stream.put(Accepted(0, request.max_tokens or 0, request.sampling.seed or 0))
        if kind == "application/json":
            reply = self._client.json_object("the request", response)
            self._send(answer, stream, answer.feed_chunk(reply, self._client.base))
            answer.complete = True
        else:
            for line in self._client.lines(response):
                if call.cancelled.is_set():
                    return
                if line.startswith("data:"):
                    events = answer.feed(line[5:].strip(), self._client.base)
                    self._send(answer, stream, events)
                if answer.complete:
                    break
        self._send(answer, stream, answer.end(time.perf_counter()))

    def _send(self, answer: ResponseStream, stream: Stream, events: Iterable[Event]) -> None:
        """Send events, and metrics with the first token and then ten times a second."""
        for event in events:
            stream.put(event)
        now_s = time.perf_counter()
        if answer.begun and now_s >= answer.metrics_due_s:
            answer.metrics_due_s = now_s + _METRICS_INTERVAL_S
            with self._lock:
                self._now = answer.snapshot(len(self._calls))
            stream.put(self._now)

    @property
    def _owner(self) -> str:
        return str((self._model_entry or {}).get("owned_by", ""))

    @property
    def _is_localchat(self) -> bool:
        return self._owner == "localchat"

    def _model(self) -> str:
        return self._options.model or str(self._server_entry().get("id", ""))

    def _server_entry(self) -> dict[str, Any]:
        """Return the model's entry in /v1/models, which is requested once.

        If the server has no readable list, assume that it has the requested model. Raises NetworkError,
        ModelMissing.
        """
        with self._lock:
            if self._model_entry is not None:
                return self._model_entry
        name = self._options.model
        try:
            listed = self._client.request_json("models").get("data")
        except LocalchatError as error:
            has_no_list = self._answered or error.details.get("status") in _NO_LIST_STATUSES
            if not (name and has_no_list):
                raise
            listed = None
        if not isinstance(listed, list):
            listed = []
        entries: list[dict[str, Any]] = [item for item in listed if isinstance(item, dict)]
        if not entries and not name:
            raise self._client.unexpected_reply("models", "no model")
        if name:
            entry = next((item for item in entries if item.get("id") == name), {})
        else:
            entry = entries[0]
        with self._lock:
            self._model_entry = entry
        return entry


def _media(entry: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the kinds of attachments that the entry of localchat or llama-server mentions."""
    architecture = entry.get("architecture")
    modalities = architecture.get("input_modalities") if isinstance(architecture, dict) else None
    if isinstance(modalities, list):
        return tuple(kind for kind in ("image", "audio") if kind in modalities)
    capabilities = entry.get("capabilities")
    if isinstance(capabilities, list) and "multimodal" in capabilities:
        return ("image",)
    return ()
