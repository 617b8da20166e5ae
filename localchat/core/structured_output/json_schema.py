"""JSON schemas with closed objects: an object that names its properties, or their pattern, has no others.

JSON Schema allows any further key where `additionalProperties` is absent. Few authors of a schema mean that,
and a small model, once allowed, invents keys until its tokens run out. So absent counts as false, as in
llama.cpp and xgrammar; `"additionalProperties": true` opens an object again. The closed schema allows a
subset: an answer also satisfies the schema as it was written (but for `oneOf` whose alternatives overlap,
which nothing here can tell apart anyway).

Keywords that demand nothing are removed, so that nobody is told that they do not bind: formats besides those
that llguidance knows (the standard lets them be ignored; pydantic and zod write `password`, `cuid` and many
more), and `propertyNames` that any key satisfies, which zod writes for every record.
"""

from collections.abc import Iterator, Mapping
from typing import Any

_REFERENCES = ("$ref", "$dynamicRef")
_COMBINATORS = (*_REFERENCES, "allOf", "anyOf", "oneOf", "if", "dependentSchemas", "not")
"""Next to these, properties may be only a part of what an object may have."""
_KEYS = ("additionalProperties", "unevaluatedProperties", "propertyNames")
_EXPLICIT = (*_KEYS, "minProperties")
_DEFINITIONS = ("$defs", "definitions")
_MAPS = ("properties", "patternProperties", *_DEFINITIONS)
_ALTERNATIVES = ("anyOf", "oneOf")
_COMPLETE_SCHEMAS = ("items", "prefixItems", "additionalProperties", "contains", "unevaluatedItems")
_PARTS = ("allOf", "not", "if", "then", "else", "dependentSchemas")
_FORMATS = frozenset(
    ("date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)
"""Formats that llguidance enforces."""
_LONGEST = {
    "time": len("00:00:00.123456+00:00"),
    "date-time": len("2000-01-01T00:00:00.123456+00:00"),
    "duration": 64,
    "email": 254,
    "hostname": 253,
    "uri": 2048,
}
"""Most characters of the formats that have no end of their own: a small model may write digits forever."""
_FRACTION = r"^[^.]*(\.[0-9]{1,6})?([Zz]|[+-][0-9:]+)?$"
"""A time whose fraction of a second has at most six digits."""
_ANY_NAME: tuple[Any, ...] = (True, {}, {"type": "string"})

Schema = Mapping[str, Any]


def close_objects(schema: Schema) -> dict[str, Any]:
    """Close the objects of a schema.

    The parts of `allOf`, `if` and their like stay open, because each part knows only its own keys; so do
    definitions, where such a part refers to one, and objects whose parts have keys of their own.
    """
    parts_refer = any("$ref" in part for part in _parts(schema, inside=False))
    return _close(schema, complete=True, definitions=not parts_refer)


def _close(schema: Schema, *, complete: bool, definitions: bool) -> dict[str, Any]:
    result: dict[str, Any] = {}
    ends = schema.get("unevaluatedProperties") is False and not _mentions(schema, _COMBINATORS)
    for key, value in schema.items():
        if _is_vacuous(key, value) or (ends and key == "unevaluatedProperties"):
            continue
        if key in _MAPS and isinstance(value, Mapping):
            fit = definitions if key in _DEFINITIONS else True
            result[key] = {name: _inner(one, fit, definitions) for name, one in value.items()}
        elif key in _COMPLETE_SCHEMAS:
            result[key] = _inner(value, True, definitions)
        elif key in _ALTERNATIVES:
            result[key] = _inner(value, complete and "properties" not in schema, definitions)
        elif key in _PARTS:
            result[key] = _inner(value, False, definitions)
        else:
            result[key] = value
    result |= _format_bounds(schema)
    if ends:  # next to nothing that adds keys, it is the same
        result.setdefault("additionalProperties", False)
    elif complete and _is_closable(schema):
        result["additionalProperties"] = False
    return result


def _format_bounds(schema: Schema) -> dict[str, Any]:
    """Return keywords that bound the length of a string in an unbounded format."""
    kind = schema.get("format")
    longest = _LONGEST.get(kind) if isinstance(kind, str) else None
    given = schema.get("maxLength", longest)
    shortest = schema.get("minLength", 0)
    if longest is None or not isinstance(given, int) or not isinstance(shortest, int):
        return {}
    if shortest > longest:
        return {}
    bounds: dict[str, Any] = {"maxLength": min(given, longest)}
    if kind in ("time", "date-time") and "pattern" not in schema:
        bounds["pattern"] = _FRACTION
    return bounds


def _is_vacuous(key: str, value: Any) -> bool:  # noqa: ANN401 - JSON
    if key == "format":
        return isinstance(value, str) and value not in _FORMATS
    return key == "propertyNames" and value in _ANY_NAME


def _inner(value: Any, complete: bool, definitions: bool) -> Any:  # noqa: ANN401 - JSON
    if isinstance(value, list):
        return [_inner(one, complete, definitions) for one in value]
    if isinstance(value, Mapping):
        return _close(value, complete=complete, definitions=definitions)
    return value


def _is_closable(schema: Schema) -> bool:
    properties = schema.get("properties", {})
    required = schema.get("required")
    patterns = schema.get("patternProperties")
    if not isinstance(properties, Mapping) or not (properties or patterns):
        return False
    if _mentions(schema, (*_EXPLICIT, *_REFERENCES)):
        return False
    # A required key that is not described would have no place.
    named = required if isinstance(required, list) else []
    return all(isinstance(key, str) and key in properties for key in named) and not any(
        _adds_keys(part, properties) for part in _direct_parts(schema)
    )


def _direct_parts(schema: Schema) -> Iterator[Schema]:
    """Schemas that describe the same value as this one."""
    for key in (*_PARTS, *_ALTERNATIVES):
        given = schema.get(key)
        if isinstance(given, Mapping):
            given = list(given.values()) if key == "dependentSchemas" else [given]
        if isinstance(given, list):
            yield from (one for one in given if isinstance(one, Mapping))


def _adds_keys(part: Schema, known: Mapping[str, Any]) -> bool:
    """Whether a part of an object's schema may allow keys that are not among the known ones."""
    if _mentions(part, (*_KEYS, *_REFERENCES, "patternProperties")):
        return True
    named = [*_strings(part.get("properties")), *_strings(part.get("required"))]
    return any(key not in known for key in named) or any(
        _adds_keys(inner, known) for inner in _direct_parts(part)
    )


def _strings(value: Any) -> list[str]:  # noqa: ANN401 - JSON
    if isinstance(value, dict | list):
        return [one for one in value if isinstance(one, str)]
    return []


def _mentions(schema: Schema, keywords: tuple[str, ...]) -> bool:
    return any(key in schema for key in keywords)


def _parts(value: Any, *, inside: bool) -> Iterator[Schema]:  # noqa: ANN401 - JSON
    """Every schema that is a part of another, or lies inside one."""
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
            elif key in (*_COMPLETE_SCHEMAS, *_ALTERNATIVES):
                yield from _parts(one, inside=False)
        if mixed and "$ref" in value:
            yield value
