"""Requests to an engine.

Messages are rendered where the model is, so an engine process and a remote server receive the same request.
All types here cross a pipe, so they are msgspec structs with tags for alternatives.
"""

from typing import Any, Final, Literal, TypeAlias

import msgspec

from localchat.config.sampling import SamplingNumbers
from localchat.media.format import MediaKind as MediaKind

ReasoningChoice = Literal["auto", "on", "off"]


class CalledTool(msgspec.Struct, frozen=True, omit_defaults=True):
    """A tool call in an assistant message."""

    name: str
    arguments: str
    """JSON text."""
    id: str = ""


class Attachment(msgspec.Struct, frozen=True, omit_defaults=True):
    """A picture or a recording in a message."""

    kind: MediaKind
    data: bytes
    """The encoded file, such as a PNG, as the user gave it."""
    position: int = 0
    """Offset in the message's content, in characters, before which it stands."""
    name: str = ""
    """File name, for display and errors."""


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """A message of a conversation, as chat templates expect it."""

    role: str
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[CalledTool, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    attachments: tuple[Attachment, ...] = ()
    """Sorted by position."""


class Messages(msgspec.Struct, frozen=True, tag="messages", omit_defaults=True):
    """A conversation."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    """JSON-schema function descriptions."""
    tool_choice: str = "auto"
    """`auto`, `none`, `required` (only calls), or the name of the tool to call."""
    parallel_tool_calls: bool = True
    """Whether the answer may contain several calls, if the model's format allows it."""
    bind_arguments: bool = False
    """Whether a grammar binds the arguments of calls to their schemas, as far as it can."""
    template_options: dict[str, Any] = {}
    """Options of the template, such as `enable_thinking`."""
    thinking: ReasoningChoice = "auto"
    think_budget: int | None = None
    """Maximum reasoning tokens before reasoning is closed.

    None: no limit, except for the effort in `reasoning_effort` if the template does not read it.
    """
    continue_last: bool = False
    """Continue the last assistant message."""


class TextPrompt(msgspec.Struct, frozen=True, tag="text", omit_defaults=True):
    """Plain text to continue."""

    text: str
    special: bool = False
    """Whether markup such as `<|im_start|>` becomes control tokens."""


class TokenIds(msgspec.Struct, frozen=True, tag="tokens", omit_defaults=True):
    """Token ids, used unchanged."""

    tokens: tuple[int, ...]
    first_bos: bool = False
    """Whether the first token becomes the BOS token, if the model's texts start with one."""


class Infill(msgspec.Struct, frozen=True, tag="infill", omit_defaults=True):
    """A gap to fill in the middle of a text."""

    prefix: str
    suffix: str
    extra: tuple[tuple[str, str], ...] = ()
    """Context as pairs of file name and text."""


_DEFAULT_TOKENS: Final = 8192
_MIN_DEFAULT_TOKENS: Final = 512

Prompt: TypeAlias = Messages | TextPrompt | TokenIds | Infill


class Sampling(SamplingNumbers, frozen=True, omit_defaults=True):
    """Sampling of tokens.

    None selects the default of models.toml or of the user, then the model's own, then temperature 0.7, top-p
    0.95 and min-p 0.05. `top_k` 0 and `typical_p`, `top_p` 1 are off. Temperature 0 is greedy.
    """

    logit_bias: dict[int, float] = msgspec.field(default_factory=dict)
    text_bias: dict[str, float] = msgspec.field(default_factory=dict)
    """Bias of all tokens of a text."""
    dry_sequence_breakers: tuple[str, ...] | None = None
    """Texts across which DRY sees no repetition. None: `DRY_BREAKERS`. `none` alone: no texts."""
    seed: int | None = None
    """64-bit seed. None draws one, which Accepted reports."""


class Grammar(msgspec.Struct, frozen=True, omit_defaults=True):
    """A constraint on the answer, compiled by llguidance in the engine process."""

    kind: Literal["json_schema", "json_object", "lark", "regex"]
    """`lark` accepts GBNF too."""
    source: str = ""
    field: str = ""
    """Field of the client's request, for errors."""
    strict: bool = False
    """Whether the request fails if the grammar cannot enforce a keyword of the schema."""


def default_answer_tokens(context_tokens: int, *, reasons: bool = False) -> int:
    """Return the maximum answer without a requested length: a quarter of the context, at most 8,192 tokens.

    Reasoning counts as part of the answer, so a reasoning model may use half of the context and four times as
    many tokens.
    """
    if reasons:
        return max(_MIN_DEFAULT_TOKENS, min(context_tokens // 2, 4 * _DEFAULT_TOKENS))
    return max(_MIN_DEFAULT_TOKENS, min(context_tokens // 4, _DEFAULT_TOKENS))


class GenerateRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """A request.

    Size: every option of a request crosses the pipe in it.
    """

    prompt: Prompt
    sampling: Sampling = Sampling()
    n: int = 1
    max_tokens: int | None = None
    """Maximum tokens of an answer. None: up to the end of the context."""
    min_tokens: int = 0
    """Tokens before which no end-of-generation token, stop token or stop string ends an answer."""
    stop: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] = ()
    """Token ids that end an answer, besides the model's own."""
    keep_stop: bool = False
    """Whether the answer includes the stop string or the text of the stop token."""
    bad_words: tuple[str, ...] = ()
    """Words that are never generated. Each must be a single token."""
    grammar: Grammar | None = None
    logprobs: int | None = None
    """Alternatives per generated token, 0 for only its own log probability."""
    prompt_logprobs: int | None = None
    """Alternatives per prompt token."""
    prompt_logprobs_from: int = 0
    """Number of prompt tokens before the first log probability."""
    prompt_logprobs_file: str = ""
    """Local file to which the log probabilities of all tokens are appended for each position.

    Each position has V little-endian float16 numbers. The file stays empty if the backend does not support
    it. Servers never accept this field from a client.
    """
    lora: tuple[tuple[int, float], ...] | None = None
    """Index and scale of LoRA adapters. Others do not apply. None: all adapters at the scales of the load."""
    salt: str = ""
    """Separates prefix caches: equal texts with different salts share nothing."""
    owner: str = ""
    """Conversation whose KV is stored on disk. Empty: nothing is stored."""
    priority: int = 0
    """Priority of the request. Higher ones run first."""
    speculation: bool = True
    ignore_eos: bool = False
    loop_guard: bool = True
    """Whether an answer that repeats itself is ended. Ignored with `ignore_eos`."""
    default_limit: bool = False
    """Whether `default_answer_tokens` limits the answer in addition to `max_tokens`."""
    user: str = ""
    """Name of the client for statistics. It has no effect."""
