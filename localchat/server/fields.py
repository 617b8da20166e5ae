"""Fields of requests that this server does not implement.

A field that would change the answer is rejected, unless its value has no effect. All others are ignored:
rejecting them would break clients that send fields of many servers.
"""

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Final

import msgspec
from msgspec import inspect

from localchat.server.errors import bad_request

_MAX_NAME: Final = 80

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
    **dict.fromkeys(("functions", "function_call"), ()),
    # Input that the model would not see.
    **dict.fromkeys(("prompt_embeds", "input_embeds", "image_data", "images", "audio_data"), ()),
    **dict.fromkeys(
        ("documents", "context", "chat_template", "mcp_servers", "web_search_options"), ()
    ),
    # The structure of the answer, where a protocol has another field for it.
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


def check_unknown_fields(body: object, kind: type) -> None:
    """Raise ApiError for a field that would change the answer, but is not implemented.

    body: decoded JSON that is valid for `kind`.
    """
    for path, value in _unknown_fields(body, _type_info(kind), ""):
        name = path.rpartition(".")[2]
        if name in _NEUTRAL:
            _check_neutral(path, value, _NEUTRAL[name])


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
