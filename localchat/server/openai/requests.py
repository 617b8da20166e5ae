"""Converts OpenAI request bodies to engine requests, and checks every value."""

import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec

from localchat.engine.request import (
    SAMPLING_RANGES,
    GenerateRequest,
    Infill,
    Messages,
    Prompt,
    ReasoningChoice,
    Sampling,
    TextPrompt,
    TokenIds,
)
from localchat.server.config import ServerLimits
from localchat.server.errors import bad_request
from localchat.server.openai.custom_tools import PARAMETERS, description_of
from localchat.server.openai.messages import engine_messages
from localchat.server.openai.protocol import (
    AllowedTools,
    ChatBody,
    ChatTool,
    CompletionBody,
    FunctionDefinition,
    GenerationBody,
    LogitBias,
    NamedToolChoice,
    TemplateBody,
    TokenizeBody,
)
from localchat.server.openai.structure import requested_grammar
from localchat.server.request_body import check_json_size

_Tools: TypeAlias = tuple[dict[str, Any], ...]
_EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh")
_SWITCHES: Final = ("enable_thinking", "thinking")
_TEMPLATE_OPTIONS: Final = frozenset(
    {*_SWITCHES, "reasoning_effort", "thinking_budget", "date_string"}
)
"""Options that a request may pass to a chat template; each is a plain value."""
_TOOL_NAME: Final = re.compile(r'(?!\s)[^"\\<>\x00-\x1f\x7f]{1,256}(?<!\s)')
"""Names of tools: other characters do not survive the tool-call syntax of one model family or another."""
_NON_OBJECT_TYPES: Final = ("string", "number", "integer", "boolean", "array", "null")


def conversation(body: ChatBody | TemplateBody | TokenizeBody, limits: ServerLimits) -> Messages:
    """The conversation with its tools, as the model's template gets it. Raises ApiError."""
    messages = engine_messages(body.messages or (), limits)
    tools = _tools(body.tools, limits)
    options: dict[str, Any] = {}
    thinking: ReasoningChoice = "auto"
    budget: int | None = None
    choice = "auto"
    if not isinstance(body, TokenizeBody):
        choice, tools = _tool_choice(body.tool_choice, tools)
        options = _template_options(body.chat_template_kwargs or {})
        effort = body.reasoning_effort
        if isinstance(body, ChatBody):
            budget = _think_budget(body, options)
            effort = effort or _thinking_of_other_servers(body, options)
        thinking = _thinking(options, effort)
    last = messages[-1]
    declines = isinstance(body, ChatBody) and body.continue_final_message is False
    continues = last.role == "assistant" and not last.tool_calls and not declines
    if continues and not last.content and not last.reasoning and len(messages) > 1:
        # an empty answer cannot be continued
        messages = messages[:-1]
        continues = False
    return Messages(
        messages=messages,
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=not (isinstance(body, ChatBody) and body.parallel_tool_calls is False),
        template_options=options,
        thinking=thinking,
        think_budget=budget,
        continue_last=continues,
    )


def _tools(tools: list[ChatTool] | None, limits: ServerLimits) -> _Tools:
    given = tools or []
    if len(given) > limits.tools:
        raise bad_request(
            f"There are {len(given)} tools; the limit is {limits.tools}.", param="tools"
        )
    return tuple(_tool(at, tool, limits) for at, tool in enumerate(given))


def _tool(at: int, tool: ChatTool, limits: ServerLimits) -> dict[str, Any]:
    function: FunctionDefinition | None = tool.function
    which = "custom" if tool.type == "custom" else "function"
    if which == "custom" and tool.custom is not None:
        description = description_of(tool.custom.description, tool.custom.format)
        function = FunctionDefinition(tool.custom.name, description, PARAMETERS)
    elif tool.type not in ("function", "custom"):
        raise bad_request(
            f"Tools are functions; one of type {tool.type[:50]!r} cannot be called here.",
            param=f"tools[{at}]",
        )
    if function is None:
        raise bad_request(
            f"The field 'tools[{at}].{which}' is required.",
            param=f"tools[{at}].{which}",
            code="missing_required_parameter",
        )
    if not _TOOL_NAME.fullmatch(function.name):
        raise bad_request(
            f"No model can call a tool of the name {function.name[:50]!r}: it must have 1 to 256 characters, "
            "such as letters, digits, - and _, and no quote, backslash, angle bracket or line break.",
            param=f"tools[{at}].{which}.name",
        )
    parameters = function.parameters or {"type": "object", "properties": {}}
    if (kind := parameters.get("type")) in _NON_OBJECT_TYPES:
        raise bad_request(
            f"The parameters of the tool {function.name!r} have the type {kind!r}; they must be an object.",
            param=f"tools[{at}].function.parameters",
        )
    check_json_size(parameters, limits, f"tools[{at}].function.parameters")
    described: dict[str, Any] = {"name": function.name}
    if function.description is not None:
        described["description"] = function.description
    described["parameters"] = parameters
    if function.strict is not None:
        described["strict"] = function.strict
    return {"type": "function", "function": described}


def _tool_choice(choice: str | NamedToolChoice | None, tools: _Tools) -> tuple[str, _Tools]:
    """The tool choice and the tools that it leaves.

    The choice is `auto`, `none`, `required` or a tool's name.
    """
    if isinstance(choice, NamedToolChoice):
        if choice.type == "function":
            name = choice.function.name if choice.function else choice.name or ""
            _check_tool(name, tools, "tool_choice.function.name")
            return name, tools
        if choice.type == "custom":
            name = choice.custom.name if choice.custom else choice.name or ""
            _check_tool(name, tools, "tool_choice.custom.name")
            return name, tools
        if choice.type == "allowed_tools" and choice.allowed_tools is not None:
            allowed = choice.allowed_tools
            tools = _allowed_tools(allowed, tools)
            return _choice_mode(
                allowed.mode or "auto", tools, "tool_choice.allowed_tools.mode"
            ), tools
        choice = choice.type
    return _choice_mode(choice or "auto", tools, "tool_choice"), tools


def _choice_mode(choice: str, tools: _Tools, param: str) -> str:
    mode = {"any": "required"}.get(choice, choice)  # as Mistral and Anthropic call it
    if mode not in ("auto", "none", "required"):
        raise bad_request(
            f"The tool choice {choice[:50]!r} is unknown; the choices are auto, none, required and "
            '{"type": "function", "function": {"name": NAME}}.',
            param=param,
        )
    if mode == "required" and not tools:
        raise bad_request("A tool call is required, but there are no tools.", param=param)
    return mode


def _allowed_tools(allowed: AllowedTools, tools: _Tools) -> _Tools:
    names = [(tool.function or tool.custom or tool).name or "" for tool in allowed.tools]
    for at, name in enumerate(names):
        _check_tool(name, tools, f"tool_choice.allowed_tools.tools[{at}]")
    return tuple(tool for tool in tools if tool["function"]["name"] in names)


def _check_tool(name: str, tools: _Tools, param: str) -> None:
    if name not in [tool["function"]["name"] for tool in tools]:
        raise bad_request(f"The tool {name[:100]!r} is not among 'tools'.", param=param)


def _template_options(given: dict[str, Any]) -> dict[str, Any]:
    for name, value in given.items():
        param = f"chat_template_kwargs.{name[:50]}"
        if name not in _TEMPLATE_OPTIONS:
            raise bad_request(
                f"The template option {name[:50]!r} is not supported; the options are: "
                f"{', '.join(sorted(_TEMPLATE_OPTIONS))}.",
                param=param,
            )
        if not isinstance(value, str | bool | int | float | None):
            raise bad_request("A template option must be a plain value.", param=param)
    return dict(given)


def _thinking_of_other_servers(body: ChatBody, options: dict[str, Any]) -> str | None:
    """Read the thinking switches of other servers' APIs.

    A switch goes to the options if they have none yet, an effort is returned; unknown shapes are ignored.
    """
    switches = [body.enable_thinking, body.thinking, body.reasoning]
    for at, value in enumerate(switches):
        if isinstance(value, dict):
            switch = {"enabled": True, "disabled": False}.get(str(value.get("type")))
            switches[at] = switch if switch is not None else value.get("enabled")
    if not any(options.get(name) is not None for name in _SWITCHES):
        found = [value for value in switches if isinstance(value, bool)]
        options |= {"enable_thinking": found[0]} if found else {}
    effort = body.reasoning.get("effort") if isinstance(body.reasoning, dict) else None
    return effort if effort in _EFFORTS else None


def _think_budget(body: ChatBody, options: dict[str, Any]) -> int | None:
    """Most tokens of reasoning, under any server's name for it. Below 0 is no limit, as there."""
    given: list[Any] = [
        body.thinking_budget,
        body.thinking_budget_tokens,
        body.thinking_token_budget,
        options.get("thinking_budget"),
        body.thinking.get("budget_tokens") if isinstance(body.thinking, dict) else None,
        body.reasoning.get("max_tokens") if isinstance(body.reasoning, dict) else None,
    ]
    budgets = [one for one in given if isinstance(one, int) and not isinstance(one, bool)]
    if not budgets or min(budgets) < 0:
        return None
    return min(min(budgets), _MAX_THINK_BUDGET)


def _thinking(options: dict[str, Any], effort: str | None) -> ReasoningChoice:
    """The thinking mode. Removes its switches from the options, because the engine knows their names.

    effort: OpenAI's `reasoning_effort`, which some templates read too.
    """
    switches = [value for name in _SWITCHES if (value := options.pop(name, None)) is not None]
    if effort:
        effort = {"max": "xhigh"}.get(effort, effort)
        if effort not in _EFFORTS:
            raise bad_request(
                f"'reasoning_effort' must be one of {', '.join(_EFFORTS)}; got {effort[:50]!r}.",
                param="reasoning_effort",
            )
        if effort != "none":
            options.setdefault("reasoning_effort", "low" if effort == "minimal" else effort)
        switches.append(effort not in ("none", "minimal"))
    if not switches:
        return "auto"
    return "on" if switches[0] else "off"


COMPLETION_TOKENS: Final = 16
"""Longest plain completion, where the request has no limit: as with OpenAI."""
CHAT = 0
INFILL = 1
"""Priorities: a completion in an editor must come within milliseconds, a chat may wait."""
_SEED_MASK: Final = (1 << 64) - 1
_MAX_LOGPROBS: Final = 20
_MAX_THINK_BUDGET: Final = 1 << 31
_NEVER: Final = -1e9
_MAX_BIAS: Final = 100.0


class Client(NamedTuple):
    """The sender of a request. salt: keeps its prefix cache apart; user: its name, for the engine's status."""

    salt: str = ""
    user: str = ""


def chat_request(body: ChatBody, limits: ServerLimits, client: Client) -> GenerateRequest:
    """The engine request of a chat. Raises ApiError."""
    top = body.top_logprobs
    if top and not body.logprobs:
        raise bad_request("The field 'top_logprobs' needs 'logprobs': true.", param="top_logprobs")
    named = {
        "max_tokens": body.max_tokens,
        "max_completion_tokens": body.max_completion_tokens,
        "n_predict": body.n_predict,
    }
    requested = {name: each for name, each in named.items() if each is not None}
    request = generation(
        body,
        conversation(body, limits),
        limits,
        client=client,
        max_tokens=answer_tokens(requested, limits, least=0 if body.n_predict == 0 else 1),
        logprobs=checked_logprobs(top or 0, "top_logprobs") if body.logprobs else None,
    )
    # A limit that the operator chose replaces the default one.
    default_limit = not requested and limits.answer_tokens == ServerLimits().answer_tokens
    return msgspec.structs.replace(request, default_limit=default_limit)


def completion_requests(
    body: CompletionBody, limits: ServerLimits, client: Client
) -> tuple[GenerateRequest, ...]:
    """The engine requests of a completion, one for each prompt. Raises ApiError."""
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise bad_request("The field 'best_of' cannot differ from 'n'.", param="best_of")
    if body.suffix is not None and body.echo:
        raise bad_request("The fields 'suffix' and 'echo' do not go together.", param="echo")
    tokens = answer_tokens(_completion_limits(body), limits, least=0 if body.echo else 1)
    logprobs = None if body.logprobs is None else checked_logprobs(body.logprobs, "logprobs")
    prompts = _prompts(body, limits)
    if len(prompts) * _choices(body, limits) > limits.choices:
        raise bad_request(f"Too many answers; the limit is {limits.choices}.", param="prompt")
    return tuple(
        generation(
            body,
            prompt,
            limits,
            client=client,
            max_tokens=tokens,
            logprobs=logprobs,
            prompt_logprobs=logprobs if body.echo else None,
            priority=INFILL if isinstance(prompt, Infill) else CHAT,
        )
        for prompt in prompts
    )


def _completion_limits(body: CompletionBody) -> dict[str, int]:
    """Limits of a completion by field; without one, OpenAI's default."""
    named = {"max_tokens": body.max_tokens, "n_predict": body.n_predict}
    given = {name: each for name, each in named.items() if each is not None}
    return given or {"max_tokens": COMPLETION_TOKENS}


# ---------------------------------------------------------------------------- parts of a request


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


def _prompts(body: CompletionBody, limits: ServerLimits) -> list[Prompt]:
    """The prompts of a completion. Markup in them is special tokens: the sender writes the whole prompt, and
    editors mark a gap with the model's own tokens."""
    given = body.prompt
    if body.suffix is not None:
        match given:
            case None:
                given = ""
            case [str(only)]:
                given = only
        if not isinstance(given, str):
            raise bad_request("With 'suffix', the prompt must be a single string.", param="prompt")
        return [Infill(given, body.suffix)]
    if given is None:
        raise bad_request(
            "The field 'prompt' is required.", param="prompt", code="missing_required_parameter"
        )
    if isinstance(given, str):
        return [TextPrompt(given, special=True)]
    if given and all(isinstance(each, int) for each in given):
        return [TokenIds(tuple(checked_ids(given)))]
    if not given or len(given) > limits.prompts:
        raise bad_request(
            f"There are {len(given)} prompts; 1 to {limits.prompts} are allowed.", param="prompt"
        )
    if any(isinstance(each, int) for each in given):
        raise bad_request(
            "The prompt mixes token ids with strings.", param="prompt", code="invalid_type"
        )
    return [
        TextPrompt(each, special=True)
        if isinstance(each, str)
        else TokenIds(tuple(checked_ids(each)))
        for each in given
        if not isinstance(each, int)
    ]


def checked_ids(given: list[Any]) -> list[int]:
    """Token ids, checked as far as that is possible without a vocabulary. Raises ApiError."""
    if any(not 0 <= token < 1 << 31 for token in given):
        raise bad_request("The prompt contains numbers that are not token ids.", param="prompt")
    return given
