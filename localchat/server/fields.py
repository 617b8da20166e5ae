"""Fields of requests that this server does not implement.

A field that would change the answer is rejected, unless its value has no effect. Fields that never change an
answer pass. The response header `x-localchat-ignored` lists all other unknown fields: rejecting them would
break clients that send fields of many servers.
"""

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, Final

import msgspec
from msgspec import inspect

from localchat.server.errors import bad_request

HEADER: Final = b"x-localchat-ignored"
IGNORED: Final = "localchat.ignored"
"""Key of the scope with the names of ignored fields."""
_MAX_NAMES: Final = 32
_MAX_NAME: Final = 80
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9_.$-]")

_HARMLESS: Final = frozenset(
    " ".join(
        (
            # Accounting, routing and caching of hosted services.
            "user metadata store service_tier safety_identifier inference_geo prompt_cache_key",
            "prompt_cache_retention prompt_cache_options prediction request_id rid trace tags",
            "client_metadata name description title betas speed provider models route usage",
            "include_obfuscation kv_transfer_params",
            # Slots and caches, which the engine manages itself.
            "cache_prompt id_slot slot_id n_keep num_keep n_discard n_cache_reuse use_cache",
            "cache_control priority data_parallel_rank shift truncate truncation",
            # Load options of Ollama: the model is loaded already.
            "num_gpu num_thread num_batch main_gpu low_vram use_mmap use_mlock numa vocab_only f16_kv",
            "logits_all embedding_only num_gqa",
            # Parameters of a sampler that is off unless another field turns it on.
            "mirostat_tau mirostat_eta min_keep dynatemp_low dynatemp_high",
            "smoothing_curve adaptive_decay length_penalty early_stopping t_max_prompt_ms",
            "penalize_newline penalize_nl backend_sampling",
            # Parts of earlier answers that clients send back.
            "id index type status object annotations audio refusal phase signature data citations",
            "caller encrypted_content created_at provider_specific_fields finish_reason stop_reason",
            "namespace",
            # Output that this server always has, or has in the same form.
            "include_reasoning separate_reasoning stream_reasoning reasoning_format parse_tool_calls",
            "timings_per_token logprob_start_len echo_logprobs max_tool_calls reasoning_in_content",
            "spaces_between_special_tokens",
        )
    ).split()
)
"""Fields that never change the text of an answer."""

_NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = {
    # Samplers.
    **dict.fromkeys(("mirostat", "mirostat_mode", "smoothing_factor", "top_a"), (0,)),
    "penalty_alpha": (0,),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "no_repeat_ngram_size", "skew"), (0,)),
    **dict.fromkeys(("tfs", "tfs_z", "guidance_scale", "encoder_repetition_penalty"), (1,)),
    **dict.fromkeys(("num_beams", "beam_width"), (0, 1)),
    "best_of": (1,),
    "x_localchat": (),
    **dict.fromkeys(("use_beam_search", "dynamic_temperature", "post_sampling_probs"), (False,)),
    "adaptive_target": (-1, 0),
    **dict.fromkeys(("logits_processors", "custom_logit_processor", "allowed_token_ids"), ()),
    **dict.fromkeys(("banned_tokens", "banned_strings", "custom_token_bans"), ()),
    **dict.fromkeys(("negative_prompt", "lora", "lora_request", "lora_path", "adapter_id"), ()),
    # OpenAI's first form of tools, which `tools` has replaced.
    "functions": (),
    "function_call": ("none", "auto"),
    # Input that the model would not see.
    **dict.fromkeys(("prompt_embeds", "input_embeds", "image_data", "images", "audio_data"), ()),
    **dict.fromkeys(
        ("documents", "context", "chat_template", "mcp_servers", "web_search_options"), ()
    ),
    # Structure of the answer, in protocols that have another field for it.
    **dict.fromkeys(("format", "output_format", "response_format", "json_schema", "grammar"), ()),
    **dict.fromkeys(("regex", "ebnf", "structural_tag", "structured_outputs", "guided_json"), ()),
    **dict.fromkeys(("guided_regex", "guided_choice", "guided_grammar"), ()),
    "guided_json_object": (False,),
    # Another form of the answer.
    "modalities": (["text"],),
    "echo": (False,),
    "add_generation_prompt": (True,),
    "truncate_prompt_tokens": (-1,),
}
"""Values without effect, for fields that change the answer. Null and empty values never have an effect."""
_REFUSING: Final = frozenset({"", "input", "messages", "options"})
"""Objects in which these names have that meaning. Elsewhere another field may have the name."""


_DEFAULTS: Final[Mapping[str, object]] = {
    "skip_special_tokens": True,
    "add_special_tokens": False,
    "add_bos_token": True,
    "ban_eos_token": False,
    "min_length": 0,
    "typical": 1,
    "repeat_last_n": -1,
    "penalty_last_n": -1,
}
"""Values of other fields that match the behavior of this server."""


def check_unknown_fields(body: object, kind: type) -> tuple[str, ...]:
    """Return the names of ignored fields, in order. Raises ApiError for one that would change the answer.

    body: decoded JSON that is valid for `kind`.
    """
    ignored: dict[str, None] = {}
    for path, value in _unknown_fields(body, _type_info(kind), ""):
        parent, _, name = path.rpartition(".")
        if name in _NEUTRAL and parent in _REFUSING:
            _check_neutral(path, value, _NEUTRAL[name])
        elif name not in _HARMLESS and not (name in _DEFAULTS and value == _DEFAULTS[name]):
            ignored[path] = None
    return tuple(ignored)[:_MAX_NAMES]


def header_value(names: tuple[str, ...]) -> bytes:
    """Return names as the value of a header."""
    safe_names = (_UNSAFE.sub("?", name[:_MAX_NAME]) or "?" for name in names)
    return ", ".join(safe_names).encode("ascii")


def _check_neutral(path: str, value: object, neutral: tuple[object, ...]) -> None:
    if value in neutral:
        return
    param = path[:_MAX_NAME]
    advice = "leave it out"
    if neutral:
        advice = f"send {msgspec.json.encode(neutral[0]).decode()} or leave it out"
    raise bad_request(
        f"The field {param!r} would change the answer, and this server does not implement it; "
        f"{advice}.",
        param=param,
        code="unsupported_parameter",
    )


def _unknown_fields(value: object, info: inspect.Type, path: str) -> Iterator[tuple[str, object]]:
    """Yield path and value of each field that no struct declares. The items of a list share a path."""
    match info:
        case inspect.UnionType(types):
            for option in types:
                yield from _unknown_fields(value, option, path)
        case inspect.ListType(item_type) if isinstance(value, list):
            if isinstance(item_type, inspect.StructType | inspect.UnionType | inspect.ListType):
                for item in value:
                    yield from _unknown_fields(item, item_type, path)
        case inspect.StructType(cls) if isinstance(value, dict):
            fields = _fields(cls)
            for key, inner in value.items():
                declared = fields.get(key)
                if declared is not None:
                    yield from _unknown_fields(inner, declared, f"{path}{key}.")
                elif inner is not None and inner not in ("", [], {}):
                    yield path + key, inner


@lru_cache
def _type_info(kind: type) -> inspect.Type:
    return inspect.type_info(kind)


@lru_cache
def _fields(cls: type[msgspec.Struct]) -> Mapping[str, inspect.Type]:
    """Return the types of a struct's fields by their names in JSON."""
    info = _type_info(cls)
    assert isinstance(info, inspect.StructType)
    return {field.encode_name: field.type for field in info.fields}


def note_ignored(scope: Any, names: tuple[str, ...]) -> None:  # noqa: ANN401 - an ASGI scope
    """Add names to the header of this request's response."""
    if names:
        scope[IGNORED] = tuple(dict.fromkeys((*scope.get(IGNORED, ()), *names)))[:_MAX_NAMES]
