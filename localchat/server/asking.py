"""From the body of a request to what an engine is asked: every value checked, or refused by its name."""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import msgspec

from localchat.engine.request import (
    GenerateRequest,
    Grammar,
    Infill,
    Prompt,
    Sampling,
    Text,
    TokenIds,
)
from localchat.server.body import check_size
from localchat.server.config import Limits
from localchat.server.conversing import conversation
from localchat.server.failures import refused
from localchat.server.wire import (
    ChatBody,
    CompletionBody,
    ResponseFormat,
    Shared,
)

CHAT, INFILL = 0, 1
"""Priorities: an editor that completes a line waits for milliseconds, a chat for its reader."""
_SEED_MASK: Final = (1 << 64) - 1
_SCHEMA_BYTES: Final = 256 << 10
_LOGPROBS: Final = 20
_BIAS: Final = 100.0


class Asker(NamedTuple):
    """Who asks. salt: separates its prefix cache; user: its name, for the engine's figures."""

    salt: str = ""
    user: str = ""


def chat_request(body: ChatBody, limits: Limits, asker: Asker) -> GenerateRequest:
    """What a chat asks of the engine. Raises ApiError."""
    top = body.top_logprobs
    if top and not body.logprobs:
        raise refused("The field 'top_logprobs' needs 'logprobs': true.", param="top_logprobs")
    named = {
        "max_tokens": body.max_tokens,
        "max_completion_tokens": body.max_completion_tokens,
        "n_predict": body.n_predict,
    }
    wanted = {name: each for name, each in named.items() if each is not None}
    return generation(
        body,
        conversation(body, limits),
        limits,
        asker=asker,
        max_tokens=answer_tokens(wanted, limits, least=0 if body.n_predict == 0 else 1),
        logprobs=checked_logprobs(top or 0, "top_logprobs") if body.logprobs else None,
    )


def completion_requests(
    body: CompletionBody, limits: Limits, asker: Asker
) -> tuple[GenerateRequest, ...]:
    """What a completion asks of the engine, one request for each prompt. Raises ApiError."""
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise refused("The field 'best_of' cannot differ from 'n'.", param="best_of")
    if body.suffix is not None and body.echo:
        raise refused("The fields 'suffix' and 'echo' do not go together.", param="echo")
    wanted = {"max_tokens": body.max_tokens} if body.max_tokens is not None else {}
    tokens = answer_tokens(wanted, limits, least=0 if body.echo else 1)
    logprobs = None if body.logprobs is None else checked_logprobs(body.logprobs, "logprobs")
    prompts = _prompts(body, limits)
    if len(prompts) * _choices(body, limits) > limits.choices:
        raise refused(f"More than {limits.choices} answers at once.", param="prompt")
    return tuple(
        generation(
            body,
            prompt,
            limits,
            asker=asker,
            max_tokens=tokens,
            logprobs=logprobs,
            prompt_logprobs=logprobs if body.echo else None,
            priority=INFILL if isinstance(prompt, Infill) else CHAT,
        )
        for prompt in prompts
    )


# ---------------------------------------------------------------------------- parts of a request


def generation(
    body: Shared,
    prompt: Prompt,
    limits: Limits,
    *,
    asker: Asker,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    priority: int = CHAT,
) -> GenerateRequest:
    """The request of a prompt, its options checked. Raises ApiError."""
    return GenerateRequest(
        prompt=prompt,
        sampling=_sampling(body, limits),
        n=_choices(body, limits),
        max_tokens=max_tokens,
        stop=_stops(body.stop, limits),
        grammar=_grammar(body, limits),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        salt="\0".join(part for part in (asker.salt, body.cache_salt or "") if part),
        priority=priority,
        speculation=body.speculation is not False,
        ignore_eos=bool(body.ignore_eos),
        user=asker.user,
    )


def _sampling(body: Shared, limits: Limits) -> Sampling:
    biases = body.logit_bias or {}
    if len(biases) > limits.biases:
        raise refused(
            f"There are {len(biases)} biases; {limits.biases} are taken.", param="logit_bias"
        )
    if any(not -_BIAS <= bias <= _BIAS for bias in biases.values()):
        raise refused(f"A bias must be {-_BIAS:g} to {_BIAS:g}.", param="logit_bias")
    if any(not 0 <= token < 1 << 31 for token in biases):
        raise refused("The keys must be ids of tokens.", param="logit_bias")
    _check_range(body)
    repetition = (
        body.repetition_penalty if body.repetition_penalty is not None else body.repeat_penalty
    )
    return Sampling(
        temperature=body.temperature,
        top_k=None if body.top_k is None else max(0, body.top_k),
        typical_p=body.typical_p,
        top_p=body.top_p,
        min_p=body.min_p,
        repetition_penalty=repetition,
        frequency_penalty=body.frequency_penalty,
        presence_penalty=body.presence_penalty,
        logit_bias=biases,
        seed=None if body.seed is None else body.seed & _SEED_MASK,
    )


_RANGES: Final = {
    "temperature": (0.0, 10.0),
    "top_p": (0.0, 1.0),
    "top_k": (-1, 1 << 31),
    "min_p": (0.0, 1.0),
    "typical_p": (0.0, 1.0),
    "repetition_penalty": (1e-3, 10.0),
    "repeat_penalty": (1e-3, 10.0),
    "frequency_penalty": (-2.0, 2.0),
    "presence_penalty": (-2.0, 2.0),
}


def _check_range(body: Shared) -> None:
    for name, (low, high) in _RANGES.items():
        value = getattr(body, name)
        if value is not None and not low <= value <= high:
            raise refused(f"The field {name!r} is {value}; it must be {low} to {high}.", param=name)


def _choices(body: Shared, limits: Limits) -> int:
    n = 1 if body.n is None else body.n
    if not 1 <= n <= limits.choices:
        raise refused(f"The field 'n' is {n}; it must be 1 to {limits.choices}.", param="n")
    return n


def answer_tokens(wanted: Mapping[str, int], limits: Limits, *, least: int) -> int:
    """Tokens of the longest answer: what was asked for, never more than the server allows, never endless.
    `wanted`: by the field that asked. -1 is how some clients write «no limit»."""
    for name, tokens in wanted.items():
        if tokens < least and tokens != -1:
            raise refused(f"The field {name!r} is {tokens}; it must be positive.", param=name)
    return min([limits.answer_tokens, *(tokens for tokens in wanted.values() if tokens >= 0)])


def _stops(stop: str | list[str] | None, limits: Limits) -> tuple[str, ...]:
    given = [stop] if isinstance(stop, str) else stop or []
    texts = [text for text in given if text]
    if len(texts) > limits.stops:
        raise refused(f"There are {len(texts)} stop texts; {limits.stops} are taken.", param="stop")
    if any(len(text.encode()) > limits.stop_bytes for text in texts):
        raise refused(f"A stop text is longer than {limits.stop_bytes} bytes.", param="stop")
    return tuple(texts)


def checked_logprobs(count: int, param: str) -> int:
    """How many candidates are told of each token. Raises ApiError."""
    if not 0 <= count <= _LOGPROBS:
        raise refused(f"The field {param!r} is {count}; it must be 0 to {_LOGPROBS}.", param=param)
    return count


def _grammar(body: Shared, limits: Limits) -> Grammar | None:
    made = [
        *([Grammar("lark", body.grammar)] if body.grammar else []),
        *([Grammar("regex", body.regex)] if body.regex else []),
        *([_format(body.response_format, limits)] if body.response_format else []),
    ]
    bounds = [grammar for grammar in made if grammar is not None]
    if len(bounds) > 1:
        raise refused(
            "Only one of 'response_format', 'grammar' and 'regex' can bind an answer.",
            param="response_format",
        )
    if bounds and len(bounds[0].source.encode()) > _SCHEMA_BYTES:
        raise refused(
            f"The schema or grammar is larger than {_SCHEMA_BYTES} bytes.", param="response_format"
        )
    return bounds[0] if bounds else None


def _format(wanted: ResponseFormat, limits: Limits) -> Grammar | None:
    match wanted.type:
        case "text":
            return None
        case "json_object" if wanted.schema is None:
            return Grammar("json_object")
        case "json_object":
            schema: dict[str, Any] | bool | None = wanted.schema
        case "json_schema":
            schema = wanted.json_schema.schema if wanted.json_schema else wanted.schema
        case other:
            raise refused(
                f"The response format {other[:50]!r} is not known; there are text, json_object and "
                "json_schema.",
                param="response_format.type",
            )
    if schema is None:
        raise refused(
            "The field 'response_format.json_schema.schema' is required.",
            param="response_format.json_schema.schema",
            code="missing_required_parameter",
        )
    check_size(schema, limits, "response_format")
    return Grammar("json_schema", msgspec.json.encode(schema).decode())


def _prompts(body: CompletionBody, limits: Limits) -> list[Prompt]:
    """Markup in a plain prompt means what it says: its sender has written the whole of it, and editors write a
    gap in the model's own tokens."""
    given = body.prompt
    if body.suffix is not None:
        if given is not None and not isinstance(given, str):
            raise refused("With 'suffix' the prompt is one text.", param="prompt")
        return [Infill(given or "", body.suffix)]
    if given is None:
        raise refused(
            "The field 'prompt' is required.", param="prompt", code="missing_required_parameter"
        )
    if isinstance(given, str):
        return [Text(given, special=True)]
    if given and all(isinstance(each, int) for each in given):
        return [TokenIds(tuple(checked_ids(given)))]
    if not given or len(given) > limits.prompts:
        raise refused(
            f"There are {len(given)} prompts; 1 to {limits.prompts} are taken.", param="prompt"
        )
    if any(isinstance(each, int) for each in given):
        raise refused(
            "The prompt mixes ids of tokens with texts.", param="prompt", code="invalid_type"
        )
    return [
        Text(each, special=True) if isinstance(each, str) else TokenIds(tuple(checked_ids(each)))
        for each in given
        if not isinstance(each, int)
    ]


def checked_ids(given: list[Any]) -> list[int]:
    """Ids of tokens, as far as can be told without a vocabulary. Raises ApiError."""
    if any(not 0 <= token < 1 << 31 for token in given):
        raise refused("The prompt holds numbers that are no ids of tokens.", param="prompt")
    return given
