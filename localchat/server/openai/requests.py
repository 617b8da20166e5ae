"""Translates OpenAI's chats to ChatRequest, and plain completions to requests of the engine."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from localchat.engine.request import (
    GenerateRequest,
    Infill,
    Message,
    Prompt,
    TextPrompt,
    TokenIds,
)
from localchat.server.chat.media import MediaReader
from localchat.server.chat.messages import called_tools, content_of, engine_role
from localchat.server.chat.options import (
    CHAT_PRIORITY,
    INFILL_PRIORITY,
    Client,
    answer_tokens,
    checked_choices,
    checked_logprobs,
    checked_token_ids,
    generate_request,
)
from localchat.server.chat.request import EFFORTS, THINKING_SWITCHES, ChatRequest
from localchat.server.chat.tools import ToolChoice
from localchat.server.config import ServerLimits
from localchat.server.errors import bad_request, missing_field
from localchat.server.openai.protocol import (
    ChatBody,
    ChatMessage,
    CompletionBody,
    NamedToolChoice,
    TemplateBody,
    TokenizeBody,
)

_COMPLETION_TOKENS: Final = 16
"""Length of a plain completion without a limit, as in OpenAI's API."""


def as_chat(body: ChatBody, media: MediaReader) -> ChatRequest:
    """Translate a chat. Raises ApiError."""
    template_options = dict(body.chat_template_kwargs or {})
    effort = body.reasoning_effort or _thinking_of_other_servers(body, template_options)
    return ChatRequest(
        fields=body,
        messages=_messages(body.messages, media),
        tools=body.tools or (),
        tool_choice=_tool_choice(body.tool_choice),
        single_call=body.parallel_tool_calls is False,
        bind_arguments=bool(body.bind_arguments),
        template_options=template_options,
        reasoning_effort=effort,
        think_budgets=(
            body.thinking_budget,
            body.thinking_budget_tokens,
            body.thinking_token_budget,
            _item(body.thinking, "budget_tokens"),
            _item(body.reasoning, "max_tokens"),
        ),
        max_tokens={
            "max_tokens": body.max_tokens,
            "max_completion_tokens": body.max_completion_tokens,
            "n_predict": body.n_predict,
        },
        # llama.cpp's editors send 0 to fill the cache before the user has asked.
        min_answer_tokens=0 if body.n_predict == 0 else 1,
        logprobs=bool(body.logprobs),
        top_logprobs=body.top_logprobs,
        continue_last=_continues_last(body),
    )


def as_conversation(body: TemplateBody | TokenizeBody, media: MediaReader) -> ChatRequest:
    """Translate a conversation that gets no answer. Raises ApiError."""
    chat = ChatRequest(
        messages=_messages(body.messages or (), media),
        tools=body.tools or (),
        continue_last=_continues_last(body),
    )
    if isinstance(body, TokenizeBody):
        return chat
    return replace(
        chat,
        tool_choice=_tool_choice(body.tool_choice),
        template_options=body.chat_template_kwargs or {},
        reasoning_effort=body.reasoning_effort,
    )


def _continues_last(body: ChatBody | TemplateBody | TokenizeBody) -> bool:
    """Return whether the answer continues a last message of the assistant. Raises ApiError."""
    continues = body.continue_final_message is not False
    messages = body.messages or ()
    has_start = continues and messages and messages[-1].role == "assistant"
    if body.add_generation_prompt is False and messages and not has_start:
        raise bad_request(
            "The field 'add_generation_prompt' can be false only if the answer continues a last message of "
            "the assistant; leave it out.",
            param="add_generation_prompt",
            code="unsupported_parameter",
        )
    return continues


def _messages(messages: Sequence[ChatMessage], media: MediaReader) -> list[Message]:
    return [
        _message(message, f"messages[{index}]", media) for index, message in enumerate(messages)
    ]


def _message(message: ChatMessage, path: str, media: MediaReader) -> Message:
    role = engine_role(message.role, f"{path}.role")
    content = content_of(message.content, f"{path}.content", media, role=role)
    return Message(
        role=role,
        content=content.text or message.refusal or "",
        reasoning=message.reasoning_content or message.reasoning or "",
        tool_calls=called_tools(message.tool_calls),
        tool_call_id=message.tool_call_id or "",
        name=message.name or "",
        attachments=content.attachments,
    )


def _tool_choice(choice: str | NamedToolChoice | None) -> ToolChoice:
    match choice:
        case None | "":
            return ToolChoice()
        case str(mode):
            return ToolChoice(mode)
        case NamedToolChoice(type="function"):
            name = (choice.function or choice).name or ""
            return ToolChoice(name=name, param="tool_choice.function.name")
        case NamedToolChoice(type="allowed_tools") if choice.allowed_tools is not None:
            tools = choice.allowed_tools.tools
            return ToolChoice(
                choice.allowed_tools.mode or "auto",
                allowed=[(tool.function or tool).name or "" for tool in tools],
                param="tool_choice.allowed_tools.mode",
            )
        case NamedToolChoice(type=mode):
            return ToolChoice(mode or "auto")


def _thinking_of_other_servers(body: ChatBody, template_options: dict[str, Any]) -> str | None:
    """Read the thinking switches of other servers' APIs. Unknown shapes are ignored.

    Returns an effort. A switch goes to the template options if they contain none yet.
    """
    switches = [_switch(value) for value in (body.enable_thinking, body.thinking, body.reasoning)]
    switches = [switch for switch in switches if switch is not None]
    if switches and all(template_options.get(name) is None for name in THINKING_SWITCHES):
        template_options["enable_thinking"] = switches[0]
    effort = _item(body.reasoning, "effort")
    if effort in EFFORTS:
        return str(effort)
    return None


def _switch(value: Any) -> bool | None:  # noqa: ANN401 - JSON
    """Return a thinking switch in any of its shapes: true, {"type": "enabled"} or {"enabled": true}."""
    if isinstance(value, dict):
        switches = {"enabled": True, "disabled": False}
        value = switches.get(str(value.get("type")), value.get("enabled"))
    if isinstance(value, bool):
        return value
    return None


def _item(value: Any, key: str) -> Any:  # noqa: ANN401 - JSON
    if isinstance(value, dict):
        return value.get(key)
    return None


def completion_requests(
    body: CompletionBody, limits: ServerLimits, client: Client
) -> tuple[GenerateRequest, ...]:
    """Return the engine's requests for a plain completion, one for each prompt. Raises ApiError."""
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise bad_request("The field 'best_of' cannot differ from 'n'.", param="best_of")
    if body.suffix and body.echo:
        raise bad_request("The fields 'suffix' and 'echo' do not go together.", param="echo")
    requested = {"max_tokens": body.max_tokens, "n_predict": body.n_predict}
    if body.max_tokens is None and body.n_predict is None:
        requested["max_tokens"] = _COMPLETION_TOKENS
    tokens = answer_tokens(requested, limits, minimum=0)
    logprobs = None if body.logprobs is None else checked_logprobs(body.logprobs, "logprobs")
    prompts = _prompts(body, limits)
    if len(prompts) * checked_choices(body, limits) > limits.choices:
        raise bad_request(f"Too many answers; the limit is {limits.choices}.", param="prompt")
    return tuple(
        generate_request(
            body,
            prompt,
            limits,
            client=client,
            max_tokens=tokens,
            logprobs=logprobs,
            prompt_logprobs=logprobs if body.echo else None,
            priority=INFILL_PRIORITY if isinstance(prompt, Infill) else CHAT_PRIORITY,
        )
        for prompt in prompts
    )


def _prompts(body: CompletionBody, limits: ServerLimits) -> list[Prompt]:
    """Return the prompts of a completion.

    Markup in them becomes special tokens: the sender writes the whole prompt, and editors mark a gap with the
    model's own tokens.
    """
    prompt = body.prompt
    if body.suffix:
        match prompt:
            case None:
                prompt = ""
            case [str(text)]:
                prompt = text
        if not isinstance(prompt, str):
            raise bad_request("With 'suffix', the prompt must be a single string.", param="prompt")
        return [Infill(prompt, body.suffix)]
    if prompt is None:
        raise missing_field("prompt")
    if isinstance(prompt, str):
        return [TextPrompt(prompt, special=True)]
    if prompt and all(isinstance(item, int) for item in prompt):
        return [TokenIds(checked_token_ids(prompt))]
    if not prompt or len(prompt) > limits.prompts:
        raise bad_request(
            f"There are {len(prompt)} prompts; 1 to {limits.prompts} are allowed.", param="prompt"
        )
    return [_prompt(item) for item in prompt]


def _prompt(item: str | int | list[int]) -> Prompt:
    if isinstance(item, int):
        raise bad_request(
            "The prompt mixes token ids with strings.", param="prompt", code="invalid_type"
        )
    if isinstance(item, str):
        return TextPrompt(item, special=True)
    return TokenIds(checked_token_ids(item))
