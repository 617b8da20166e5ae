"""A request as the OpenAI protocol writes it, and a refusal of the server as one of our errors."""

import json
import re
from typing import Any, Final

from localchat.engine.request import (
    GenerateRequest,
    Infill,
    Message,
    Messages,
    Sampling,
    Text,
    TokenIds,
)
from localchat.errors import (
    ContextExceeded,
    LocalchatError,
    ModelMissing,
    NetworkError,
    UsageError,
)

_SAMPLING: Final = {
    "temperature": "temperature",
    "top_p": "top_p",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "seed": "seed",
    "top_k": "top_k",
    "min_p": "min_p",
    "typical_p": "typical_p",
    "repetition_penalty": "repetition_penalty",
}
"""Ours to theirs; the last four are extensions that vLLM, SGLang and llama-server share."""
_MOST_TOLD: Final = 500
_NUMBERS: Final = re.compile(
    r"context length (?:is|of) (\d+).*?(?:requested|has|resulted in) (\d+)", re.S
)


def path_of(request: GenerateRequest) -> str:
    """The route below /v1."""
    return "chat/completions" if isinstance(request.prompt, Messages) else "completions"


def body_of(request: GenerateRequest, model: str, *, stream: bool = False) -> dict[str, Any]:
    """The JSON body. Only what was asked for is sent: a server's own defaults stay in force.

    Raises UsageError for what this protocol cannot carry, rather than leave it out in silence.
    """
    body: dict[str, Any] = {"model": model, **_prompt(request), **_sampling(request.sampling)}
    if request.n != 1:
        body["n"] = request.n
    if request.max_tokens is not None:
        body["max_tokens"] = request.max_tokens
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
    body |= _format(request)
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return body


def _prompt(request: GenerateRequest) -> dict[str, Any]:
    match request.prompt:
        case Messages() as messages:
            return _chat(messages)
        case Text(text):
            return {"prompt": text}
        case TokenIds(tokens):
            return {"prompt": list(tokens)}
        case Infill(prefix, suffix, extra):
            if extra:
                raise UsageError("a remote server takes no further files for a fill in the middle")
            return {"prompt": prefix, "suffix": suffix}


def _chat(messages: Messages) -> dict[str, Any]:
    if messages.continue_last:
        extra: dict[str, Any] = {"continue_final_message": True, "add_generation_prompt": False}
    else:
        extra = {}
    options = dict(messages.template_options)
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
    return {"messages": [_message(message) for message in messages.messages], **extra}


def _message(message: Message) -> dict[str, Any]:
    found: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning:
        found["reasoning_content"] = message.reasoning
    if message.tool_calls:
        found["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        found["tool_call_id"] = message.tool_call_id
    if message.name:
        found["name"] = message.name
    return found


def _sampling(sampling: Sampling) -> dict[str, Any]:
    found = {
        theirs: value
        for ours, theirs in _SAMPLING.items()
        if (value := getattr(sampling, ours)) is not None
    }
    if sampling.logit_bias:
        found["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
    return found


def _format(request: GenerateRequest) -> dict[str, Any]:
    grammar = request.grammar
    if grammar is None:
        return {}
    if grammar.kind == "json_object":
        return {"response_format": {"type": "json_object"}}
    if grammar.kind == "json_schema":
        schema = {"name": "answer", "schema": json.loads(grammar.source), "strict": True}
        return {"response_format": {"type": "json_schema", "json_schema": schema}}
    raise UsageError(
        f"a constraint of the kind {grammar.kind} cannot be asked of a remote server",
        hint="a JSON schema can",
    )


def refusal_of(status: int, text: str, base: str) -> LocalchatError:
    """Our error for a status other than 200. The server's own sentence is kept, cut to what can be read."""
    sentence, code = _said(text)
    told = f"{base} answered {status}: {sentence}" if sentence else f"{base} answered {status}"
    match status:
        case 401 | 403:
            return NetworkError(
                told, hint="does it want a key? `key_env` or `key_file` of the remote names one"
            )
        case 404 if code == "model_not_found" or "model" in sentence.lower():
            return ModelMissing(
                told, hint="the `model` of the remote must be one that the server lists"
            )
        case 404:
            return NetworkError(told, hint="is this the address of an OpenAI-compatible server?")
        case 400 if code == "context_length_exceeded" or "context length" in sentence.lower():
            numbers = _NUMBERS.search(sentence)
            details = (
                {"context_tokens": int(numbers[1]), "prompt_tokens": int(numbers[2])}
                if numbers
                else {}
            )
            return ContextExceeded(
                told, hint="a shorter input, or a server with a longer context", **details
            )
        case 400 | 413 | 415 | 422:
            return UsageError(told)
        case _:
            return NetworkError(told, hint="the server has trouble; its own log says more")


def _said(text: str) -> tuple[str, str]:
    """The sentence and the code of an error body, of whichever shape."""
    try:
        found = json.loads(text)
    except ValueError:
        return " ".join(text.split())[:_MOST_TOLD], ""
    error = found.get("error", found) if isinstance(found, dict) else found
    if isinstance(error, dict):
        sentence = error.get("message") or error.get("detail") or ""
        return str(sentence)[:_MOST_TOLD], str(error.get("code") or error.get("type") or "")
    return str(error)[:_MOST_TOLD], ""


def error_of(found: dict[str, Any], base: str) -> LocalchatError:
    """An error that came in the middle of a stream."""
    error = found.get("error")
    sentence = error.get("message") if isinstance(error, dict) else error
    return NetworkError(
        f"{base} ended its answer with an error: {str(sentence)[:_MOST_TOLD]}",
        hint="what came is kept; the server's log says more",
    )
