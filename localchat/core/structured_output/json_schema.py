"""JSON schemas with closed objects: an object that names its properties, or their pattern, has no others.

JSON Schema allows further keys if `additionalProperties` is absent. Few authors of a schema mean that, and a
small model invents keys until its tokens run out. So absent counts as false, as in llama.cpp and xgrammar, and
`"additionalProperties": true` opens an object again. The closed schema allows a subset, so an answer also
satisfies the original schema. The exception is a `oneOf` with overlapping alternatives, which cannot be told
apart anyway.

Keywords without effect are removed, so that they are not reported as unenforced. These are formats that
llguidance does not know, which the standard allows to be ignored (pydantic and zod write `password`, `cuid`
and many more), and `propertyNames` that every key satisfies, which zod writes for every record.
"""

from collections.abc import Iterator, Mapping
from typing import Any

_REFERENCES = ("$ref", "$dynamicRef")
_COMBINATORS = (*_REFERENCES, "allOf", "anyOf", "oneOf", "if", "dependentSchemas", "not")
"""Beside these keywords, an object may have more properties than it lists."""
_KEYS = ("additionalProperties", "unevaluatedProperties", "propertyNames")
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
"""Length limits of unbounded formats, in which a small model may write digits forever."""
_FRACTION = r"^[^.]*(\.[0-9]{1,6})?([Zz]|[+-][0-9:]+)?$"
"""Time with at most six digits in the fraction of a second."""
_ANY_NAME: tuple[Any, ...] = (True, {}, {"type": "string"})

Schema = Mapping[str, Any]


def close_objects(schema: Schema) -> dict[str, Any]:
    """Close the objects of a schema.

    The parts of `allOf`, `if` and similar keywords stay open, because each part knows only its own keys. So do
    definitions if such a part refers to one, and objects whose parts have keys of their own.
    """
    parts_refer = any("$ref" in part for part in _parts(schema, inside=False))
    return _close(schema, complete=True, definitions=not parts_refer)


def _close(schema: Schema, *, complete: bool, definitions: bool) -> dict[str, Any]:
    """Return the schema with its objects closed. `complete`: it lists all keys of its object.

    `definitions`: the same holds for the schemas of its definitions.
    """
    result: dict[str, Any] = {}
    ends = schema.get("unevaluatedProperties") is False and not _mentions(schema, _COMBINATORS)
    for key, value in schema.items():
        if _is_vacuous(key, value) or (ends and key == "unevaluatedProperties"):
            continue
        if key in _MAPS and isinstance(value, Mapping):
            are_complete = definitions or key not in _DEFINITIONS
            result[key] = {
                name: _inner(inner, complete=are_complete, definitions=definitions)
                for name, inner in value.items()
            }
        elif key in _COMPLETE_SCHEMAS:
            result[key] = _inner(value, complete=True, definitions=definitions)
        elif key in _ALTERNATIVES:
            lists_all = complete and "properties" not in schema
            result[key] = _inner(value, complete=lists_all, definitions=definitions)
        elif key in _PARTS:
            result[key] = _inner(value, complete=False, definitions=definitions)
        else:
            result[key] = value
    result |= _format_bounds(schema)
    if ends:
        # No other keyword adds keys, so both keywords mean the same.
        result.setdefault("additionalProperties", False)
    elif complete and _is_closable(schema):
        result["additionalProperties"] = False
    return result


def _format_bounds(schema: Schema) -> dict[str, Any]:
    """Return keywords that bound the length of a string in an unbounded format."""
    kind = schema.get("format")
    longest = _LONGEST.get(kind) if isinstance(kind, str) else None
    max_length = schema.get("maxLength", longest)
    min_length = schema.get("minLength", 0)
    if longest is None or not isinstance(max_length, int) or not isinstance(min_length, int):
        return {}
    if min_length > longest:
        return {}
    bounds: dict[str, Any] = {"maxLength": min(max_length, longest)}
    if kind in ("time", "date-time") and "pattern" not in schema:
        bounds["pattern"] = _FRACTION
    return bounds


def _is_vacuous(key: str, value: Any) -> bool:  # noqa: ANN401 - JSON
    if key == "format":
        return isinstance(value, str) and value not in _FORMATS
    return key == "propertyNames" and value in _ANY_NAME


def _inner(value: Any, *, complete: bool, definitions: bool) -> Any:  # noqa: ANN401 - JSON
    """Close a schema, or each schema of a list."""
    if isinstance(value, list):
        return [_inner(item, complete=complete, definitions=definitions) for item in value]
    if isinstance(value, Mapping):
        return _close(value, complete=complete, definitions=definitions)
    return value


def _is_closable(schema: Schema) -> bool:
    properties = schema.get("properties", {})
    required = schema.get("required")
    patterns = schema.get("patternProperties")
    if not isinstance(properties, Mapping) or not (properties or patterns):
        return False
    if _mentions(schema, (*_KEYS, *_REFERENCES)):
        return False
    min_properties = schema.get("minProperties", 0)
    if not isinstance(min_properties, int) or min_properties > len(properties):
        return False
    # A required key that is not described would be impossible in a closed object.
    named = required if isinstance(required, list) else []
    return all(isinstance(key, str) and key in properties for key in named) and not any(
        _adds_keys(part, properties) for part in _direct_parts(schema)
    )


def _direct_parts(schema: Schema) -> Iterator[Schema]:
    """Yield the schemas that describe the same value as this one."""
    for key in (*_PARTS, *_ALTERNATIVES):
        parts = schema.get(key)
        if isinstance(parts, Mapping):
            if key == "dependentSchemas":
                parts = list(parts.values())
            else:
                parts = [parts]
        if isinstance(parts, list):
            yield from (part for part in parts if isinstance(part, Mapping))


def _adds_keys(part: Schema, properties: Mapping[str, Any]) -> bool:
    """Return whether a part of an object's schema may allow keys besides its properties."""
    if _mentions(part, (*_KEYS, *_REFERENCES, "patternProperties")):
        return True
    named = [*strings(part.get("properties")), *strings(part.get("required"))]
    return any(key not in properties for key in named) or any(
        _adds_keys(inner, properties) for inner in _direct_parts(part)
    )


def strings(value: Any) -> list[str]:  # noqa: ANN401 - JSON
    """Return the names in a list, or the keys of an object."""
    if isinstance(value, dict | list):
        return [item for item in value if isinstance(item, str)]
    return []


def _mentions(schema: Schema, keywords: tuple[str, ...]) -> bool:
    return any(key in schema for key in keywords)


def _parts(value: Any, *, inside: bool) -> Iterator[Schema]:  # noqa: ANN401 - JSON
    """Yield every schema that is a part of another, or inside one."""
    if isinstance(value, list):
        for inner in value:
            yield from _parts(inner, inside=inside)
    elif isinstance(value, Mapping):
        if inside:
            yield value
        mixed = "properties" in value
        for key, inner in value.items():
            if key in _MAPS and isinstance(inner, Mapping):
                for schema in inner.values():
                    yield from _parts(schema, inside=False)
            elif key in _PARTS or (key in _ALTERNATIVES and (mixed or inside)):
                yield from _parts(inner, inside=True)
            elif key in (*_COMPLETE_SCHEMAS, *_ALTERNATIVES):
                yield from _parts(inner, inside=False)
        if mixed and "$ref" in value:
            yield value
