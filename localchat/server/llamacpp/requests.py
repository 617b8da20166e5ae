"""From the body of llama.cpp's own requests to what an engine is asked."""

from collections.abc import Iterator
from typing import Final

import msgspec

from localchat.engine.request import GenerateRequest, Infill, Prompt, Sampling, TextPrompt, TokenIds
from localchat.server.config import ServerLimits
from localchat.server.errors import bad_request
from localchat.server.llamacpp.protocol import NativeBody
from localchat.server.openai.protocol import ResponseFormat
from localchat.server.openai.requests import (
    INFILL,
    Client,
    answer_tokens,
    checked_ids,
    checked_logprobs,
    generation,
)

_NAMELESS: Final = "tmp"
_HALVINGS: Final = 12


def infill_requests(
    body: NativeBody, limits: ServerLimits, client: Client
) -> list[GenerateRequest]:
    """The ways to ask for a gap, the whole of what was sent first, each with less around it than the one
    before. Raises ApiError."""
    gap = Infill(
        # The text before the cursor in its own line comes apart, and belongs to what stands before the gap.
        (body.input_prefix or "") + _text(body),
        body.input_suffix or "",
        tuple(
            (file.filename or _NAMELESS, file.text) for file in body.input_extra or () if file.text
        ),
    )
    asked = _request(body, gap, limits, client, priority=INFILL)
    return [msgspec.structs.replace(asked, prompt=less) for less in _ever_less(gap)]


def completion_request(body: NativeBody, limits: ServerLimits, client: Client) -> GenerateRequest:
    """What goes on from a text. Raises ApiError."""
    if body.prompt is None:
        raise bad_request(
            "The field 'prompt' is required.", param="prompt", code="missing_required_parameter"
        )
    match body.prompt:
        case str(text) | [str(text)]:
            return _request(body, TextPrompt(text, special=True), limits, client)
        case given if any(isinstance(each, str) for each in given):
            raise bad_request(
                "The prompt is one text or one list of ids here.",
                param="prompt",
                code="invalid_type",
            )
        case ids:
            return _request(body, TokenIds(tuple(checked_ids(ids))), limits, client)


def _request(
    body: NativeBody, prompt: Prompt, limits: ServerLimits, client: Client, *, priority: int = 0
) -> GenerateRequest:
    _refuse_absent(body)
    wanted = body.n_predict if body.n_predict is not None else body.max_tokens
    tokens = {} if wanted is None or wanted < 0 else {"n_predict": wanted}
    changes: dict[str, object] = {}
    if body.seed is not None and body.seed < 0:
        changes["seed"] = None  # how llama.cpp writes «any»
    if body.json_schema is not None and body.response_format is None:
        changes["response_format"] = ResponseFormat("json_object", schema=body.json_schema)
    asked = generation(
        msgspec.structs.replace(body, **changes),
        prompt,
        limits,
        client=client,
        max_tokens=answer_tokens(tokens, limits, least=0),
        logprobs=checked_logprobs(body.n_probs or 0, "n_probs") if told_tokens(body) else None,
        priority=priority,
    )
    return msgspec.structs.replace(asked, sampling=_sampled(asked.sampling, body.samplers))


def told_tokens(body: NativeBody) -> bool:
    """Whether the answer tells of each of its tokens."""
    return bool(body.n_probs or body.return_tokens)


def _refuse_absent(body: NativeBody) -> None:
    """Refuse what there is not. Clients send all fields with values that mean nothing, and those pass."""
    for name in ("n", "n_cmpl"):
        if getattr(body, name) not in (None, 1):
            raise bad_request(
                f"The field {name!r} is {getattr(body, name)}; here it can be 1 only.", param=name
            )
    for name in _ABSENT:
        if getattr(body, name):
            raise bad_request(
                f"The field {name!r} asks for what there is not here; leave it out.", param=name
            )


_ABSENT: Final = (
    *("post_sampling_probs", "image_data", "lora"),
    *("mirostat", "dry_multiplier", "xtc_probability", "dynatemp_range"),
)


def _sampled(sampling: Sampling, samplers: str | list[str] | None) -> Sampling:
    """A list of samplers leaves out those that it does not name. The order of ours is fixed. `infill` keeps
    what is nearly certain; here that is the likeliest token, where no temperature was asked for."""
    if not isinstance(samplers, list) or not samplers:
        return sampling
    off = {
        field: value
        for field, (name, value) in _OFF.items()
        if name not in samplers and getattr(sampling, field) is None
    }
    if "infill" in samplers and sampling.temperature is None:
        off["temperature"] = 0.0
    return msgspec.structs.replace(sampling, **off)


_OFF: Final = {
    "top_k": ("top_k", 0),
    "typical_p": ("typ_p", 1.0),
    "top_p": ("top_p", 1.0),
    "min_p": ("min_p", 0.0),
    "repetition_penalty": ("penalties", 1.0),
}


def _ever_less(gap: Infill) -> Iterator[Infill]:
    """The gap with ever less around it: the older half of the other files goes first, as those that a client
    sends last are nearest to what is written now; then what is far from the cursor, by whole lines."""
    yield gap
    replace = msgspec.structs.replace
    while gap.extra:
        gap = replace(gap, extra=gap.extra[(len(gap.extra) + 1) // 2 :])
        yield gap
    for _ in range(_HALVINGS):
        if not gap.prefix and not gap.suffix:
            return
        gap = Infill(_latter(gap.prefix), _former(gap.suffix))
        yield gap


def _latter(text: str) -> str:
    half = len(text) - len(text) // 2
    at = text.find("\n", half) + 1
    return text[at or half :]


def _former(text: str) -> str:
    half = len(text) // 2
    return text[: text.rfind("\n", 0, half) + 1 or half]


def _text(body: NativeBody) -> str:
    if body.prompt is not None and not isinstance(body.prompt, str):
        raise bad_request("For a gap the prompt is a text.", param="prompt", code="invalid_type")
    return body.prompt or ""
