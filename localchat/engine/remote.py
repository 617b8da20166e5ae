"""RemoteEngine: any OpenAI-compatible server as an engine (vLLM, SGLang, llama-server, another localchat).

What a server sends is taken as it comes; what it does not send is not invented: times are measured here, at
our edge, and tokens are counted by its usage, or by its chunks where it sends none. A lost connection is tried
again before the first token, never after it: half an answer is kept, and said to be half.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx2

from localchat.engine.engine import EngineInfo, Vectors
from localchat.engine.events import (
    Accepted,
    EngineStats,
    Figures,
    Finished,
    Reasoning,
    Text,
    ToolCall,
)
from localchat.engine.remote_answer import RemoteAnswer
from localchat.engine.remote_wire import body_of, path_of, refusal_of
from localchat.engine.request import GenerateRequest, Messages
from localchat.engine.stream import Stream
from localchat.errors import EngineClosed, LocalchatError, NetworkError, UsageError

_CONNECT_S = 10.0
_SILENCE_S = 300.0
_TRIES = 4
_LONGEST_WAIT_S = 30.0
_BUSY = frozenset({408, 425, 429, 500, 502, 503, 504})
_MOST_LINE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class RemoteOptions:
    """Where the server is. url: with or without /v1. model: the server's name of it; empty: its first.
    key: sent as a bearer token and nowhere shown. silence_s: seconds without a byte that end a stream."""

    url: str
    model: str = ""
    key: str = ""
    silence_s: float = _SILENCE_S


class RemoteEngine:
    """See Engine. Raises UsageError for a URL that is none; what the network says comes with each call.

    `say` gets sentences for the user, from a thread of the engine.
    """

    def __init__(self, options: RemoteOptions, *, say: Callable[[str], None]) -> None:
        self._options = options
        self._base = _base(options.url)
        self._say = say
        headers = {"User-Agent": "localchat"}
        if options.key:
            headers["Authorization"] = f"Bearer {options.key}"
        self._client = httpx2.Client(
            headers=headers,
            timeout=httpx2.Timeout(options.silence_s, connect=_CONNECT_S),
            follow_redirects=False,
        )
        self._lock = threading.Lock()
        self._card: dict[str, Any] | None = None
        self._now = Figures(phase="decode")
        self._running = 0
        self._finished = 0
        self._closed = threading.Event()

    # ------------------------------------------------------------------------ Engine

    def generate(self, request: GenerateRequest) -> Stream:
        stopped = threading.Event()
        answer = RemoteAnswer(request, time.perf_counter())

        def cancel() -> None:
            stopped.set()
            answer.hang_up()

        stream = Stream(cancel)
        threading.Thread(
            target=self._answer, args=(request, answer, stream, stopped), name="remote", daemon=True
        ).start()
        return stream

    def embed(self, texts: Sequence[str]) -> Vectors:
        body = {"model": self._model(), "input": list(texts), "encoding_format": "float"}
        found = self._post("embeddings", body)
        data = found.get("data")
        if not isinstance(data, list) or len(data) != len(texts):
            raise self._odd("embeddings", "no vector for each text")
        ranked = sorted(data, key=lambda one: int(one.get("index", 0)))
        usage = found.get("usage")
        counted = usage.get("prompt_tokens") if isinstance(usage, dict) else 0
        total = counted if isinstance(counted, int) else 0
        vectors = [[float(number) for number in one["embedding"]] for one in ranked]
        return Vectors(vectors, (total, *[0] * (len(vectors) - 1)))  # servers tell the sum alone

    def tokenize(self, text: str, *, special: bool = False) -> list[int]:
        body = {
            "model": self._model(),
            "content": text,
            "prompt": text,
            "add_special_tokens": False,
        }
        tokens = self._post("tokenize", body, root=True).get("tokens")
        if not isinstance(tokens, list):
            raise self._odd("tokenize", "no tokens")
        return [int(token["id"] if isinstance(token, dict) else token) for token in tokens]

    def detokenize(self, tokens: Sequence[int]) -> str:
        found = self._post(
            "detokenize", {"model": self._model(), "tokens": list(tokens)}, root=True
        )
        text = found.get("content", found.get("prompt"))
        if not isinstance(text, str):
            raise self._odd("detokenize", "no text")
        return text

    def render(self, messages: Messages) -> str:
        body = body_of(GenerateRequest(messages), self._model())
        text = self._post("apply-template", body, root=True).get("prompt")
        if not isinstance(text, str):
            raise self._odd("apply-template", "no prompt")
        return text

    def info(self) -> EngineInfo:
        card = self._model_card()
        found = card.get("meta")
        meta: dict[str, Any] = found if isinstance(found, dict) else {}
        context = _first_number(
            *(card.get(key) for key in ("max_model_len", "context_length", "max_context_length")),
            meta.get("n_ctx"),
        )
        return EngineInfo(
            model=self._model(),
            path=self._base,
            backend="remote",
            architecture="",
            quantization="",
            parameters=_first_number(meta.get("n_params")),
            context_tokens=context,
            context_train=_first_number(meta.get("n_ctx_train")),
            kv_type="",
            gpu_layers=0,
            layers=0,
            threads=0,
            file_bytes=0,
            predicted_bytes=0,
            actual_bytes=0,
            loaded=True,
            safe_mode=False,
            why=f"{self._base} answers; times are measured here",
            fingerprint="",
            warning="" if context else "the server does not say how long its context is",
        )

    def stats(self) -> EngineStats:
        with self._lock:
            return EngineStats(self._now, finished=self._finished)

    def close(self, deadline_s: float = 2.0) -> None:
        self._closed.set()
        self._client.close()

    @property
    def alive(self) -> bool:
        """As far as is known here."""
        return not self._closed.is_set()

    @property
    def child_pid(self) -> int | None:
        """There is no process of ours."""
        return None

    # ------------------------------------------------------------------------ an answer

    def _answer(
        self,
        request: GenerateRequest,
        answer: RemoteAnswer,
        stream: Stream,
        stopped: threading.Event,
    ) -> None:
        with self._lock:
            self._running += 1
        try:
            self._ask(request, answer, stream, stopped)
        except LocalchatError as problem:
            stream.put(problem)
        except httpx2.InvalidURL as problem:
            stream.put(UsageError(f"{self._base} is no address of a server: {problem}"))
        except (httpx2.HTTPError, RuntimeError) as problem:  # RuntimeError: the client was closed
            if self._closed.is_set():
                stream.put(EngineClosed("the engine was closed"))
            elif not stopped.is_set():
                stream.put(self._lost(problem, answer))
        finally:
            with self._lock:
                self._running -= 1
                self._finished += answer.finished

    def _ask(
        self,
        request: GenerateRequest,
        answer: RemoteAnswer,
        stream: Stream,
        stopped: threading.Event,
    ) -> None:
        path = path_of(request)
        body = body_of(request, self._model(), stream=True)
        for attempt in range(1, _TRIES + 1):
            asked_s = None
            try:
                with self._client.stream("POST", self._url(path), json=body) as response:
                    if response.status_code == 200:
                        self._listen(response, answer, stream, stopped)
                        return
                    response.read()
                    problem: LocalchatError = refusal_of(
                        response.status_code, response.text, self._base
                    )
                    asked_s = _retry_after(response)
                    if response.status_code not in _BUSY:
                        raise problem
            except (httpx2.TransportError, ConnectionError) as error:
                if answer.begun:
                    raise
                problem = self._lost(error, answer)
            if stopped.is_set() or self._closed.is_set():
                return
            if attempt == _TRIES:
                raise problem
            wait_s = min(asked_s if asked_s is not None else 2.0 ** (attempt - 1), _LONGEST_WAIT_S)
            self._say(f"{problem.message}; trying again in {wait_s:.0f} s")
            if stopped.wait(wait_s):
                return

    def _listen(
        self,
        response: httpx2.Response,
        answer: RemoteAnswer,
        stream: Stream,
        stopped: threading.Event,
    ) -> None:
        """Lines of an event stream, as events. The server is free to put other fields and comments in."""
        answer.on_hang_up(response.close)
        stream.put(Accepted(0, answer.request.max_tokens or 0, answer.request.sampling.seed or 0))
        for line in response.iter_lines():
            if stopped.is_set():
                return
            if len(line) > _MOST_LINE_BYTES:
                raise self._odd("the stream", f"a line of {len(line)} characters")
            if not line.startswith("data:"):
                continue
            for event in answer.take(line[5:].strip(), self._base):
                stream.put(event)
                self._note(event, answer)
            if answer.complete:
                break
        for event in answer.end(time.perf_counter()):
            stream.put(event)

    def _note(self, event: object, answer: RemoteAnswer) -> None:
        if isinstance(event, Text | Reasoning | ToolCall | Finished):
            with self._lock:
                self._now = answer.figures(self._running)

    # ------------------------------------------------------------------------ the network

    def _url(self, path: str, *, root: bool = False) -> str:
        return f"{self._base}/{path}" if root else f"{self._base}/v1/{path}"

    def _model(self) -> str:
        return self._options.model or str(self._model_card().get("id", ""))

    def _model_card(self) -> dict[str, Any]:
        """What /v1/models says of our model; asked once. Raises NetworkError, ModelMissing."""
        with self._lock:
            if self._card is not None:
                return self._card
        found = self._json("GET", self._url("models"), None).get("data")
        cards = [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []
        if not cards:
            raise self._odd("models", "no model")
        named = [one for one in cards if one.get("id") == self._options.model]
        card = named[0] if named else ({} if self._options.model else cards[0])
        with self._lock:
            self._card = card
        return card

    def _post(self, path: str, body: dict[str, Any], *, root: bool = False) -> dict[str, Any]:
        return self._json("POST", self._url(path, root=root), body)

    def _json(self, method: str, url: str, body: dict[str, Any] | None) -> dict[str, Any]:
        try:
            response = self._client.request(method, url, json=body)
            found = response.json() if response.status_code == 200 else None
        except httpx2.InvalidURL as problem:
            raise UsageError(f"{url} is no address of a server: {problem}") from problem
        except (httpx2.HTTPError, RuntimeError) as problem:
            if self._closed.is_set():
                raise EngineClosed("the engine was closed") from problem
            raise self._lost(problem, None) from problem
        except ValueError as problem:
            raise self._odd(url, "what is no JSON") from problem
        if found is None:
            raise refusal_of(response.status_code, response.text, self._base)
        if not isinstance(found, dict):
            raise self._odd(url, "no JSON object")
        return found

    def _lost(self, problem: Exception, answer: RemoteAnswer | None) -> NetworkError:
        what = "in the middle of its answer; what came is kept" if answer and answer.begun else ""
        return NetworkError(
            f"the connection to {self._base} failed {what}".rstrip()
            + f" ({type(problem).__name__}: {problem})",
            hint="is the server running, and is its address right? `localchat config show` has the remotes",
        )

    def _odd(self, what: str, found: str) -> NetworkError:
        return NetworkError(
            f"{self._base} answered {what} with {found}",
            hint="an OpenAI-compatible server is expected there",
        )


def _base(url: str) -> str:
    """Scheme, host and path of a server, without /v1."""
    text = url.strip().rstrip("/")
    if "://" not in text:
        text = f"http://{text}"
    if not text.startswith(("http://", "https://")):
        raise UsageError(f"{url!r} is no address of a server", hint="as in http://127.0.0.1:8000")
    return text.removesuffix("/v1").rstrip("/")


def _first_number(*values: object) -> int:
    return next((value for value in values if isinstance(value, int) and value > 0), 0)


def _retry_after(response: httpx2.Response) -> float | None:
    try:
        return max(0.0, float(response.headers.get("Retry-After", "")))
    except ValueError:
        return None
