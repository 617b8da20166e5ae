"""What a door asks of an engine. Messages go in whole and are rendered where the model lives, so that
our own child and a remote server take the same request.

Everything here crosses a pipe: msgspec structs, tagged where they are alternatives.
"""

from collections.abc import Mapping
from typing import Any, Final, Literal, TypeAlias

import msgspec

ReasoningChoice = Literal["auto", "on", "off"]


class CalledTool(msgspec.Struct, frozen=True, omit_defaults=True):
    """A tool call that an assistant message carries. `arguments` is JSON text."""

    name: str
    arguments: str
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
    """A conversation. `tools` are JSON-schema function descriptions, `template_options` are handed to the
    template (for instance `enable_thinking`), `continue_last` prolongs the last assistant message.

    `tool_choice`: `auto`, `none`, `required` (the answer is calls alone) or the name of a tool (of that one).
    `parallel_tool_calls`: such an answer may hold several calls, where the model's format allows it.
    """

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    tool_choice: str = "auto"
    parallel_tool_calls: bool = True
    template_options: dict[str, Any] = {}
    thinking: ReasoningChoice = "auto"
    continue_last: bool = False


class TextPrompt(msgspec.Struct, frozen=True, tag="text", omit_defaults=True):
    """Plain text to go on from. `special`: markup such as `<|im_start|>` becomes control tokens."""

    text: str
    special: bool = False


class TokenIds(msgspec.Struct, frozen=True, tag="tokens", omit_defaults=True):
    """Token ids, taken as they are."""

    tokens: tuple[int, ...]


class Infill(msgspec.Struct, frozen=True, tag="infill", omit_defaults=True):
    """Fill in the middle. `extra`: (file name, text) pairs of context."""

    prefix: str
    suffix: str
    extra: tuple[tuple[str, str], ...] = ()


Prompt: TypeAlias = Messages | TextPrompt | TokenIds | Infill


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """How tokens are drawn. None: the model's own default (DESIGN: models.toml, then the model's
    generation settings, then temperature 0.7, top-p 0.95, min-p 0.05). `top_k` 0 and `typical_p`,
    `top_p` 1 are off; temperature 0 is greedy. `seed`: 64 bits; None draws one and reports it."""

    temperature: float | None = None
    top_k: int | None = None
    typical_p: float | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[int, float] = {}
    seed: int | None = None


SAMPLING_RANGES: Final[Mapping[str, tuple[float, float]]] = {
    "temperature": (0.0, 100.0),
    "top_k": (0, 1 << 31),
    "typical_p": (0.0, 1.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (1e-3, 100.0),
    "frequency_penalty": (-100.0, 100.0),
    "presence_penalty": (-100.0, 100.0),
}
"""Lowest and highest value of each sampling field that an engine accepts. The server and the settings
narrow some of them to what users mean."""


class Grammar(msgspec.Struct, frozen=True, omit_defaults=True):
    """A constraint on the answer, compiled by llguidance in the child."""

    kind: Literal["json_schema", "json_object", "lark", "regex"]
    source: str = ""


class GenerateRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """One request. `max_tokens` None: up to the end of the context. `logprobs`: how many alternatives per
    generated token (0: only its own). `prompt_logprobs`: the same for the prompt. `salt` separates
    prefix caches: equal text under another salt shares nothing. `exact`: None means «when a seed is
    given»: the steps of the request keep to one class of row counts, so that drafts change no token.
    `user`: who asks, for the engine's figures; it changes nothing. `priority`: higher goes first."""

    prompt: Prompt
    sampling: Sampling = Sampling()
    n: int = 1
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    grammar: Grammar | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    salt: str = ""
    priority: int = 0
    speculation: bool = True
    ignore_eos: bool = False
    exact: bool | None = None
    user: str = ""
