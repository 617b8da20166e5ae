"""Converts the bodies of llama.cpp's own routes to requests of the engine."""

from collections.abc import Iterator
from typing import Final

import msgspec

from localchat.config.parameters import SAMPLERS
from localchat.engine.request import GenerateRequest, Infill, Prompt, Sampling, TextPrompt, TokenIds
from localchat.server.chat.options import (
    INFILL_PRIORITY,
    Client,
    answer_tokens,
    checked_logprobs,
    checked_token_ids,
    generate_request,
)
from localchat.server.config import ServerLimits
from localchat.server.errors import bad_request, missing_field
from localchat.server.llamacpp.protocol import NativeBody

_DEFAULT_FILENAME: Final = "tmp"
_MAX_HALVINGS: Final = 12


def infill_requests(
    body: NativeBody, limits: ServerLimits, client: Client
) -> list[GenerateRequest]:
    """Return requests for a gap: with the whole context, then with ever less of it. Raises ApiError."""
    gap = Infill(
        # `prompt` is the cursor's line up to the cursor: part of the text before the gap.
        (body.input_prefix or "") + _text(body),
        body.input_suffix or "",
        tuple(
            (file.filename or _DEFAULT_FILENAME, file.text)
            for file in body.input_extra or ()
            if file.text
        ),
    )
    request = _request(body, gap, limits, client, priority=INFILL_PRIORITY)
    return [msgspec.structs.replace(request, prompt=shorter) for shorter in _ever_shorter(gap)]


def completion_request(body: NativeBody, limits: ServerLimits, client: Client) -> GenerateRequest:
    """Return the request that continues a text. Raises ApiError."""
    if body.prompt is None:
        raise missing_field("prompt")
    match body.prompt:
        case str(text) | [str(text)]:
            return _request(body, TextPrompt(text, special=True), limits, client)
        case tokens if any(isinstance(token, str) for token in tokens):
            raise bad_request(
                "The prompt must be one string or one list of token ids here.",
                param="prompt",
                code="invalid_type",
            )
        case tokens:
            return _request(body, TokenIds(checked_token_ids(tokens)), limits, client)


def _request(
    body: NativeBody, prompt: Prompt, limits: ServerLimits, client: Client, *, priority: int = 0
) -> GenerateRequest:
    _check_single(body)
    limit = body.max_tokens if body.n_predict is None else body.n_predict
    if limit is not None and limit < 0:
        limit = None
    changes: dict[str, object] = {}
    if body.seed is not None and body.seed < 0:
        changes["seed"] = None  # llama.cpp's clients send -1 for a random seed
    if body.response_format is not None or body.grammar:
        changes["json_schema"] = None  # llama.cpp ignores the schema then
    logprobs = None
    if body.n_probs or body.return_tokens:
        logprobs = checked_logprobs(body.n_probs or 0, "n_probs")
    request = generate_request(
        msgspec.structs.replace(body, **changes),
        prompt,
        limits,
        client=client,
        max_tokens=answer_tokens({"n_predict": limit}, limits, minimum=0),
        logprobs=logprobs,
        priority=priority,
    )
    return msgspec.structs.replace(
        request, sampling=_with_samplers(request.sampling, body.samplers)
    )


def _check_single(body: NativeBody) -> None:
    """Raise ApiError for a request of several answers."""
    for name in ("n", "n_cmpl"):
        if getattr(body, name) not in (None, 1):
            raise bad_request(
                f"The field {name!r} must be 1; got {getattr(body, name)}.", param=name
            )


def _with_samplers(sampling: Sampling, samplers: str | list[str] | None) -> Sampling:
    """Turn off the samplers that the list does not name. The order of the others is fixed.

    `infill` keeps nearly certain tokens. Here it means greedy sampling, unless the request has a temperature.
    """
    if not isinstance(samplers, list) or not samplers:
        return sampling
    off = {
        key: sampler.off
        for key, sampler in SAMPLERS.items()
        if sampler.llamacpp_stage
        and sampler.llamacpp_stage not in samplers
        and getattr(sampling, key) is None
    }
    if "infill" in samplers and sampling.temperature is None:
        off["temperature"] = 0.0
    return msgspec.structs.replace(sampling, **off)


def _ever_shorter(gap: Infill) -> Iterator[Infill]:
    """Yield the gap with ever less context.

    The first half of the other files goes first, because clients send the most relevant last. Then the lines
    farthest from the cursor go.
    """
    yield gap
    replace = msgspec.structs.replace
    # Each step halves the context, so that a few attempts are enough for any size.
    while gap.extra:
        gap = replace(gap, extra=gap.extra[(len(gap.extra) + 1) // 2 :])
        yield gap
    for _ in range(_MAX_HALVINGS):
        if not gap.prefix and not gap.suffix:
            return
        gap = Infill(_latter_half(gap.prefix), _former_half(gap.suffix))
        yield gap


def _latter_half(text: str) -> str:
    half = len(text) - len(text) // 2
    line_start = text.find("\n", half) + 1
    return text[line_start or half :]


def _former_half(text: str) -> str:
    half = len(text) // 2
    return text[: text.rfind("\n", 0, half) + 1 or half]


def _text(body: NativeBody) -> str:
    if body.prompt is not None and not isinstance(body.prompt, str):
        raise bad_request(
            "For a gap, the prompt must be a string.", param="prompt", code="invalid_type"
        )
    return body.prompt or ""
