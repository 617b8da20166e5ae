"""Reads the extension fields for several tries at one answer: `best_of` and `x_localchat`."""

from localchat.engine.request import GenerateRequest
from localchat.errors import UsageError
from localchat.server.chat.request import ChatRequest
from localchat.server.config import ServerLimits
from localchat.server.errors import bad_request
from localchat.server.openai.protocol import ChatBody, TriesExtension
from localchat.tries import MAX_TRIES
from localchat.tries.spec import TriesSpec, refuse_guide, vote_extractor


def requested_tries(
    body: ChatBody,
    chat: ChatRequest,
    request: GenerateRequest,
    limits: ServerLimits,
    own_model: str,
) -> TriesSpec | None:
    """Return the tries that a chat requests, None for a plain answer. Raises ApiError.

    own_model: the model that answers a request without one.
    """
    extension = body.x_localchat or TriesExtension()
    counts: dict[str, int | bool | None] = {
        "best_of": body.best_of if body.best_of != 1 else None,
        "x_localchat.vote": extension.vote,
        "x_localchat.critique": extension.critique or None,
    }
    fields = [name for name, count in counts.items() if count is not None]
    if extension.judge and fields != ["best_of"]:
        raise bad_request(
            "'judge' picks among the answers of 'best_of'.", param="x_localchat.judge"
        )
    if extension.vote_by is not None and extension.vote is None:
        raise bad_request("'vote_by' says what 'vote' counts.", param="x_localchat.vote_by")
    if not fields:
        return None
    if len(fields) > 1:
        names = " and ".join(map(repr, fields))
        raise bad_request(f"The fields {names} do not go together.", param=fields[1])
    (field,) = fields
    _check_field(field, counts[field], body, chat, min(MAX_TRIES, limits.choices))
    spec = _spec(body, extension, request)
    if spec.method is not None and request.sampling.temperature == 0:
        raise bad_request(
            "With temperature 0 every try gives the same answer.", param="temperature"
        )
    if spec.needs_judge:
        try:
            refuse_guide(body.model or own_model, field)
        except UsageError as error:
            message = "The built-in guide cannot judge answers; name another model."
            raise bad_request(message, param="model") from error
    return spec


def _check_field(
    name: str, count: int | None, body: ChatBody, chat: ChatRequest, max_tries: int
) -> None:
    if (body.n or 1) > 1:
        raise bad_request(f"The field {name!r} gives one answer, and 'n' several.", param="n")
    if name != "x_localchat.critique" and not 2 <= (count or 0) <= max_tries:
        raise bad_request(
            f"The field {name!r} is {count}; it must be 2 to {max_tries}.", param=name
        )
    if chat.tools and chat.tool_choice.mode != "none":
        raise bad_request(
            f"The field {name!r} is for answers in words; it does not go with tools.", param=name
        )


def _spec(body: ChatBody, extension: TriesExtension, request: GenerateRequest) -> TriesSpec:
    if extension.vote is not None:
        try:
            extractor = vote_extractor(extension.vote_by, request.grammar)
        except UsageError as error:
            message = f"{error.message[:1].upper()}{error.message[1:]}: {error.hint}."
            raise bad_request(message, param="x_localchat.vote_by") from error
        return TriesSpec(extension.vote, "vote", extractor)
    if extension.critique:
        return TriesSpec(critique=True)
    assert body.best_of is not None
    return TriesSpec(body.best_of, "best_of", judge=bool(extension.judge))
