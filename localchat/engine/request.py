"""Requests to an engine. Messages are sent whole and rendered where the model is.

So an engine process and a remote server take the same request. Everything here crosses a pipe: msgspec
structs, tagged where they are alternatives.
"""

from typing import Any, Final, Literal, TypeAlias

import msgspec

ReasoningChoice = Literal["auto", "on", "off"]


class CalledTool(msgspec.Struct, frozen=True, omit_defaults=True):
    """A tool call in an assistant message."""

    name: str
    arguments: str
    """JSON text."""
    id: str = ""


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """One message of a conversation, as chat templates expect it."""

    role: str
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[CalledTool, ...] = ()
    tool_call_id: str = ""
    name: str = ""


class Messages(msgspec.Struct, frozen=True, tag="messages", omit_defaults=True):
    """A conversation."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    """JSON-schema function descriptions."""
    tool_choice: str = "auto"
    """`auto`, `none`, `required` (the answer is calls alone), or the name of the tool to call."""
    parallel_tool_calls: bool = True
    """The answer may hold several calls, where the model's format allows it."""
    template_options: dict[str, Any] = {}
    """Passed to the template (for instance `enable_thinking`)."""
    thinking: ReasoningChoice = "auto"
    think_budget: int | None = None
    """Most tokens of reasoning, after which it is closed; None: no limit but that of an effort
    (`reasoning_effort` among the template's options) of which the template knows nothing."""
    continue_last: bool = False
    """Continue the last assistant message."""


class TextPrompt(msgspec.Struct, frozen=True, tag="text", omit_defaults=True):
    """Plain text to continue."""

    text: str
    special: bool = False
    """Markup such as `<|im_start|>` becomes control tokens."""


class TokenIds(msgspec.Struct, frozen=True, tag="tokens", omit_defaults=True):
    """Token ids, taken as they are."""

    tokens: tuple[int, ...]
    first_bos: bool = False
    """The first one becomes the BOS token, where texts of this model begin with one."""


class Infill(msgspec.Struct, frozen=True, tag="infill", omit_defaults=True):
    """A gap to fill in the middle of a text."""

    prefix: str
    suffix: str
    extra: tuple[tuple[str, str], ...] = ()
    """Context, as pairs of file name and text."""


_DEFAULT_TOKENS: Final = 8192
_LEAST_DEFAULT_TOKENS: Final = 512

Prompt: TypeAlias = Messages | TextPrompt | TokenIds | Infill


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """Sampling of tokens. None: the default of the models.toml entry or the user, then the model's own.

    Without either the engine uses temperature 0.7, top-p 0.95 and min-p 0.05. `top_k` 0 and `typical_p`,
    `top_p` 1 are off; temperature 0 is greedy.
    """

    temperature: float | None = None
    top_k: int | None = None
    typical_p: float | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[int, float] = {}
    text_bias: dict[str, float] = {}
    """The same for all tokens of a text."""
    seed: int | None = None
    """64 bits; None draws one, and Accepted reports it."""


class Grammar(msgspec.Struct, frozen=True, omit_defaults=True):
    """A constraint on the answer, compiled by llguidance in the engine process."""

    kind: Literal["json_schema", "json_object", "lark", "regex"]
    """`lark` takes GBNF too."""
    source: str = ""
    field: str = ""
    """Where it stands in the client's request, for errors."""
    strict: bool = False
    """The request fails if the grammar cannot enforce a keyword of the schema."""


def default_answer_tokens(context_tokens: int, *, reasons: bool = False) -> int:
    """Return the longest answer where nobody named a length: a quarter of the context, at most 8,192 tokens.

    Reasoning counts as part of the answer, so a model that reasons may use half and four times as many.
    """
    if reasons:
        return max(_LEAST_DEFAULT_TOKENS, min(context_tokens // 2, 4 * _DEFAULT_TOKENS))
    return max(_LEAST_DEFAULT_TOKENS, min(context_tokens // 4, _DEFAULT_TOKENS))


class GenerateRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """One request."""

    prompt: Prompt
    sampling: Sampling = Sampling()
    n: int = 1
    max_tokens: int | None = None
    """None: up to the end of the context."""
    min_tokens: int = 0
    """No end-of-generation token, stop token or stop string ends an answer before it has this many tokens."""
    stop: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] = ()
    """Token ids that end an answer, besides the model's own."""
    keep_stop: bool = False
    """The answer includes the stop string or the text of the stop token."""
    bad_words: tuple[str, ...] = ()
    """Words that are never generated. Each must be one token."""
    grammar: Grammar | None = None
    logprobs: int | None = None
    """Alternatives per generated token (0: only its own log probability)."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt."""
    prompt_logprobs_from: int = 0
    """Prompt tokens before the first whose successor's log probability is wanted."""
    prompt_logprobs_file: str = ""
    """A file of this machine, to which the log probabilities of all tokens are appended for each of these
    positions: V little-endian float16 a position. It stays empty where the backend cannot. Only for engines
    of this user's own: no server takes it from a client."""
    salt: str = ""
    """Separates prefix caches: equal text under another salt shares nothing."""
    owner: str = ""
    """Conversation for which this machine's disk keeps the KV; empty: nothing of it is kept there."""
    priority: int = 0
    """Higher goes first."""
    speculation: bool = True
    ignore_eos: bool = False
    loop_guard: bool = True
    """End an answer that repeats itself. Never with `ignore_eos`, which asks for tokens of any kind."""
    default_limit: bool = False
    """End the answer at the engine's default length (`default_answer_tokens`) unless `max_tokens` is less."""
    user: str = ""
    """Who asks, for the engine's stats; it changes nothing."""
