"""Request types of llama.cpp's own routes."""

import msgspec

from localchat.server.chat.options import GenerationFields


class ExtraFile(msgspec.Struct, frozen=True):
    """Chunk of another file, as context of the gap."""

    text: str
    filename: str | None = None


class NativeBody(GenerationFields, frozen=True, kw_only=True):
    """POST /infill and /completion."""

    prompt: str | list[int | str] | None = None
    """A text, also in a list, or token ids."""
    input_prefix: str | None = None
    input_suffix: str | None = None
    input_extra: list[ExtraFile] | None = None
    n_predict: int | None = None
    """Length of the answer in tokens. 0 only caches the prompt, below 0 means no limit."""
    n_indent: int | None = None
    """Indentation in characters that every line after the first must have."""
    t_max_predict_ms: float | None = None
    """Milliseconds since the first token, after which the answer ends with its line."""
    samplers: str | list[str] | None = None
    response_fields: list[str] | None = None
    """Paths such as `timings/prompt_n`, which become the keys of the answer."""
    n_probs: int | None = None
    """Alternatives to report for each token."""
    return_tokens: bool | None = None
    """Report the id of each token."""
    n_cmpl: int | None = None
    """Only 1 is supported."""
