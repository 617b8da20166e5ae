"""Answers in llama.cpp's own words. Compact JSON in one line, a `content` that is always a text: editors look
for the bytes `"content":"` before they read anything."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from localchat.engine.events import Done, Text, TokenLogprob, Usage
from localchat.engine.request import GenerateRequest
from localchat.server.error_formats import openai_error
from localchat.server.errors import ApiError
from localchat.server.generation import ChoiceEnd, GenerationSpec, OutputEvent
from localchat.server.leases import AsyncLease
from localchat.server.llamacpp.early_stop import LineStop
from localchat.server.llamacpp.protocol import NativeBody
from localchat.server.llamacpp.requests import completion_request, infill_requests
from localchat.server.request_body import decode, read_body
from localchat.server.sse import event
from localchat.server.state import client_of, service_of
from localchat.server.streaming import GenerationResponse


@dataclass(slots=True)
class NativeFrame:
    """What an answer tells beside its text. fields: the paths that the client wants; none: everything. ids,
    candidates: whether it tells the ids of its tokens, and what else they might have been. accepted_s, first_s,
    last_s: when the engine took the request and when text came, by time.perf_counter."""

    model: str
    asked: GenerateRequest
    wish: GenerationSpec
    fields: Sequence[str] = ()
    ids: bool = False
    candidates: bool = False
    accepted_s: float = field(default_factory=time.perf_counter)
    first_s: float | None = None
    last_s: float = 0.0
    end: ChoiceEnd | None = None
    lines: bool = False

    def take(self, told: OutputEvent) -> str:
        """The text of what is told, and note what the answer ends with."""
        match told:
            case Text(text=text):
                self.last_s = time.perf_counter()
                if self.first_s is None:
                    self.first_s = self.last_s
                self.lines = self.lines or "\n" in text
                return text
            case ChoiceEnd():
                self.end = told
        return ""

    def tokens(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        """What an object with these tokens says of each of them."""
        made: dict[str, Any] = {"tokens": [one.token for one in tokens] if self.ids else []}
        if self.candidates:
            made["completion_probabilities"] = [
                {
                    **_token(one.token, one.text, one.logprob),
                    "top_logprobs": [_token(*other) for other in one.top],
                }
                for one in tokens
            ]
        return made

    def final(
        self, content: str, tokens: Sequence[TokenLogprob], usage: Usage, done: Done | None
    ) -> bytes:
        """The answer's last object. content, tokens: its text, empty where that was streamed before."""
        assert self.end is not None
        word = self.end.why or ""
        whole = {
            "index": 0,
            "content": content,
            **self.tokens(tokens),
            "id_slot": 0,
            "stop": True,
            "model": self.model,
            "tokens_predicted": usage.completion_tokens,
            "tokens_evaluated": usage.prompt_tokens,
            "generation_settings": self._settings(),
            "has_new_line": self.lines,
            "truncated": any(self.wish.used),
            "stop_type": _stop_type(self.end),
            "stopping_word": word,
            "tokens_cached": usage.prompt_tokens + usage.completion_tokens,
            "timings": self._timings(usage, done),
        }
        return msgspec.json.encode(projected(whole, self.fields) if self.fields else whole)

    def _settings(self) -> dict[str, Any]:
        asked = self.asked
        return {
            **{
                name: value
                for name, value in msgspec.structs.asdict(asked.sampling).items()
                if value is not None
            },
            "n_predict": asked.max_tokens,
            "stop": list(asked.stop),
        }

    def _timings(self, usage: Usage, done: Done | None) -> dict[str, float]:
        """Times in milliseconds, under llama.cpp's names. An answer that was ended here has no figures of the
        engine: then the times are those of the text as it came."""
        prompt = usage.prompt_tokens - usage.cached_tokens
        first_s = self.first_s if self.first_s is not None else time.perf_counter()
        prompt_ms = (first_s - self.accepted_s) * 1e3
        predicted_ms = max(0.0, self.last_s - first_s) * 1e3
        if done is not None:
            timings = done.timings
            if timings.prefill_tokens_per_s:
                prompt_ms = 1e3 * prompt / timings.prefill_tokens_per_s
            if timings.decode_tokens_per_s:
                predicted_ms = 1e3 * usage.completion_tokens / timings.decode_tokens_per_s
        return {
            "cache_n": usage.cached_tokens,
            "prompt_n": prompt,
            **_rates("prompt", prompt, prompt_ms),
            "predicted_n": usage.completion_tokens,
            **_rates("predicted", usage.completion_tokens, predicted_ms),
        }


def projected(whole: Mapping[str, Any], paths: Sequence[str]) -> dict[str, Any]:
    """The values at these paths, each under the path itself; a path that leads nowhere is left out."""
    found: dict[str, Any] = {}
    for path in paths:
        value: Any = whole
        for key in path.split("/"):
            if not isinstance(value, Mapping) or key not in value:
                break
            value = value[key]
        else:
            found[path] = value
    return found


def _rates(phase: str, tokens: int, elapsed_ms: float) -> dict[str, float]:
    return {
        f"{phase}_ms": elapsed_ms,
        f"{phase}_per_token_ms": elapsed_ms / tokens if tokens else 0.0,
        f"{phase}_per_second": 1e3 * tokens / elapsed_ms if elapsed_ms > 0 else 0.0,
    }


def _token(token: int, text: bytes, logprob: float) -> dict[str, Any]:
    return {
        "id": token,
        "token": text.decode("utf-8", "replace"),
        "bytes": list(text),
        "logprob": logprob,
    }


def _told_of(told: OutputEvent) -> Sequence[TokenLogprob]:
    return told.logprobs if isinstance(told, Text) else ()


def _stop_type(end: ChoiceEnd) -> str:
    if end.reason == "length":
        return "limit"
    return "word" if end.why else "eos"


class NativeStream:
    """See StreamPresenter: an object for each piece, the last one with all figures, and nothing behind it."""

    def __init__(self, frame: NativeFrame) -> None:
        self._frame = frame
        self._prompt_tokens = 0
        self._pieces = 0

    def opening(self, choices: int, prompt_tokens: int) -> bytes:
        self._prompt_tokens = prompt_tokens
        return b""

    def told(self, told: OutputEvent) -> bytes:
        text, tokens = self._frame.take(told), _told_of(told)
        if not text and not tokens:
            return b""
        self._pieces += 1
        piece = {
            "index": 0,
            "content": text,
            **self._frame.tokens(tokens),
            "stop": False,
            "id_slot": 0,
            "tokens_predicted": self._pieces,
            "tokens_evaluated": self._prompt_tokens,
        }
        return event(msgspec.json.encode(piece))

    def ending(self, usage: Usage, done: Done | None) -> bytes:
        return event(self._frame.final("", (), usage, done))

    def broken(self, error: ApiError) -> bytes:
        return event(openai_error(error))

    def alive(self) -> bytes:
        return b""


class NativeWhole:
    """See WholePresenter."""

    def __init__(self, frame: NativeFrame) -> None:
        self._frame = frame
        self._text: list[str] = []
        self._tokens: list[TokenLogprob] = []

    def take(self, told: OutputEvent) -> None:
        self._text.append(self._frame.take(told))
        self._tokens += _told_of(told)

    def result(self, usage: Usage, done: Done | None) -> bytes:
        return self._frame.final("".join(self._text), self._tokens, usage, done)


# POST /infill and /completion: llama.cpp's own routes, for the editors that know no others.


async def infill(request: Request) -> ASGIApp:
    """A gap to fill. What does not fit into the context is left out from afar, and the answer says so
    (`truncated`): a suggestion from half of the file is worth more than none."""
    config = service_of(request).config
    body = decode(await read_body(request, config.limits), NativeBody, config.limits)
    asked = infill_requests(body, config.limits, client_of(request))
    return GenerationResponse(request, NativeEndpoint(body, asked, config.loop_guard))


async def completion(request: Request) -> ASGIApp:
    """A text to go on from."""
    config = service_of(request).config
    body = decode(await read_body(request, config.limits), NativeBody, config.limits)
    asked = completion_request(body, config.limits, client_of(request))
    return GenerationResponse(request, NativeEndpoint(body, [asked], config.loop_guard))


@dataclass(frozen=True, slots=True)
class NativeEndpoint:
    """See Plan. asked: the ways to ask, the whole request first."""

    body: NativeBody
    asked: Sequence[GenerateRequest]
    loop_guard: bool

    @property
    def model(self) -> str | None:
        return self.body.model

    @property
    def streams(self) -> bool:
        return bool(self.body.stream)

    @property
    def requested_tokens(self) -> int | None:
        return self.asked[0].max_tokens

    async def wish(self, lease: AsyncLease) -> GenerationSpec:
        return GenerationSpec(
            [self.asked], loop_guard=self.loop_guard, ever_shorter=True, brake=self._brake
        )

    def _brake(self) -> LineStop:
        limit_ms = self.body.t_max_predict_ms or 0
        return LineStop(self.body.n_indent or 0, limit_ms / 1e3 if limit_ms > 0 else None)

    def stream(self, lease: AsyncLease, wish: GenerationSpec) -> NativeStream:
        return NativeStream(self._frame(lease, wish))

    def whole(self, lease: AsyncLease, wish: GenerationSpec) -> NativeWhole:
        return NativeWhole(self._frame(lease, wish))

    def _frame(self, lease: AsyncLease, wish: GenerationSpec) -> NativeFrame:
        body = self.body
        return NativeFrame(
            body.model or lease.name,
            self.asked[0],
            wish,
            body.response_fields or (),
            ids=bool(body.return_tokens),
            candidates=bool(body.n_probs),
        )
