"""What clients of llama.cpp's own routes send. Fields that are not named here are ignored: slots, caches and
the limit on the prompt's time are the engine's to manage."""

from typing import Any

import msgspec

from localchat.server.openai.protocol import GenerationBody


class ExtraFile(msgspec.Struct, frozen=True):
    """A piece of another file."""

    text: str | None = None
    filename: str | None = None


class NativeBody(GenerationBody, frozen=True, kw_only=True):
    """POST /infill and /completion. `prompt`: a text, alone or in a list, or ids of tokens. `n_predict`: 0
    computes the prompt and keeps it for the next request, below 0 means as much as may be. `n_indent`:
    indentation, in characters, that every further line must have. `t_max_predict_ms`: from the first token;
    the answer then ends with its line. `response_fields`: paths such as `timings/prompt_n`, which are the
    keys of the answer too. `n_probs`: how many candidates to tell of each token; `return_tokens`: tell its
    id. From `n_cmpl` on: what there is not, and is refused where it would change the answer."""

    prompt: str | list[int | str] | None = None
    input_prefix: str | None = None
    input_suffix: str | None = None
    input_extra: list[ExtraFile] | None = None
    n_predict: int | None = None
    n_indent: int | None = None
    t_max_predict_ms: float | None = None
    samplers: str | list[str] | None = None
    json_schema: dict[str, object] | None = None
    response_fields: list[str] | None = None
    n_probs: int | None = None
    return_tokens: bool | None = None
    n_cmpl: int | None = None
    post_sampling_probs: bool | None = None
    image_data: list[Any] | None = None
    lora: list[Any] | None = None
    mirostat: float | None = None
    dry_multiplier: float | None = None
    xtc_probability: float | None = None
    dynatemp_range: float | None = None
