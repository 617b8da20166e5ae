"""Request types of llama.cpp's own routes."""

import msgspec

from localchat.server.chat.options import GenerationFields


class ExtraFile(msgspec.Struct, frozen=True):
    """A chunk of another file, as context of the gap."""

    text: str
    filename: str | None = None


class NativeBody(GenerationFields, frozen=True, kw_only=True):
    """POST /infill and /completion."""

    prompt: str | list[int | str] | None = None
    """A text, alone or in a list, or token ids."""
    input_prefix: str | None = None
    input_suffix: str | None = None
    input_extra: list[ExtraFile] | None = None
    n_predict: int | None = None
    """0: only cache the prompt for the next request; below 0: no limit."""
    n_indent: int | None = None
    """Indentation in characters that every further line must have."""
    t_max_predict_ms: float | None = None
    """Time since the first token, after which the answer ends with its line."""
    samplers: str | list[str] | None = None
    response_fields: list[str] | None = None
    """Paths such as `timings/prompt_n`; they are the keys of the answer too."""
    n_probs: int | None = None
    """Alternatives to report for each token."""
    return_tokens: bool | None = None
    """Report the id of each token."""
    n_cmpl: int | None = None
    """Only 1 is supported."""
