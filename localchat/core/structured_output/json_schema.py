"""Objects of a schema that names their properties have no others, unless it says so.

JSON Schema allows any further key where `additionalProperties` is absent. Few who write a schema mean that,
and a small model, once allowed, invents keys until its tokens run out. So absent counts as false, as
llama.cpp and xgrammar have it; `"additionalProperties": true` opens an object again. What is closed here is a
subset: an answer also keeps to the schema as it was written (but for `oneOf` whose alternatives overlap,
which nothing here can tell apart anyway).

What asks for nothing is left out, because llguidance refuses the words: formats beside those that it knows
(the standard lets them be; pydantic and zod write `password`, `cuid` and many more), and `propertyNames` that
any key satisfies, which zod writes for every record.
"""

from collections.abc import Iterator, Mapping
from typing import Any

_SAYS_ITSELF = (
    "additionalProperties",
    "unevaluatedProperties",
    "patternProperties",
    "propertyNames",
    "minProperties",
)
_COMBINED = ("$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "if", "dependentSchemas", "not")
"""Beside these, properties are a part of what an object may have."""
_DEFINITIONS = ("$defs", "definitions")
_MAPS = ("properties", "patternProperties", *_DEFINITIONS)
_ALTERNATIVES = ("anyOf", "oneOf")
_WHOLES = ("items", "prefixItems", "additionalProperties", "contains", "unevaluatedItems")
_PARTS = ("allOf", "not", "if", "then", "else", "dependentSchemas")
_FORMATS = frozenset(
    ("date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)
"""Those that llguidance holds a text to."""
_ANY_NAME: tuple[Any, ...] = (True, {}, {"type": "string"})

Schema = Mapping[str, Any]


def closed(schema: Schema) -> dict[str, Any]:
    """The schema with its objects closed. What `allOf`, `if` and their like put together stays open, because
    each part knows only its own keys; so do definitions, where such a part refers to one."""
    parts_refer = any("$ref" in part for part in _parts(schema, inside=False))
    return _closed(schema, whole=True, definitions=not parts_refer)


def _closed(schema: Schema, *, whole: bool, definitions: bool) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for key, value in schema.items():
        if _asks_nothing(key, value):
            continue
        if key in _MAPS and isinstance(value, Mapping):
            fit = definitions if key in _DEFINITIONS else True
            made[key] = {name: _inner(one, fit, definitions) for name, one in value.items()}
        elif key in _WHOLES:
            made[key] = _inner(value, True, definitions)
        elif key in _ALTERNATIVES:
            made[key] = _inner(value, whole and "properties" not in schema, definitions)
        elif key in _PARTS:
            made[key] = _inner(value, False, definitions)
        else:
            made[key] = value
    if whole and _is_closable(schema):
        made["additionalProperties"] = False
    return made


def _asks_nothing(key: str, value: Any) -> bool:  # noqa: ANN401 - JSON
    if key == "format":
        return isinstance(value, str) and value not in _FORMATS
    return key == "propertyNames" and value in _ANY_NAME


def _inner(value: Any, whole: bool, definitions: bool) -> Any:  # noqa: ANN401 - JSON
    if isinstance(value, list):
        return [_inner(one, whole, definitions) for one in value]
    if isinstance(value, Mapping):
        return _closed(value, whole=whole, definitions=definitions)
    return value


def _is_closable(schema: Schema) -> bool:
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, Mapping) or not properties:
        return False
    if any(key in schema for key in (*_SAYS_ITSELF, *_COMBINED)):
        return False
    # A key that must be there and is not described would have no place.
    named = required if isinstance(required, list) else []
    return all(isinstance(key, str) and key in properties for key in named)


def _parts(value: Any, *, inside: bool) -> Iterator[Schema]:  # noqa: ANN401 - JSON
    """Every schema that is a part of another, or stands within one."""
    if isinstance(value, list):
        for one in value:
            yield from _parts(one, inside=inside)
    elif isinstance(value, Mapping):
        if inside:
            yield value
        mixed = "properties" in value
        for key, one in value.items():
            if key in _MAPS and isinstance(one, Mapping):
                for each in one.values():
                    yield from _parts(each, inside=False)
            elif key in _PARTS or (key in _ALTERNATIVES and (mixed or inside)):
                yield from _parts(one, inside=True)
            elif key in (*_WHOLES, *_ALTERNATIVES):
                yield from _parts(one, inside=False)
        if mixed and "$ref" in value:
            yield value
