"""Sampling and structure of an answer: the fields that every protocol accepts.

A structure is a schema, grammar, regular expression or choice. Every server has its own fields for this. All
fields of OpenAI, llama.cpp, vLLM and SGLang are supported: a client whose field was ignored would get free text
instead of the structure it expects.
"""

import json
from collections.abc import Iterator
from typing import Any, Final, TypeAlias

import msgspec

from localchat.config.sampling import SamplingNumbers
from localchat.engine.request import Grammar
from localchat.server.config import ServerLimits
from localchat.server.errors import ApiError, bad_request, missing_field
from localchat.server.request_body import check_json_size

_MAX_BYTES: Final = 256 << 10
_STRUCTURED_OPTIONS: Final = (
    "disable_any_whitespace",
    "disable_additional_properties",
    "disable_fallback",
    "whitespace_pattern",
    "backend",
)
"""Fields of vLLM's `structured_outputs` that have no effect here."""


class JsonSchemaFormat(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A schema. Unknown fields are rejected here and below, because they might contain the schema."""

    schema: dict[str, Any] | bool | None = None
    name: str | None = None
    strict: bool | None = None
    description: str | None = None


class TypedFormat(JsonSchemaFormat, frozen=True, kw_only=True):
    """Structure of an answer, as the Responses API and the Messages API have it."""

    type: str


class ResponseFormat(TypedFormat, frozen=True, kw_only=True):
    """Structure of an answer. llama.cpp's and Together's clients send the schema without `json_schema`."""

    json_schema: JsonSchemaFormat | None = None
    value: dict[str, Any] | str | bool | None = None
    """Schema or regular expression, for Hugging Face's clients."""

    @classmethod
    def of(cls, format_: TypedFormat) -> "ResponseFormat":
        """Return the structure that another protocol's field describes."""
        return cls(**msgspec.structs.asdict(format_))


class SamplingFields(SamplingNumbers, frozen=True, kw_only=True):
    """Sampling of every protocol, with the second names of `SamplingNumber.alias`."""

    typ_p: float | None = None
    repeat_penalty: float | None = None
    nsigma: float | None = None
    dry_sequence_breakers: list[str] | str | None = None
    """A list, or its JSON as KoboldCpp's clients send it."""


LogitBias: TypeAlias = dict[str, float | bool] | list[tuple[int | str, float | bool]]
"""Biases by token id or text, also as llama.cpp's list of pairs. False forbids the token."""


class TokenFields(SamplingFields, frozen=True, kw_only=True):
    """Sampling of every protocol, and the tokens that end an answer or are forbidden."""

    logit_bias: LogitBias | None = None
    stop_token_ids: list[int] | None = None
    """Token ids that end the answer. This and the next three fields are vLLM's."""
    include_stop_str_in_output: bool | None = None
    min_tokens: int | None = None
    bad_words: str | list[str] | None = None
    ignore_eos: bool | None = None


class AnswerFields(TokenFields, frozen=True, kw_only=True):
    """Fields of every protocol that shape an answer: its sampling and its structure."""

    grammar: str | None = None
    """Lark or GBNF."""
    regex: str | None = None
    response_format: ResponseFormat | None = None
    json_schema: dict[str, Any] | str | bool | None = None
    """Schema, for llama.cpp's and SGLang's clients."""
    structured_outputs: dict[str, Any] | None = None
    """A structure in vLLM's form, by its kind."""


def answer_fields(body: AnswerFields) -> dict[str, Any]:
    """Return the shared fields of a body, to build GenerationFields from."""
    return {name: getattr(body, name) for name in AnswerFields.__struct_fields__}


def requested_grammar(
    body: AnswerFields, limits: ServerLimits, format_field: str = "response_format"
) -> Grammar | None:
    """Return the structure that a request demands, None for free text. Raises ApiError.

    format_field: the protocol's name of `response_format`, for errors of the engine.
    """
    grammars = list(_grammars(body, limits))
    if not grammars:
        return None
    if len(grammars) > 1:
        names = " and ".join(f"{grammar.field!r}" for grammar in grammars)
        raise bad_request(
            f"{names} cannot be used together: each gives the answer a form of its own. Send one of them.",
            param=grammars[-1].field,
        )
    (grammar,) = grammars
    if len(grammar.source.encode()) > _MAX_BYTES:
        raise bad_request(
            f"The schema or grammar is larger than {_MAX_BYTES} bytes.", param=grammar.field
        )
    if grammar.field == "response_format":
        return msgspec.structs.replace(grammar, field=format_field)
    return grammar


def _grammars(body: AnswerFields, limits: ServerLimits) -> Iterator[Grammar]:
    if body.response_format is not None:
        yield from _response_format_grammars(body.response_format, limits)
    if body.grammar:
        yield Grammar("lark", body.grammar, "grammar")
    if body.regex:
        yield Grammar("regex", body.regex, "regex")
    if body.json_schema is not None:
        yield _schema_grammar(body.json_schema, "json_schema", limits)
    for kind, value in (body.structured_outputs or {}).items():
        if value is not None:
            yield from _structured_outputs(kind, value, limits)


def _structured_outputs(
    kind: str,
    value: Any,  # noqa: ANN401 - JSON
    limits: ServerLimits,
) -> Iterator[Grammar]:
    """Yield the grammar of a structure, by vLLM's name of its kind."""
    field = f"structured_outputs.{kind}"
    match kind, value:
        case ["json", _]:
            yield _schema_grammar(value, field, limits)
        case ["json_object", bool()]:
            if value:
                yield Grammar("json_object", field=field)
        case ["regex", str()]:
            yield Grammar("regex", value, field)
        case ["grammar", str()]:
            yield Grammar("lark", value, field)
        case ["choice", list()] if value and all(isinstance(text, str) for text in value):
            choices = " | ".join(json.dumps(text, ensure_ascii=False) for text in value)
            yield Grammar("lark", f"start: {choices}", field)
        case ["json_object" | "regex" | "grammar" | "choice", _]:
            types = {"json_object": "true or false", "choice": "a list of strings"}
            raise _wrong_type(field, types.get(kind, "a string"))
        case _ if kind not in _STRUCTURED_OPTIONS:
            raise bad_request(
                f"The field {field[:100]!r} is not supported; use 'response_format', 'grammar' or 'regex'.",
                param=field[:100],
            )


def _wrong_type(field: str, expected: str) -> ApiError:
    return bad_request(f"The field {field!r} must be {expected}.", param=field, code="invalid_type")


def _schema_grammar(value: Any, field: str, limits: ServerLimits) -> Grammar:  # noqa: ANN401 - JSON
    """Return the grammar of a schema: an object, JSON text, or OpenAI's wrapper."""
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
        raise _wrong_type(field, "a JSON schema")
    check_json_size(value, limits, field)
    return Grammar("json_schema", msgspec.json.encode(value).decode(), field)


def _response_format_grammars(format_: ResponseFormat, limits: ServerLimits) -> Iterator[Grammar]:
    field = "response_format"
    match format_.type:
        case "text":
            return
        case "json_object" | "json" | "json_schema":
            yield _json_format_grammar(format_, limits)
        case "regex":
            pattern = _text_of(format_.value, f"{field}.value")
            yield Grammar("regex", pattern, field)
        case "grammar":
            grammar = _text_of(format_.value, f"{field}.value")
            yield Grammar("lark", grammar, field)
        case other:
            raise bad_request(
                f"The response format {other[:50]!r} is unknown; the choices are text, json_object, "
                "json_schema, regex and grammar.",
                param=f"{field}.type",
            )


def _json_format_grammar(format_: ResponseFormat, limits: ServerLimits) -> Grammar:
    """Return the grammar of a JSON format, whichever field contains its schema. Raises ApiError."""
    wrapper = format_.json_schema or JsonSchemaFormat()
    for schema in (wrapper.schema, format_.schema, format_.value):
        if schema is not None:
            grammar = _schema_grammar(schema, "response_format", limits)
            return msgspec.structs.replace(grammar, strict=bool(format_.strict or wrapper.strict))
    if format_.type == "json_schema":
        raise missing_field("response_format.json_schema.schema")
    return Grammar("json_object", field="response_format")


def _text_of(value: object, field: str) -> str:
    if not value or not isinstance(value, str):
        raise _wrong_type(field, "a string")
    return value
