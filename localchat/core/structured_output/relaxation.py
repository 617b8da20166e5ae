"""Relaxed schemas: what a grammar cannot hold is left out, and named, so that the rest still binds.

llguidance leaves out keywords that it does not implement by itself (`lenient`) and names them as warnings.
Here goes what it would refuse: patterns that need look-around or references, overlapping
`patternProperties`, dialects that it does not know. Some of it is only written in another way and is rewritten
instead: types in capitals (Gemini's), `propertyNames` with choices or a pattern, and tagged
unions, whose alternatives must contain the tag (pydantic leaves it optional where it has a default, and
refuses an answer without it).
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

from localchat.core.structured_output.patterns import is_part, pattern_fault, plain_pattern
from localchat.errors import UsageError

LENIENT: Final = {"lenient": True, "coerce_one_of": True}
"""Options of llguidance by which it relaxes a schema."""
_TYPES: Final = frozenset(("string", "number", "integer", "boolean", "object", "array", "null"))
_MAPS: Final = ("properties", "patternProperties", "$defs", "definitions")
_ALTERNATIVES: Final = ("oneOf", "anyOf")
_DATA: Final = ("const", "enum", "default", "examples", "example", "x-guidance")
_NO_KEYWORDS: Final = ("discriminator", "nullable", "xml", "externalDocs")
"""OpenAPI's own."""
_UNIMPLEMENTED: Final = re.compile(r"Unimplemented keys: (\[.*\])", re.DOTALL)
_PROPERTY_COUNTS: Final = ("minProperties", "maxProperties")
_DIALECTS: Final = re.compile(r"https?://json-schema\.org/")

Schema = Mapping[str, Any]


class Relaxed(NamedTuple):
    """A schema that llguidance accepts, and the keywords that were left out of it."""

    schema: dict[str, Any]
    dropped: tuple[str, ...]


def relax(schema: Schema, field: str = "") -> Relaxed:
    """Leave out of a schema what llguidance would refuse.

    field: where the schema stands in the client's request. Raises UsageError for a pattern that is not a
    regular expression.
    """
    relaxation = _Relaxation(schema, field)
    relaxed = relaxation.schema(schema)
    return Relaxed(relaxed, tuple(dict.fromkeys(relaxation.dropped)))


def dropped_keywords(warnings: Sequence[str]) -> tuple[str, ...]:
    """The keywords that llguidance left out, by its warnings."""
    dropped: dict[str, None] = {}
    for warning in warnings:
        if found := _UNIMPLEMENTED.match(warning):
            dropped.update(dict.fromkeys(json.loads(found[1])))
        elif warning.startswith("min/maxProperties"):
            dropped.update(dict.fromkeys(_PROPERTY_COUNTS))
        else:
            dropped[warning.partition(" ")[0]] = None
    return tuple(dropped)


@lru_cache(1024)
def _is_possible(schema: str) -> bool:
    """Whether llguidance can make a grammar of a schema."""
    from llguidance import LLMatcher

    failed, _ = LLMatcher.validate_grammar_with_warnings(
        json.dumps({"grammars": [{"name": "part", "json_schema": json.loads(schema)}]})
    )
    return not failed


class _Relaxation:
    """One schema on its way; `dropped` collects keywords."""

    def __init__(self, whole: Schema, field: str) -> None:
        self._whole = whole
        self._field = field
        self._tag_of = dict(self._tagged(whole))
        self.dropped: list[str] = []

    def schema(self, schema: Schema) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in self._as_union(self._with_names(schema)).items():
            if key in _NO_KEYWORDS or (key.startswith("x-") and key != "x-guidance"):
                continue  # next to a circular $ref, llguidance refuses keys that it does not know
            if key in _DATA:
                result[key] = value
            elif key in _MAPS and isinstance(value, Mapping):
                result[key] = {
                    name: _with_required(self._inner(inner), self._tag_of.get(f"#/{key}/{name}"))
                    for name, inner in value.items()
                }
            elif key == "type":
                result[key] = self._type(value)
            elif key == "pattern":
                pattern = self._pattern(value)
                result |= {} if pattern is None else {key: pattern}
            elif key == "$schema" and not (isinstance(value, str) and _DIALECTS.match(value)):
                continue
            else:
                result[key] = self._inner(value)
        self._relax_pattern_properties(result)
        self._bound_unique_items(result)
        if tag := self._tag(schema):
            for key in _ALTERNATIVES:
                if isinstance(alternatives := result.get(key), list):
                    result[key] = [_with_required(one, tag) for one in alternatives]
        return result

    def _pattern(self, pattern: Any) -> str | None:  # noqa: ANN401 - JSON
        """Return the pattern as llguidance reads it, or None if it cannot. Raises UsageError."""
        if isinstance(pattern, str) and not is_part(pattern):
            for spelling in (pattern, plain_pattern(pattern)):
                if _is_possible(json.dumps({"pattern": spelling})):
                    return spelling
        self._check_pattern(pattern)
        self.dropped.append("pattern")
        return None

    def _check_pattern(self, pattern: Any) -> None:  # noqa: ANN401 - JSON
        """Raise UsageError for a pattern that is not a regular expression."""
        fault = pattern_fault(pattern) if isinstance(pattern, str) else "it is not a string"
        if fault:
            details = {"field": self._field} if self._field else {}
            shown = pattern if isinstance(pattern, str) else json.dumps(pattern)
            raise UsageError(
                f"the pattern {shown[:100]!r} of the JSON schema is not a regular expression: {fault}",
                **details,
            )

    def _tagged(self, value: Any) -> Iterator[tuple[str, str]]:  # noqa: ANN401 - JSON
        """Definitions that are alternatives of a tagged union, by place, with their tag."""
        if isinstance(value, list):
            for one in value:
                yield from self._tagged(one)
        elif isinstance(value, Mapping):
            if tag := self._tag(value):
                for one in _alternatives(value):
                    if isinstance(place := one.get("$ref"), str):
                        yield place, tag
            for one in value.values():
                yield from self._tagged(one)

    def _tag(self, schema: Schema) -> str:
        """The property that tells the alternatives of a union apart; empty: there is none.

        The discriminator, or a property of which each alternative has a constant of its own: some clients
        remove the discriminator.
        """
        if name := _discriminator(schema):
            return name
        objects = [self._resolved(one) for one in _alternatives(schema)]
        properties = [
            one["properties"] for one in objects if isinstance(one.get("properties"), dict)
        ]
        if len(properties) < 2:
            return ""
        for name in properties[0]:
            found = [one.get(name) for one in properties]
            tags = [
                json.dumps(one["const"])
                for one in found
                if isinstance(one, dict) and "const" in one
            ]
            if len(set(tags)) == len(properties):
                return str(name)
        return ""

    def _bound_unique_items(self, schema: dict[str, Any]) -> None:
        """Give a set of choices at most as many items as there are choices: its items may repeat now."""
        items = schema.get("items")
        choices = self._resolved(items).get("enum") if isinstance(items, Mapping) else None
        if schema.get("uniqueItems") is not True or not isinstance(choices, list):
            return
        most = schema.get("maxItems", len(choices))
        if isinstance(most, int):
            schema["maxItems"] = min(most, len(choices))

    def _inner(self, value: Any) -> Any:  # noqa: ANN401 - JSON
        if isinstance(value, list):
            return [self._inner(one) for one in value]
        if isinstance(value, Mapping):
            return self.schema(value)
        return value

    def _type(self, value: Any) -> Any:  # noqa: ANN401 - JSON
        """A type in small letters; llguidance says which there are where there is none of this name."""
        if isinstance(value, list):
            return [self._type(one) for one in value]
        if isinstance(value, str) and value.lower() in _TYPES:
            return value.lower()
        return value

    def _with_names(self, schema: Schema) -> Schema:
        """A schema whose keys are described by `propertyNames` alone, with them as properties."""
        names = schema.get("propertyNames")
        if (
            not isinstance(names, Mapping)
            or "properties" in schema
            or "patternProperties" in schema
        ):
            return schema
        names = self._resolved(names)
        value = schema.get("additionalProperties", True)
        rest = {
            key: one
            for key, one in schema.items()
            if key not in ("propertyNames", "additionalProperties")
        }
        choices = [names["const"]] if "const" in names else names.get("enum")
        if isinstance(choices, list) and choices and all(isinstance(one, str) for one in choices):
            return {
                **rest,
                "properties": dict.fromkeys(choices, value),
                "additionalProperties": False,
            }
        if isinstance(pattern := names.get("pattern"), str):
            pattern_properties = {pattern: value}
            return {**rest, "patternProperties": pattern_properties, "additionalProperties": False}
        return schema

    def _as_union(self, schema: Schema) -> Schema:
        """`oneOf` as `anyOf`, where a discriminator tells the alternatives apart anyway."""
        name = self._tag(schema)
        alternatives = schema.get("oneOf")
        if not name or not isinstance(alternatives, list) or "anyOf" in schema:
            return schema
        tags = [tag for one in alternatives for tag in self._tags(one, name)]
        if len(tags) < len(alternatives) or len(set(tags)) < len(tags):
            return schema
        return {("anyOf" if key == "oneOf" else key): value for key, value in schema.items()}

    def _tags(self, alternative: Any, name: str) -> list[str]:  # noqa: ANN401 - JSON
        """Values that the property `name` of an alternative may have."""
        described = self._resolved(alternative) if isinstance(alternative, Mapping) else {}
        properties = described.get("properties")
        tag = properties.get(name) if isinstance(properties, Mapping) else None
        if not isinstance(tag, Mapping):
            return []
        tags = [tag["const"]] if "const" in tag else self._resolved(tag).get("enum")
        if isinstance(tags, list):
            return list(map(json.dumps, tags))
        return []

    def _resolved(self, schema: Schema) -> Schema:
        """A schema, or the definition to which it refers."""
        place = schema.get("$ref")
        if not isinstance(place, str) or not place.startswith("#/"):
            return schema
        found: Any = self._whole
        for part in place[2:].split("/"):
            found = found.get(part) if isinstance(found, Mapping) else None
        return found if isinstance(found, Mapping) else schema

    def _relax_pattern_properties(self, schema: dict[str, Any]) -> None:
        """Leave patterns of names out that llguidance cannot tell apart or read. Other names may come then."""
        patterns = schema.get("patternProperties")
        if not isinstance(patterns, Mapping):
            return
        kept: dict[str, Any] = {}
        for pattern, inner in patterns.items():
            if _is_possible(
                json.dumps({"patternProperties": dict.fromkeys([*kept, pattern], True)})
            ):
                kept[pattern] = inner
            else:
                self._check_pattern(pattern)
        if len(kept) < len(patterns):
            self.dropped.append("patternProperties")
            schema["patternProperties"] = kept
            if not kept:
                del schema["patternProperties"]
            if schema.get("additionalProperties") is False:
                del schema["additionalProperties"]


def _alternatives(schema: Schema) -> list[Schema]:
    found = next((schema[key] for key in _ALTERNATIVES if key in schema), None)
    if isinstance(found, list):
        return [one for one in found if isinstance(one, Mapping)]
    return []


def _discriminator(schema: Schema) -> str:
    """The property that tells the alternatives of a union apart; empty: none is named."""
    discriminator = schema.get("discriminator")
    name = discriminator.get("propertyName") if isinstance(discriminator, Mapping) else None
    return name if isinstance(name, str) else ""


def _with_required(schema: Any, name: str | None) -> Any:  # noqa: ANN401 - JSON
    """A schema whose property `name` is required, where it has one."""
    if name is None or not isinstance(schema, dict):
        return schema
    required = schema.get("required", [])
    properties = schema.get("properties")
    if not isinstance(required, list) or not isinstance(properties, Mapping):
        return schema
    if name not in properties or name in required:
        return schema
    return {**schema, "required": [*required, name]}
