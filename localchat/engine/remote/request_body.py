"""Bodies of requests to a remote server: the OpenAI protocol."""

import json
from typing import Any, Final

from localchat.config.parameters import SAMPLERS
from localchat.engine.attachments import base64_text
from localchat.engine.request import (
    Attachment,
    GenerateRequest,
    Infill,
    Message,
    Messages,
    Sampling,
    TextPrompt,
    TokenIds,
)
from localchat.errors import UsageError
from localchat.media.decode import as_png, as_wav, check_format

_LOCALCHAT_GRAMMARS: Final = {"lark": "grammar", "regex": "regex"}
"""Grammars that another localchat takes too, by their fields."""
_PICTURE_TYPES: Final = ("image/png", "image/jpeg", "image/webp", "image/gif")
_RECORDING_SUFFIXES: Final = (".wav", ".mp3")
_MAX_BIAS: Final = 100.0


def request_path(request: GenerateRequest) -> str:
    """The route below /v1."""
    if isinstance(request.prompt, Messages):
        return "chat/completions"
    return "completions"


def request_body(
    request: GenerateRequest, model: str, *, stream: bool = False, to_localchat: bool = False
) -> dict[str, Any]:
    """Return the JSON body. It omits what the user did not set, so that the server's own defaults apply.

    `to_localchat`: the server is another localchat, which supports more fields. Raises UsageError for a request
    that the protocol cannot express.
    """
    if request.prompt_logprobs is not None:
        raise UsageError("a remote server cannot return log probabilities of the prompt")
    body: dict[str, Any] = {"model": model}
    body |= _prompt(request, to_localchat)
    body |= _sampling(request.sampling, to_localchat)
    if request.n != 1:
        body["n"] = request.n
    if request.max_tokens is not None:
        prefill_only = (
            to_localchat and request.max_tokens == 0 and isinstance(request.prompt, Messages)
        )
        body["n_predict" if prefill_only else "max_tokens"] = request.max_tokens
    elif to_localchat and not isinstance(request.prompt, Messages):
        body["max_tokens"] = -1  # without a limit, a completion has OpenAI's 16 tokens
    if request.stop:
        body["stop"] = list(request.stop)
    if request.logprobs is not None:
        chat = isinstance(request.prompt, Messages)
        body |= (
            {"logprobs": True, "top_logprobs": request.logprobs}
            if chat
            else {"logprobs": request.logprobs}
        )
    if request.ignore_eos:
        body["ignore_eos"] = True
    if request.lora is not None:
        # llama.cpp's field. Other servers reject it rather than answer without the adapter.
        body["lora"] = [{"id": number, "scale": scale} for number, scale in request.lora]
    body |= _ends(request)
    body |= _response_format(request, to_localchat)
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return body


def _ends(request: GenerateRequest) -> dict[str, Any]:
    """Fields about the end of an answer and its words, under the names that vLLM and SGLang share."""
    fields = {
        "min_tokens": request.min_tokens,
        "stop_token_ids": list(request.stop_tokens),
        "include_stop_str_in_output": request.keep_stop,
        "bad_words": list(request.bad_words),
    }
    return {name: value for name, value in fields.items() if value}


def _prompt(request: GenerateRequest, to_localchat: bool) -> dict[str, Any]:
    match request.prompt:
        case Messages() as messages:
            return _chat(messages, to_localchat)
        case TextPrompt(text):
            return {"prompt": text}
        case TokenIds(tokens):
            return {"prompt": list(tokens)}
        case Infill(prefix, suffix, extra):
            if extra:
                raise UsageError(
                    "a remote server takes no context files beside a gap",
                    too_much="files",
                )
            return {"prompt": prefix, "suffix": suffix}


def _chat(messages: Messages, to_localchat: bool) -> dict[str, Any]:
    extra: dict[str, Any] = {}
    if messages.continue_last:
        # vLLM and llama-server reject the first field without the second.
        extra = {"continue_final_message": True, "add_generation_prompt": False}
    elif to_localchat and messages.messages and messages.messages[-1].role == "assistant":
        extra = {"continue_final_message": False}
    options = dict(messages.template_options)
    if messages.think_budget is not None:
        options["thinking_budget"] = messages.think_budget
    if messages.thinking != "auto":
        options["enable_thinking"] = messages.thinking == "on"
    if options:
        extra["chat_template_kwargs"] = options
    if messages.tools:
        named = messages.tool_choice not in ("auto", "none", "required")
        choice: Any = messages.tool_choice
        if named:
            choice = {"type": "function", "function": {"name": messages.tool_choice}}
        extra |= {"tools": list(messages.tools), "tool_choice": choice}
        if not messages.parallel_tool_calls:
            extra["parallel_tool_calls"] = False
        if to_localchat and messages.bind_arguments:
            extra["bind_arguments"] = True
    return {"messages": [_message(message) for message in messages.messages], **extra}


def _message(message: Message) -> dict[str, Any]:
    fields: dict[str, Any] = {"role": message.role, "content": _content(message)}
    if message.reasoning:
        fields["reasoning_content"] = message.reasoning
    if message.tool_calls:
        fields["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        fields["tool_call_id"] = message.tool_call_id
    if message.name:
        fields["name"] = message.name
    return fields


def _content(message: Message) -> str | list[dict[str, Any]]:
    """Return the content as text, or as OpenAI's parts if it has pictures or recordings."""
    if not message.attachments:
        return message.content
    parts: list[dict[str, Any]] = []
    end = 0
    for attachment in message.attachments:
        parts += _text_part(message.content[end : attachment.position])
        parts.append(media_part(attachment))
        end = attachment.position
    return [*parts, *_text_part(message.content[end:])]


def _text_part(text: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text}] if text else []


def media_part(attachment: Attachment) -> dict[str, Any]:
    """Return a part in one of the formats that every server reads. Raises UsageError for a damaged file."""
    data = attachment.data
    format_ = check_format(data, attachment.name, attachment.kind)
    if attachment.kind == "image":
        media_type = format_.media_type
        if media_type not in _PICTURE_TYPES:
            data = as_png(data, attachment.name)
            media_type = "image/png"
        url = f"data:{media_type};base64,{base64_text(data)}"
        return {"type": "image_url", "image_url": {"url": url}}
    suffix = format_.suffix
    if suffix not in _RECORDING_SUFFIXES:
        data = as_wav(data, attachment.name)
        suffix = ".wav"
    audio = {"data": base64_text(data), "format": suffix.removeprefix(".")}
    return {"type": "input_audio", "input_audio": audio}


def _sampling(sampling: Sampling, to_localchat: bool) -> dict[str, Any]:
    # Beyond OpenAI's fields, these are extensions that vLLM, SGLang and llama-server share.
    fields = {
        key: value
        for key in (*SAMPLERS, "seed", "dry_sequence_breakers")
        if (value := getattr(sampling, key)) is not None
    }
    biases = {str(token): bias for token, bias in sampling.logit_bias.items()} | sampling.text_bias
    if biases:
        fields["logit_bias"] = {key: _bias(bias, to_localchat) for key, bias in biases.items()}
    return fields


def _bias(bias: float, to_localchat: bool) -> float | bool:
    """Return a bias in the range of the protocol. A token that is forbidden has a lower one here."""
    if bias < -_MAX_BIAS and to_localchat:
        return False
    return max(bias, -_MAX_BIAS)


def _response_format(request: GenerateRequest, to_localchat: bool) -> dict[str, Any]:
    grammar = request.grammar
    if grammar is None:
        return {}
    if grammar.kind == "json_object":
        return {"response_format": {"type": "json_object"}}
    if grammar.kind == "json_schema":
        schema = {"name": "answer", "schema": json.loads(grammar.source)}
        # Other servers enforce a schema only if it is strict. Here a strict one must be enforceable.
        schema["strict"] = grammar.strict or not to_localchat
        return {"response_format": {"type": "json_schema", "json_schema": schema}}
    if to_localchat and grammar.kind in _LOCALCHAT_GRAMMARS:
        return {_LOCALCHAT_GRAMMARS[grammar.kind]: grammar.source}
    raise UsageError(
        f"a {grammar.kind} grammar cannot be sent to a remote server",
        hint="use a JSON schema",
    )
