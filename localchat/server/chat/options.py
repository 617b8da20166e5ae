"""How an answer is generated: sampling, limits and structure, checked for every protocol."""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec

from localchat.engine.request import SAMPLING_RANGES, GenerateRequest, Prompt, Sampling
from localchat.server.chat.structure import StructureBody, requested_grammar
from localchat.server.config import ServerLimits
from localchat.server.errors import bad_request


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None


LogitBias: TypeAlias = dict[str, float | bool] | list[tuple[int | str, float | bool]]
"""Token ids, or texts, with their biases; also as llama.cpp's list of pairs. False: never."""


class GenerationBody(StructureBody, frozen=True, kw_only=True):
    """Fields that chat and plain completions share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    typ_p: float | None = None
    """Name of `typical_p` in llama.cpp's own chat page."""
    repetition_penalty: float | None = None
    repeat_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: LogitBias | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    """vLLM's, as the next three."""
    include_stop_str_in_output: bool | None = None
    min_tokens: int | None = None
    bad_words: str | list[str] | None = None
    min_new_tokens: int | None = None
    """SGLang's name of `min_tokens`."""
    no_stop_trim: bool | None = None
    """SGLang's name of `include_stop_str_in_output`."""
    ignore_eos: bool | None = None
    cache_salt: str | None = None
    speculation: bool | None = None
    return_progress: bool | None = None
    """llama.cpp's: a stream begins with the progress of the prompt."""
    timings: bool | None = None
    """Add this request's metrics to the timings."""
    timings_per_token: bool | None = None
    """llama.cpp's: every piece of a stream has the timings so far."""


CHAT = 0


INFILL = 1
"""Priorities: a completion in an editor must come within milliseconds, a chat may wait."""


_SEED_MASK: Final = (1 << 64) - 1


_MAX_LOGPROBS: Final = 20


_NEVER: Final = -1e9


_MAX_BIAS: Final = 100.0


class Client(NamedTuple):
    """The sender of a request. salt: keeps its prefix cache apart; user: its name, for the engine's status."""

    salt: str = ""
    user: str = ""


CLIENTS = "clients of the server"
"""Owner of KV that no conversation of this machine's history has; with the salt, one for each API key."""


def generation(
    body: GenerationBody,
    prompt: Prompt,
    limits: ServerLimits,
    *,
    client: Client,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    priority: int = CHAT,
) -> GenerateRequest:
    """The engine request of a prompt, with all options checked. Raises ApiError."""
    return GenerateRequest(
        prompt=prompt,
        sampling=_sampling(body, limits),
        n=_choices(body, limits),
        max_tokens=max_tokens,
        min_tokens=_min_tokens(body, max_tokens),
        stop=_stops(body.stop, limits),
        stop_tokens=tuple(body.stop_token_ids or ()),
        keep_stop=bool(body.include_stop_str_in_output or body.no_stop_trim),
        bad_words=_words(body.bad_words),
        grammar=requested_grammar(body, limits),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        salt="\0".join(part for part in (client.salt, body.cache_salt or "") if part),
        priority=priority,
        speculation=body.speculation is not False,
        ignore_eos=bool(body.ignore_eos),
        user=client.user,
        owner=f"{CLIENTS} {client.salt}".rstrip(),
    )


def _sampling(body: GenerationBody, limits: ServerLimits) -> Sampling:
    biases, text_biases = _biases(body.logit_bias or {}, limits)
    _check_range(body)
    repetition = (
        body.repetition_penalty if body.repetition_penalty is not None else body.repeat_penalty
    )
    return Sampling(
        temperature=body.temperature,
        top_k=None if body.top_k is None else max(0, body.top_k),
        typical_p=body.typical_p if body.typical_p is not None else body.typ_p,
        top_p=body.top_p,
        min_p=body.min_p,
        repetition_penalty=repetition,
        frequency_penalty=body.frequency_penalty,
        presence_penalty=body.presence_penalty,
        logit_bias=biases,
        text_bias=text_biases,
        seed=None if body.seed is None else body.seed & _SEED_MASK,
    )


def _biases(given: LogitBias, limits: ServerLimits) -> tuple[dict[int, float], dict[str, float]]:
    """Biases of token ids and of texts. Raises ApiError."""
    pairs = list(given.items() if isinstance(given, dict) else given)
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
        bias = _NEVER if value is False else float(value)
        if isinstance(key, int) or key.isdecimal():
            by_token[int(key)] = bias
        elif key:
            by_text[key] = bias
    if any(not 0 <= token < 1 << 31 for token in by_token):
        raise bad_request("The keys must be token ids or texts.", param="logit_bias")
    return by_token, by_text


_REPETITION_RANGE: Final = (1e-3, 10.0)


_RANGES: Final = {
    **SAMPLING_RANGES,
    "temperature": (0.0, 10.0),
    "top_k": (-1, 1 << 31),  # clients write -1 for off
    "typ_p": SAMPLING_RANGES["typical_p"],
    "repetition_penalty": _REPETITION_RANGE,
    "repeat_penalty": _REPETITION_RANGE,  # llama.cpp's name for it
    "frequency_penalty": (-2.0, 2.0),
    "presence_penalty": (-2.0, 2.0),
}
"""The engine's ranges, narrowed to those of the OpenAI protocol and to what a client can mean."""


def _check_range(body: GenerationBody) -> None:
    for name, (low, high) in _RANGES.items():
        value = getattr(body, name)
        if value is not None and not low <= value <= high:
            raise bad_request(
                f"The field {name!r} is {value}; it must be {low} to {high}.", param=name
            )


def _choices(body: GenerationBody, limits: ServerLimits) -> int:
    n = 1 if body.n is None else body.n
    if not 1 <= n <= limits.choices:
        raise bad_request(f"The field 'n' is {n}; it must be 1 to {limits.choices}.", param="n")
    return n


def answer_tokens(requested: Mapping[str, int], limits: ServerLimits, *, least: int) -> int:
    """Limit of the answer in tokens: as requested, within the server's limit.

    requested: by field name; some clients send -1 for no limit.
    """
    for name, tokens in requested.items():
        if tokens < least and tokens != -1:
            raise bad_request(f"The field {name!r} is {tokens}; it must be positive.", param=name)
    return min([limits.answer_tokens, *(tokens for tokens in requested.values() if tokens >= 0)])


def _min_tokens(body: GenerationBody, max_tokens: int) -> int:
    """Minimum length of the answer in tokens. Raises ApiError."""
    field = "min_tokens" if body.min_tokens is not None else "min_new_tokens"
    tokens = getattr(body, field) or 0
    if not 0 <= tokens <= max_tokens:
        raise bad_request(
            f"The field {field!r} is {tokens}; it must be 0 to {max_tokens}, the limit of the answer.",
            param=field,
        )
    return tokens


def _words(words: str | list[str] | None) -> tuple[str, ...]:
    """Return the words that are not empty."""
    if isinstance(words, str):
        words = [words]
    return tuple(filter(None, words or []))


def _stops(stop: str | list[str] | None, limits: ServerLimits) -> tuple[str, ...]:
    given = [stop] if isinstance(stop, str) else stop or []
    texts = [text for text in given if text]
    if len(texts) > limits.stops:
        raise bad_request(
            f"There are {len(texts)} stop strings; the limit is {limits.stops}.", param="stop"
        )
    if any(len(text.encode()) > limits.stop_bytes for text in texts):
        raise bad_request(f"A stop string is longer than {limits.stop_bytes} bytes.", param="stop")
    return tuple(texts)


def checked_logprobs(count: int, param: str) -> int:
    """The number of alternatives for each token. Raises ApiError."""
    if not 0 <= count <= _MAX_LOGPROBS:
        raise bad_request(
            f"The field {param!r} is {count}; it must be 0 to {_MAX_LOGPROBS}.", param=param
        )
    return count


def checked_ids(given: list[Any]) -> list[int]:
    """Token ids, checked as far as that is possible without a vocabulary. Raises ApiError."""
    if any(not 0 <= token < 1 << 31 for token in given):
        raise bad_request("The prompt contains numbers that are not token ids.", param="prompt")
    return given
