"""POST /infill and /completion, GET /lora-adapters: llama.cpp's own routes, which some editors require.

Responses are compact JSON in one line, and `content` is always a string: editors search for the bytes
`"content":"` before they parse anything.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from localchat.engine.events import Done, Text, TokenLogprob, Usage
from localchat.server.chat.content_blocks import CollectedAnswer
from localchat.server.chat.endpoint import TextEndpoint
from localchat.server.errors import ApiError, openai_error
from localchat.server.formatters import json_response
from localchat.server.generation import (
    ChoiceEnd,
    Generation,
    GenerationSpec,
    OutputEvent,
    PromptProgress,
)
from localchat.server.generation_response import GenerationResponse
from localchat.server.leases import AsyncLease
from localchat.server.llamacpp.early_stop import LineStop
from localchat.server.llamacpp.protocol import NativeBody
from localchat.server.llamacpp.requests import completion_request, infill_requests
from localchat.server.request_body import read_json
from localchat.server.sse import event as sse_event
from localchat.server.state import client_of, service_of
from localchat.server.timings import answer_timings, llamacpp_timings


async def infill(request: Request) -> ASGIApp:
    """Fill a gap.

    Text that does not fit into the context is left out, starting farthest from the cursor, and the answer
    reports it (`truncated`): a suggestion from half of the file is better than none.
    """
    config = service_of(request).config
    body = await read_json(request, NativeBody)
    requests = infill_requests(body, config.limits, client_of(request))
    return GenerationResponse(request, NativeEndpoint(body, requests))


async def completion(request: Request) -> ASGIApp:
    """Continue a text."""
    config = service_of(request).config
    body = await read_json(request, NativeBody)
    prompt = completion_request(body, config.limits, client_of(request))
    return GenerationResponse(request, NativeEndpoint(body, [prompt]))


async def adapters(request: Request) -> Response:
    """List the adapters of the server's own model, or of the one that `?model=` names. Loads the model."""
    service = service_of(request)
    async with await service.lease(request.query_params.get("model"), request) as lease:
        listed = [
            {"id": number, "path": adapter.path, "scale": adapter.scale}
            for number, adapter in enumerate(lease.info.lora)
        ]
    return json_response(listed)


@dataclass(frozen=True, slots=True)
class NativeEndpoint(TextEndpoint):
    """An Endpoint of one of llama.cpp's own routes.

    Its first request is followed by versions of it with ever shorter prompts.
    """

    body: NativeBody

    async def spec(self, lease: AsyncLease) -> GenerationSpec:
        return GenerationSpec(
            [self.requests],
            shorten_to_fit=True,
            early_stop=self._early_stop,
            progress=self.streams and bool(self.body.return_progress),
        )

    def _early_stop(self) -> LineStop:
        limit_s = (self.body.t_max_predict_ms or 0) / 1e3
        return LineStop(self.body.n_indent or 0, limit_s if limit_s > 0 else None)

    def formatter(self, lease: AsyncLease, generation: Generation) -> "NativeFormatter":
        model = self.body.model or lease.name
        return NativeFormatter(model, self.body, generation)


class NativeFormatter:
    """Formats answers as llama.cpp does.

    A stream has an object for each piece of text. The last one has all metrics.
    """

    def __init__(self, model: str, body: NativeBody, generation: Generation) -> None:
        self._model = model
        self._body = body
        self._truncated = any(generation.fallbacks_used)
        self._accepted_s = time.perf_counter()
        self._streamed = CollectedAnswer(1)
        self._prompt_tokens = 0
        self._pieces = 0

    def start(self, choices: int, prompt_tokens: int) -> bytes:
        self._prompt_tokens = prompt_tokens
        return b""

    def event(self, event: OutputEvent) -> bytes:
        if isinstance(event, PromptProgress):
            return sse_event(msgspec.json.encode(self._progress(event)))
        self._streamed.add(event)
        if not isinstance(event, Text) or not (event.text or event.logprobs):
            return b""
        # A piece is usually one token. The exact number is known only at the end.
        self._pieces += 1
        piece = {
            "index": 0,
            "content": event.text,
            **self._tokens(event.logprobs),
            "stop": False,
            "id_slot": 0,
            "tokens_predicted": self._pieces,
            "tokens_evaluated": self._prompt_tokens,
        }
        return sse_event(msgspec.json.encode(piece))

    def _progress(self, progress: PromptProgress) -> dict[str, Any]:
        return {
            "index": 0,
            "content": "",
            "tokens": [],
            "stop": False,
            "id_slot": 0,
            "tokens_predicted": 0,
            "tokens_evaluated": self._prompt_tokens,
            "prompt_progress": progress.as_json(),
        }

    def finish(self, usage: Usage, done: Done | None) -> bytes:
        return sse_event(self._final(self._streamed, "", (), usage, done))

    def error(self, error: ApiError) -> bytes:
        return sse_event(openai_error(error))

    def heartbeat(self) -> bytes:
        return b""

    def response(self, answer: CollectedAnswer, usage: Usage, done: Done | None) -> bytes:
        (choice,) = answer.choices
        return self._final(answer, choice.text, choice.logprobs, usage, done)

    def _tokens(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Return the fields that list the tokens of an object."""
        fields: dict[str, Any] = {"tokens": []}
        if self._body.return_tokens:
            fields["tokens"] = [token.token for token in tokens]
        if self._body.n_probs:
            fields["completion_probabilities"] = [
                {
                    **_token(token.token, token.text, token.logprob),
                    "top_logprobs": [_token(*alternative) for alternative in token.top],
                }
                for token in tokens
            ]
        return fields

    def _final(
        self,
        answer: CollectedAnswer,
        content: str,
        tokens: Sequence[TokenLogprob],
        usage: Usage,
        done: Done | None,
    ) -> bytes:
        """Return the last object of an answer. `content` and `tokens` are empty in a stream."""
        (choice,) = answer.choices
        assert choice.end is not None
        answer_object = {
            "index": 0,
            "content": content,
            **self._tokens(tokens),
            "id_slot": 0,
            "stop": True,
            "model": self._model,
            "tokens_predicted": usage.completion_tokens,
            "tokens_evaluated": usage.prompt_tokens,
            "has_new_line": "\n" in choice.text,
            "truncated": self._truncated or choice.end.context_full,
            "stop_type": _stop_type(choice.end),
            "stopping_word": choice.end.why or "",
            "tokens_cached": usage.prompt_tokens + usage.completion_tokens,
            "timings": self._timings(answer, usage, done),
        }
        if self._body.response_fields:
            answer_object = projected(answer_object, self._body.response_fields)
        return msgspec.json.encode(answer_object)

    def _timings(self, answer: CollectedAnswer, usage: Usage, done: Done | None) -> dict[str, Any]:
        timings = answer_timings(usage, done, own=bool(self._body.timings))
        if timings is not None:
            return timings
        # The engine reports no metrics of an answer that this server ended. Measure by its text.
        first_s = answer.first_text_s
        if first_s is None:
            first_s = time.perf_counter()
        prompt_ms = (first_s - self._accepted_s) * 1e3
        return llamacpp_timings(usage, prompt_ms, max(0.0, answer.last_text_s - first_s) * 1e3)


def projected(source: Mapping[str, Any], paths: Sequence[str]) -> dict[str, Any]:
    """Return the values at these paths, with the paths as keys. Unknown paths are left out."""
    values: dict[str, Any] = {}
    for path in paths:
        value: Any = source
        for key in path.split("/"):
            if not isinstance(value, Mapping) or key not in value:
                break
            value = value[key]
        else:
            values[path] = value
    return values


def _token(token: int, text: bytes, logprob: float) -> dict[str, Any]:
    return {
        "id": token,
        "token": text.decode("utf-8", "replace"),
        "bytes": list(text),
        "logprob": logprob,
    }


def _stop_type(end: ChoiceEnd) -> str:
    if end.reason == "length":
        return "limit"
    return "word" if end.why else "eos"
