"""Converts the bodies of plain completions to engine requests."""

from typing import Final

from localchat.engine.request import GenerateRequest, Infill, Prompt, TextPrompt, TokenIds
from localchat.server.chat.options import (
    CHAT,
    INFILL,
    Client,
    _choices,
    answer_tokens,
    checked_ids,
    checked_logprobs,
    generation,
)
from localchat.server.config import ServerLimits
from localchat.server.errors import bad_request
from localchat.server.openai.protocol import CompletionBody

COMPLETION_TOKENS: Final = 16
"""Longest plain completion, where the request has no limit: as with OpenAI."""


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
