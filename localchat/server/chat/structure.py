"""Structure of an answer: the schema, grammar, expression or choices that a request holds it to.

Every server has its own fields for this. Those of OpenAI, llama.cpp, vLLM and SGLang are all understood,
because a client whose field was ignored would get free text where it expects a form.
"""

import json
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from localchat.engine.request import GenerateRequest, Grammar
from localchat.server.config import ServerLimits
from localchat.server.errors import ApiError, bad_request
from localchat.server.request_body import check_json_size

_MAX_BYTES: Final = 256 << 10
_STRUCTURED_OPTIONS: Final = frozenset(
    (
        "disable_any_whitespace",
        "disable_additional_properties",
        "disable_fallback",
        "whitespace_pattern",
        "backend",
    )
)
"""Fields of vLLM's `structured_outputs` that change nothing here."""


class JsonSchemaFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    schema: dict[str, Any] | bool | None = None
    name: str | None = None
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Structure of an answer. Unknown fields are rejected, because each may hold the schema."""

    type: str
    json_schema: JsonSchemaFormat | None = None
    schema: dict[str, Any] | bool | None = None
    """llama.cpp's and Together's place of a schema."""
    value: dict[str, Any] | str | bool | None = None
    """Hugging Face's place of a schema, or of a regular expression."""
    pattern: str | None = None
    """Together's place of a regular expression."""
    grammar: str | None = None
    """Fireworks' place of a grammar."""
    name: str | None = None
    strict: bool | None = None
    description: str | None = None


class StructureBody(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that hold an answer to a form, in every protocol: ignored, they would give free text."""

    grammar: str | None = None
    """Lark or GBNF."""
    regex: str | None = None
    response_format: ResponseFormat | None = None
    json_schema: dict[str, Any] | str | bool | None = None
    """llama.cpp's and SGLang's name of a schema; the fields below are SGLang's and vLLM's."""
    ebnf: str | None = None
    structural_tag: Any = None
    guided_json: Any = None
    guided_json_object: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    structured_outputs: dict[str, Any] | None = None


def requested_grammar(body: StructureBody, limits: ServerLimits) -> Grammar | None:
    """The one structure that a request asks for; None: it asks for free text. Raises ApiError."""
    grammars = list(_grammars(body, limits))
    if len(grammars) > 1:
        given = " and ".join(f"{grammar.field!r}" for grammar in grammars)
        raise bad_request(
            f"{given} cannot be used together: each gives the answer a form of its own. Send one of them.",
            param=grammars[-1].field,
        )
    if grammars and len(grammars[0].source.encode()) > _MAX_BYTES:
        raise bad_request(
            f"The schema or grammar is larger than {_MAX_BYTES} bytes.", param=grammars[0].field
        )
    return grammars[0] if grammars else None


def structure_of(body: StructureBody) -> dict[str, Any]:
    """The fields of a request's structure, for its translation to a chat."""
    return {name: getattr(body, name) for name in StructureBody.__struct_fields__}


def with_format_field(request: GenerateRequest, field: str) -> GenerateRequest:
    """A request whose answer's format is in another field, by the client's protocol."""
    if request.grammar is None or request.grammar.field != "response_format":
        return request
    grammar = msgspec.structs.replace(request.grammar, field=field)
    return msgspec.structs.replace(request, grammar=grammar)


def _grammars(body: StructureBody, limits: ServerLimits) -> Iterator[Grammar]:
    if body.response_format is not None:
        yield from _format(body.response_format, limits)
    if body.grammar:
        yield Grammar("lark", body.grammar, "grammar")
    if body.ebnf:
        yield Grammar("lark", body.ebnf, "ebnf")
    if body.regex:
        yield Grammar("regex", body.regex, "regex")
    if body.json_schema is not None:
        yield _schema(body.json_schema, "json_schema", limits)
    guided = {
        "json": body.guided_json,
        "regex": body.guided_regex,
        "choice": body.guided_choice,
        "grammar": body.guided_grammar,
        "json_object": body.guided_json_object,
    }
    for kind, value in guided.items():
        if value is not None:
            yield from _guided(kind, value, f"guided_{kind}", limits)
    for kind, value in (body.structured_outputs or {}).items():
        if value is not None:
            yield from _guided(kind, value, f"structured_outputs.{kind}", limits)
    if body.structural_tag is not None:
        raise _unsupported("structural_tag")


def _guided(kind: str, value: Any, field: str, limits: ServerLimits) -> Iterator[Grammar]:  # noqa: ANN401 - JSON
    """A structure by vLLM's name of its kind."""
    match kind, value:
        case ["json", _]:
            yield _schema(value, field, limits)
        case ["json_object", bool()]:
            yield from [Grammar("json_object", field=field)] if value else []
        case ["regex", str()]:
            yield Grammar("regex", value, field)
        case ["grammar", str()]:
            yield Grammar("lark", value, field)
        case ["choice", list()] if value and all(isinstance(one, str) for one in value):
            choices = " | ".join(json.dumps(one, ensure_ascii=False) for one in value)
            yield Grammar("lark", f"start: {choices}", field)
        case ["json_object" | "regex" | "grammar" | "choice", _]:
            wanted = {"json_object": "true or false", "choice": "a list of strings"}
            raise bad_request(
                f"The field {field!r} must be {wanted.get(kind, 'a string')}.",
                param=field,
                code="invalid_type",
            )
        case _ if kind not in _STRUCTURED_OPTIONS:
            raise _unsupported(field)


def _unsupported(field: str) -> ApiError:
    return bad_request(
        f"The field {field[:100]!r} is not supported; use 'response_format', 'grammar' or 'regex'.",
        param=field[:100],
    )


def _schema(value: Any, field: str, limits: ServerLimits) -> Grammar:  # noqa: ANN401 - JSON
    """A schema, which some clients send as JSON text. OpenAI's wrapper with a name is taken too."""
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError) as error:
            raise bad_request(
                f"The field {field!r} is not valid JSON: {error}.", param=field, code="invalid_json"
            ) from error
    if isinstance(value, dict) and isinstance(value.get("schema"), dict) and "type" not in value:
        value = value["schema"]
    if not isinstance(value, dict | bool):
        raise bad_request(
            f"The field {field!r} must be a JSON schema.", param=field, code="invalid_type"
        )
    check_json_size(value, limits, field)
    return Grammar("json_schema", msgspec.json.encode(value).decode(), field)


def _format(format_: ResponseFormat, limits: ServerLimits) -> Iterator[Grammar]:
    field = "response_format"
    match format_.type:
        case "text":
            return
        case "json_object" | "json" | "json_schema":
            yield _schema_of(format_, limits)
        case "regex":
            pattern = _text_of((format_.value, format_.pattern), f"{field}.value")
            yield Grammar("regex", pattern, field)
        case "grammar":
            grammar = _text_of((format_.value, format_.grammar), f"{field}.value")
            yield Grammar("lark", grammar, field)
        case other:
            raise bad_request(
                f"The response format {other[:50]!r} is unknown; the choices are text, json_object, "
                "json_schema, regex and grammar.",
                param=f"{field}.type",
            )


def _schema_of(format_: ResponseFormat, limits: ServerLimits) -> Grammar:
    """The schema of a response format, in any of its places. Raises ApiError."""
    wrapped = format_.json_schema
    strict = format_.strict or (wrapped is not None and wrapped.strict)
    schemas = (wrapped.schema if wrapped is not None else None, format_.schema, format_.value)
    schema = next((schema for schema in schemas if schema is not None), None)
    if schema is not None:
        grammar = _schema(schema, "response_format", limits)
        return msgspec.structs.replace(grammar, strict=bool(strict))
    if format_.type == "json_schema":
        raise bad_request(
            "The field 'response_format.json_schema.schema' is required.",
            param="response_format.json_schema.schema",
            code="missing_required_parameter",
        )
    return Grammar("json_object", field="response_format")


def _text_of(places: tuple[object, ...], field: str) -> str:
    """The first text of these places. Raises ApiError."""
    text = next((place for place in places if place), None)
    if not isinstance(text, str):
        raise bad_request(
            f"The field {field!r} must be a string.", param=field, code="invalid_type"
        )
    return text
