"""Reads the extension fields for more tries at one answer: `best_of`, and `x_localchat`."""

from localchat.engine.request import GenerateRequest
from localchat.errors import UsageError
from localchat.server.chat.request import ChatRequest
from localchat.server.config import ServerLimits
from localchat.server.errors import bad_request
from localchat.server.openai.protocol import ChatBody, TriesExtension
from localchat.tries import MAX_TRIES
from localchat.tries.spec import TriesSpec, refuse_guide, vote_extractor

_NOTHING = TriesExtension()


def requested_tries(
    body: ChatBody,
    chat: ChatRequest,
    request: GenerateRequest,
    limits: ServerLimits,
    own_model: str,
) -> TriesSpec | None:
    """The tries that a chat asks for; None: one answer, or `n`. Raises ApiError.

    `own_model`: answers a request without a model."""
    given = body.x_localchat or _NOTHING
    asked = {
        "best_of": body.best_of if body.best_of not in (None, 1) else None,
        "x_localchat.vote": given.vote,
        "x_localchat.critique": given.critique or None,
    }
    named = [name for name, value in asked.items() if value is not None]
    if given.judge and named != ["best_of"]:
        raise bad_request(
            "'judge' picks among the answers of 'best_of'.", param="x_localchat.judge"
        )
    if given.vote_by is not None and given.vote is None:
        raise bad_request("'vote_by' says what 'vote' counts.", param="x_localchat.vote_by")
    if not named:
        return None
    _check(body, chat, named, min(MAX_TRIES, limits.choices))
    if given.vote is not None:
        try:
            spec = TriesSpec(given.vote, "vote", vote_extractor(given.vote_by, request.grammar))
        except UsageError as error:
            message = f"{error.message[:1].upper()}{error.message[1:]}: {error.hint}."
            raise bad_request(message, param="x_localchat.vote_by") from error
    elif body.best_of is not None and named == ["best_of"]:
        spec = TriesSpec(body.best_of, "best_of", judge=bool(given.judge))
    else:
        spec = TriesSpec(critique=True)
    if spec.method is not None and request.sampling.temperature == 0:
        raise bad_request(
            "With temperature 0 every try gives the same answer.", param="temperature"
        )
    if spec.needs_judge:
        try:
            refuse_guide(body.model or own_model, named[0])
        except UsageError as error:
            message = "The built-in guide cannot judge answers; name another model."
            raise bad_request(message, param="model") from error
    return spec


def _check(body: ChatBody, chat: ChatRequest, named: list[str], most: int) -> None:
    if len(named) > 1:
        fields = " and ".join(repr(name) for name in named)
        raise bad_request(f"The fields {fields} do not go together.", param=named[1])
    (name,) = named
    if (body.n or 1) > 1:
        raise bad_request(f"The field {name!r} gives one answer, and 'n' several.", param="n")
    count = body.best_of if name == "best_of" else body.x_localchat and body.x_localchat.vote
    if name != "x_localchat.critique" and not (count and 2 <= count <= most):
        raise bad_request(f"The field {name!r} is {count}; it must be 2 to {most}.", param=name)
    if chat.tools and chat.tool_choice.mode != "none":
        raise bad_request(
            f"The field {name!r} is for answers in words; it does not go with tools.", param=name
        )
