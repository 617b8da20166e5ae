"""Options of an answer: sampling, limits and structure, with the checks that all protocols share."""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import msgspec

from localchat.config.parameters import NO_BREAKERS, SAMPLERS
from localchat.engine.request import GenerateRequest, Prompt, Sampling
from localchat.server.chat.structure import AnswerFields, LogitBias, requested_grammar
from localchat.server.config import ServerLimits
from localchat.server.errors import bad_request


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None


class AdapterScale(msgspec.Struct, frozen=True):
    """Scale of a LoRA adapter, as llama.cpp's requests have it."""

    id: int
    scale: float


class GenerationFields(AnswerFields, frozen=True, kw_only=True):
    """Fields that chats, plain completions and llama.cpp's routes share.

    Size: it collects the options that all protocols share.
    """

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    lora: list[AdapterScale] | None = None
    """LoRA adapters that apply, by their index in `--lora`. From llama.cpp."""
    cache_salt: str | None = None
    speculation: bool | None = None
    return_progress: bool | None = None
    """Begin a stream with the progress of the prompt. From llama.cpp."""
    timings: bool | None = None
    """Add this request's metrics to the timings."""


CLIENTS: Final = "clients of the server"
"""Owner of KV that belongs to no stored conversation. The salt is added for each API key."""
CHAT_PRIORITY: Final = 0
INFILL_PRIORITY: Final = 1
"""A completion in an editor must arrive within milliseconds, while a chat can wait."""
_SEED_MASK: Final = (1 << 64) - 1
_MAX_LOGPROBS: Final = 20
_MAX_ADAPTERS: Final = 16
_MAX_TOKEN_ID: Final = (1 << 31) - 1
_FORBIDDEN: Final = -1e9
_MAX_BIAS: Final = 100.0


class Client(NamedTuple):
    """The sender of a request."""

    salt: str = ""
    """Separates the prefix caches of clients."""
    user: str = ""
    """Name in the engine's status."""


def generate_request(
    fields: GenerationFields,
    prompt: Prompt,
    limits: ServerLimits,
    *,
    client: Client,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    priority: int = CHAT_PRIORITY,
    format_field: str = "response_format",
) -> GenerateRequest:
    """Return the engine's request for a prompt, with every option checked. Raises ApiError.

    format_field: the protocol's name of `response_format`, for errors of the engine.
    """
    return GenerateRequest(
        prompt=prompt,
        sampling=_sampling(fields, limits),
        n=checked_choices(fields, limits),
        max_tokens=max_tokens,
        min_tokens=_min_tokens(fields, max_tokens),
        stop=_stop_strings(fields.stop, limits),
        stop_tokens=tuple(fields.stop_token_ids or ()),
        keep_stop=bool(fields.include_stop_str_in_output),
        bad_words=tuple(filter(None, _as_list(fields.bad_words))),
        grammar=requested_grammar(fields, limits, format_field),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        lora=None if fields.lora is None else _adapter_scales(fields.lora),
        # A request's own salt separates its cache further, but cannot join that of another client or adapter.
        salt="\0".join(filter(None, (client.salt, (fields.cache_salt or "").replace("\0", " ")))),
        priority=priority,
        speculation=fields.speculation is not False,
        ignore_eos=bool(fields.ignore_eos),
        user=client.user,
        owner=f"{CLIENTS} {client.salt}".rstrip(),
    )


def _adapter_scales(scales: list[AdapterScale]) -> tuple[tuple[int, float], ...]:
    """Return the scales as the engine takes them. Raises ApiError for too many."""
    if len(scales) > _MAX_ADAPTERS:
        raise bad_request(
            f"There are {len(scales)} adapters; the limit is {_MAX_ADAPTERS}.", param="lora"
        )
    return tuple((adapter.id, adapter.scale) for adapter in scales)


def _sampling(fields: GenerationFields, limits: ServerLimits) -> Sampling:
    biases, text_biases = _biases(fields.logit_bias or {}, limits)
    values: dict[str, Any] = {key: _sampler_value(fields, key) for key in SAMPLERS}
    seed = fields.seed
    if seed is not None:
        # Clients send negative and longer seeds. The engine takes 64 bits.
        seed &= _SEED_MASK
    return Sampling(
        **values,
        logit_bias=biases,
        text_bias=text_biases,
        dry_sequence_breakers=_breakers(fields.dry_sequence_breakers),
        seed=seed,
    )


def _breakers(value: list[str] | str | None) -> tuple[str, ...] | None:
    """Return the texts across which DRY sees no repetition. Raises ApiError."""
    if value is None or value == "":
        return None
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value, type=list[str])
        except msgspec.DecodeError as error:
            raise bad_request(
                'The field \'dry_sequence_breakers\' must be a list of texts, such as ["\\n", ":"].',
                param="dry_sequence_breakers",
                code="invalid_type",
            ) from error
    return tuple(value) or (NO_BREAKERS,)


def _sampler_value(fields: GenerationFields, key: str) -> float | None:
    """Return the value of a field, or of its alias. Raises ApiError if it is out of range."""
    sampler = SAMPLERS[key]
    # The engine's ranges are wider than what a client can mean.
    low, high = sampler.client_range or sampler.engine_range
    result: float | None = None
    for name in filter(None, (sampler.alias, key)):
        value: float | None = getattr(fields, name)
        if value is None:
            continue
        if not low <= value <= high:
            raise bad_request(
                f"The field {name!r} must be from {low:g} to {high:g}; got {value:g}.", param=name
            )
        # Clients write -1 for off.
        result = max(value, sampler.engine_range[0])
    return result


def _biases(
    logit_bias: LogitBias, limits: ServerLimits
) -> tuple[dict[int, float], dict[str, float]]:
    """Return biases by token id and by text. Raises ApiError."""
    if isinstance(logit_bias, dict):
        logit_bias = list(logit_bias.items())
    pairs: list[tuple[int | str, float | bool]] = logit_bias
    if len(pairs) > limits.biases:
        raise bad_request(
            f"There are {len(pairs)} biases; the limit is {limits.biases}.", param="logit_bias"
        )
    if any(bias is True or not -_MAX_BIAS <= bias <= _MAX_BIAS for _, bias in pairs):
        raise bad_request(
            f"A bias must be between {-_MAX_BIAS:g} and {_MAX_BIAS:g}, or false.",
            param="logit_bias",
        )
    by_token: dict[int, float] = {}
    by_text: dict[str, float] = {}
    for key, value in pairs:
        bias = _FORBIDDEN if value is False else float(value)
        if isinstance(key, int) or key.isdecimal():
            by_token[int(key)] = bias
        elif key:
            by_text[key] = bias
    if not all(map(_is_token_id, by_token)):
        raise bad_request("The keys must be token ids or texts.", param="logit_bias")
    return by_token, by_text


def _is_token_id(token: int) -> bool:
    return 0 <= token <= _MAX_TOKEN_ID


def checked_token_ids(tokens: list[Any]) -> tuple[int, ...]:
    """Return token ids, checked as far as possible without a vocabulary. Raises ApiError."""
    if not all(map(_is_token_id, tokens)):
        raise bad_request("The prompt contains numbers that are not token ids.", param="prompt")
    return tuple(tokens)


def checked_choices(fields: GenerationFields, limits: ServerLimits) -> int:
    """Return the number of answers. Raises ApiError."""
    n = fields.n
    if n is None:
        return 1
    if not 1 <= n <= limits.choices:
        raise bad_request(f"The field 'n' must be from 1 to {limits.choices}; got {n}.", param="n")
    return n


def answer_tokens(
    requested: Mapping[str, int | None], limits: ServerLimits, *, minimum: int
) -> int:
    """Return the smallest requested length of the answer, within the server's limit. Raises ApiError.

    requested: tokens by field name. Some clients send -1 for no limit.
    """
    shortest = limits.answer_tokens
    for name, tokens in requested.items():
        if tokens is None or tokens == -1:
            continue
        if tokens < minimum:
            raise bad_request(
                f"The field {name!r} must be at least {minimum}; got {tokens}.", param=name
            )
        shortest = min(shortest, tokens)
    return shortest


def _min_tokens(fields: GenerationFields, max_tokens: int) -> int:
    """Return the minimum length of the answer in tokens. Raises ApiError."""
    tokens = fields.min_tokens or 0
    if not 0 <= tokens <= max_tokens:
        raise bad_request(
            f"The field 'min_tokens' must be from 0 to {max_tokens}, the limit of the answer; got {tokens}.",
            param="min_tokens",
        )
    return tokens


def _as_list(texts: str | list[str] | None) -> list[str]:
    if isinstance(texts, str):
        return [texts]
    return texts or []


def _stop_strings(stop: str | list[str] | None, limits: ServerLimits) -> tuple[str, ...]:
    texts = tuple(filter(None, _as_list(stop)))
    if len(texts) > limits.stops:
        raise bad_request(
            f"There are {len(texts)} stop strings; the limit is {limits.stops}.", param="stop"
        )
    if any(len(text.encode()) > limits.stop_bytes for text in texts):
        raise bad_request(f"A stop string is longer than {limits.stop_bytes} bytes.", param="stop")
    return texts


def checked_logprobs(count: int, param: str) -> int:
    """Return the number of alternatives for each token. Raises ApiError."""
    if not 0 <= count <= _MAX_LOGPROBS:
        raise bad_request(
            f"The field {param!r} must be from 0 to {_MAX_LOGPROBS}; got {count}.", param=param
        )
    return count
