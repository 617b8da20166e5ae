"""The settings of an answer, as llama.cpp's `generation_settings` reports them."""

from collections.abc import Mapping
from typing import Any, Final

from localchat.config.parameters import DRY_BREAKERS, SAMPLERS, SAMPLING_STAGES
from localchat.engine.request import GenerateRequest, Infill, TextPrompt
from localchat.server.llamacpp.protocol import NativeBody

_MISSING: Final = {
    "mirostat": 0,
    "repeat_last_n": -1,
    "n_keep": 0,
    "n_discard": 0,
}
"""Settings that this server does not have, with the values that describe its behavior."""


def generation_settings(
    request: GenerateRequest, defaults: Mapping[str, float], body: NativeBody
) -> dict[str, Any]:
    """Return the settings that the engine used. `defaults` fills in sampling that the request lacks."""
    samplers: dict[str, Any] = {}
    for key, sampler in SAMPLERS.items():
        value = getattr(request.sampling, key)
        if value is None:
            value = defaults.get(key, sampler.off)
        samplers[sampler.llamacpp_name or key] = value
    grammar = ""
    if request.grammar is not None and request.grammar.kind == "lark":
        grammar = request.grammar.source
    return {
        **_MISSING,
        **samplers,
        "dry_sequence_breakers": list(request.sampling.dry_sequence_breakers or DRY_BREAKERS),
        "seed": -1 if request.sampling.seed is None else request.sampling.seed,
        "logit_bias": [list(pair) for pair in request.sampling.logit_bias.items()],
        "lora": [{"id": number, "scale": scale} for number, scale in request.lora or ()],
        "n_predict": request.max_tokens,
        "max_tokens": request.max_tokens,
        "min_tokens": request.min_tokens,
        "stop": list(request.stop),
        "ignore_eos": request.ignore_eos,
        "stream": bool(body.stream),
        "n_probs": body.n_probs or 0,
        "grammar": grammar,
        "samplers": list(SAMPLING_STAGES),
        "timings_per_token": bool(body.timings_per_token),
    }


def prompt_text(request: GenerateRequest) -> str:
    """Return the text of the prompt; empty for token ids, which the client knows."""
    match request.prompt:
        case TextPrompt(text):
            return text
        case Infill(prefix, suffix):
            return prefix + suffix
    return ""
