"""Relaxed schemas: keywords that a grammar cannot enforce are removed and reported, so that the rest applies.

llguidance itself skips keywords that it does not implement (`lenient`) and reports them as warnings. This
module removes what it would reject: patterns with look-around or references, overlapping `patternProperties`,
unknown dialects, and bounds beyond 64 bits, such as those of .NET's numbers. Other keywords are rewritten
instead: types in capitals (Gemini's), `propertyNames` with choices or a pattern, and tagged unions, whose
alternatives must contain the tag. pydantic makes a tag with a default optional, but rejects an answer without
it.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

from localchat.core.structured_output.endless_schema import referred
from localchat.core.structured_output.json_schema import strings
from localchat.core.structured_output.patterns import is_part, pattern_fault, plain_pattern
from localchat.errors import UsageError

LENIENT: Final = {"lenient": True, "coerce_one_of": True}
"""Options with which llguidance relaxes a schema."""
MAX_OPTIONAL: Final = 4000
"""Most optional properties of an object. A mask takes 50 ms then."""
_TYPES: Final = frozenset(("string", "number", "integer", "boolean", "object", "array", "null"))
_MAPS: Final = ("properties", "patternProperties", "$defs", "definitions")
_ROOT_REFERENCES: Final = ("/$defs/", "/definitions/")
"""Starts of references that lack their `#`, as LiteLLM sends them to Anthropic's API."""
_ALTERNATIVES: Final = ("oneOf", "anyOf")
_DATA: Final = ("const", "enum", "default", "examples", "example", "x-guidance")
_NO_KEYWORDS: Final = ("discriminator", "nullable", "xml", "externalDocs")
"""Keywords of OpenAPI without effect on JSON."""
_UNIMPLEMENTED: Final = re.compile(r"Unimplemented keys: (\[.*\])", re.DOTALL)
_LOWER_BOUNDS: Final = ("minimum", "exclusiveMinimum")
_BOUNDS: Final = (*_LOWER_BOUNDS, "maximum", "exclusiveMaximum")
_MAX_INTEGER: Final = (1 << 63) - 1024
"""Largest bound of an integer that llguidance accepts with either sign. It reads bounds as doubles."""
_MAX_COUNTS: Final = ("maxLength", "maxItems", "maxProperties")
_MAX_COUNT: Final = (1 << 32) - 1
"""Largest bound of a length that llguidance accepts. No answer is that long."""
_PROPERTY_COUNTS: Final = ("minProperties", "maxProperties")
_TEXT_BOUNDS: Final = ("pattern", "minLength", "maxLength")
_MAX_TEXT_BOUNDS: Final = 16
_MAX_REFERENCES: Final = 20
"""Most schemas of a value whose references are followed: a chain of them may be long."""
_DIALECTS: Final = re.compile(r"https?://json-schema\.org/")

Schema = Mapping[str, Any]


class Relaxed(NamedTuple):
    """A schema that llguidance accepts, and the keywords that were removed from it."""

    schema: dict[str, Any]
    dropped: tuple[str, ...]


def relax(schema: Schema, field: str = "") -> Relaxed:
    """Remove what llguidance would reject from a schema.

    `field`: field of the client's request with the schema. Raises UsageError for a pattern that is not a
    regular expression.
    """
    relaxation = _Relaxation(schema, field)
    relaxed = relaxation.schema(schema)
    return Relaxed(relaxed, tuple(dict.fromkeys(relaxation.dropped)))


def dropped_keywords(warnings: Sequence[str]) -> tuple[str, ...]:
    """Return the keywords that llguidance skipped, according to its warnings."""
    dropped: dict[str, None] = {}
    for warning in warnings:
        if match := _UNIMPLEMENTED.match(warning):
            dropped.update(dict.fromkeys(json.loads(match[1])))
        elif warning.startswith("min/maxProperties"):
            dropped.update(dict.fromkeys(_PROPERTY_COUNTS))
        else:
            dropped[warning.partition(" ")[0]] = None
    return tuple(dropped)


@lru_cache(1024)
def is_possible(schema: str) -> bool:
    """Return whether llguidance can compile a schema."""
    from llguidance import LLMatcher

    failed, _ = LLMatcher.validate_grammar_with_warnings(
        json.dumps({"grammars": [{"name": "part", "json_schema": json.loads(schema)}]})
    )
    return not failed


class _Relaxation:
    """Relaxes one schema. `dropped` collects the removed keywords."""

    def __init__(self, root: Schema, field: str) -> None:
        self._root = root
        self._details = {"field": field} if field else {}
        self._tag_of = dict(self._tagged(root))
        self.dropped: list[str] = []

    def schema(self, schema: Schema) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in self._as_union(self._with_names(schema)).items():
            if key in _NO_KEYWORDS or (key.startswith("x-") and key != "x-guidance"):
                # Beside a circular $ref, llguidance rejects unknown keys.
                continue
            if key in _DATA:
                result[key] = value
            elif value is None:
                continue  # programs in Go and C# write null for an absent keyword
            elif key in _MAPS and isinstance(value, Mapping):
                result[key] = {
                    name: _with_required(self._inner(inner), self._tag_of.get(f"#/{key}/{name}"))
                    for name, inner in value.items()
                }
            elif key == "type":
                result[key] = self._type(value)
            elif key == "$ref" and isinstance(value, str) and value.startswith(_ROOT_REFERENCES):
                result[key] = f"#{value}"
            elif key == "pattern":
                pattern = self._pattern(value)
                if pattern is not None:
                    result[key] = pattern
            elif key in _MAX_COUNTS and isinstance(value, int | float):
                result[key] = min(value, _MAX_COUNT)
            elif key in _BOUNDS:
                bound = self._bound(key, value, schema)
                if bound is not None:
                    result[key] = bound
            elif key == "$schema" and not (isinstance(value, str) and _DIALECTS.match(value)):
                continue
            else:
                result[key] = self._inner(value)
        self._check_optional(result)
        self._relax_pattern_properties(result)
        self._bound_unique_items(result)
        self._weaken_property_count(result)
        self._relax_text(result)
        if tag := self._tag(schema):
            for key in _ALTERNATIVES:
                if isinstance(alternatives := result.get(key), list):
                    result[key] = [_with_required(alternative, tag) for alternative in alternatives]
        return result

    def _pattern(self, pattern: Any) -> str | None:  # noqa: ANN401 - JSON
        """Return the pattern as llguidance reads it, or None if it cannot. Raises UsageError."""
        if isinstance(pattern, str) and not is_part(pattern):
            for spelling in (pattern, plain_pattern(pattern)):
                if is_possible(json.dumps({"pattern": spelling})):
                    return spelling
        self._check_pattern(pattern)
        self.dropped.append("pattern")
        return None

    def _bound(self, key: str, bound: Any, schema: Schema) -> Any:  # noqa: ANN401 - JSON
        """Return a number's bound as llguidance can enforce it, or None."""
        kind = self._type(schema.get("type", "number"))
        if (
            isinstance(bound, bool)
            or not isinstance(bound, int | float)
            or is_possible(json.dumps({"type": kind, key: bound}))
            or not is_possible(json.dumps({"type": kind}))
        ):
            return bound
        if kind == "integer" and key in _LOWER_BOUNDS and bound < -_MAX_INTEGER:
            return -_MAX_INTEGER
        self.dropped.append(key)
        return None

    def _check_optional(self, schema: Schema) -> None:
        """Raise UsageError for an object with too many optional properties."""
        required = strings(schema.get("required"))
        count = len(strings(schema.get("properties"))) - len(required)
        if count > MAX_OPTIONAL:
            raise UsageError(
                f"an object of the JSON schema has {count:,} optional properties; {MAX_OPTIONAL:,} are allowed",
                **self._details,
            )

    def _check_pattern(self, pattern: Any) -> None:  # noqa: ANN401 - JSON
        """Raise UsageError for a pattern that is not a regular expression."""
        if isinstance(pattern, str):
            fault = pattern_fault(pattern)
            shown = pattern
        else:
            fault = "it is not a string"
            shown = json.dumps(pattern)
        if fault:
            raise UsageError(
                f"the pattern {shown[:100]!r} of the JSON schema is not a regular expression: {fault}",
                **self._details,
            )

    def _tagged(self, value: Any) -> Iterator[tuple[str, str]]:  # noqa: ANN401 - JSON
        """Yield the references to alternatives of tagged unions, each with the tag."""
        if isinstance(value, list):
            for inner in value:
                yield from self._tagged(inner)
        elif isinstance(value, Mapping):
            if tag := self._tag(value):
                for inner in _alternatives(value):
                    if isinstance(reference := inner.get("$ref"), str):
                        yield reference, tag
            for inner in value.values():
                yield from self._tagged(inner)

    def _tag(self, schema: Schema) -> str:
        """Return the property that distinguishes the alternatives of a union. Empty: none.

        It is the discriminator, or a property with a different constant in each alternative, because some
        clients remove the discriminator.
        """
        if name := _discriminator(schema):
            return name
        objects = [self._resolved(object_) for object_ in _alternatives(schema)]
        properties = [
            object_["properties"]
            for object_ in objects
            if isinstance(object_.get("properties"), dict)
        ]
        if len(properties) < 2:
            return ""
        for name in properties[0]:
            tag_schemas = [object_.get(name) for object_ in properties]
            tags = [
                json.dumps(object_["const"])
                for object_ in tag_schemas
                if isinstance(object_, dict) and "const" in object_
            ]
            if len(set(tags)) == len(properties):
                return str(name)
        return ""

    def _bound_unique_items(self, schema: dict[str, Any]) -> None:
        """Limit a set to the number of its choices, because `uniqueItems` is not enforced."""
        items = schema.get("items")
        choices = None
        if isinstance(items, Mapping):
            choices = self._resolved(items).get("enum")
        if schema.get("uniqueItems") is not True or not isinstance(choices, list):
            return
        max_items = schema.get("maxItems", len(choices))
        if isinstance(max_items, int):
            schema["maxItems"] = min(max_items, len(choices))

    def _weaken_property_count(self, schema: dict[str, Any]) -> None:
        """Lower a `minProperties` that llguidance rejects.

        Beside optional properties, it enforces one more than the required ones, without another maximum.
        """
        enforced = len(set(strings(schema.get("required")))) + 1
        minimum = schema.get("minProperties")
        maximum = schema.get("maxProperties", minimum)
        if not isinstance(minimum, int) or not isinstance(maximum, int) or minimum > maximum:
            return
        has_room = enforced <= minimum <= len(strings(schema.get("properties")))
        if has_room and (minimum > enforced or ("maxProperties" in schema and maximum != enforced)):
            self.dropped.append("minProperties")
            schema["minProperties"] = enforced
            if "maxProperties" in schema:
                del schema["minProperties"]

    def _relax_text(self, schema: dict[str, Any]) -> None:
        """Remove bounds of a text that llguidance cannot combine with its patterns.

        Its time and memory grow exponentially with the patterns. Raises UsageError if a definition has them.
        """
        parts = self._conjoined(schema)
        bounds = [(part, key) for key in _TEXT_BOUNDS for part, _ in parts if key in part]
        if len(bounds) < 2 or bounds[0][1] != "pattern":
            return
        own = {id(part) for part, is_own in parts if is_own}
        kept: list[dict[str, Any]] = []
        for part, key in bounds:
            bound: dict[str, Any] = {key: part[key]}
            # llguidance reports a bound that is wrong by itself.
            if bound in kept or not is_possible(json.dumps(bound)):
                continue
            joined = json.dumps({"type": "string", "allOf": [*kept, bound]})
            if len(kept) < _MAX_TEXT_BOUNDS and is_possible(joined):
                kept.append(bound)
            elif id(part) in own:
                self.dropped.append(key)
                del part[key]
            else:
                raise UsageError(
                    f"the patterns of a text in the JSON schema cannot be combined: {part[key]!r:.100}",
                    **self._details,
                )

    def _conjoined(self, schema: dict[str, Any]) -> list[tuple[dict[str, Any], bool]]:
        """Return the schemas that all apply to a value, definitions first.

        The flag is False for a definition, which other schemas may use, too.
        """
        parts: list[tuple[dict[str, Any], bool]] = []
        seen: set[int] = set()
        waiting: list[tuple[Any, bool]] = [(schema, True)]
        while waiting:
            part, is_own = waiting.pop()
            if not isinstance(part, dict) or id(part) in seen:
                continue
            seen.add(id(part))
            parts.append((part, is_own))
            if len(seen) < _MAX_REFERENCES:
                waiting.append((self._resolved(part), False))
            inner = part.get("allOf")
            if isinstance(inner, list):
                waiting += [(item, is_own) for item in reversed(inner)]
        return sorted(parts, key=lambda item: item[1])

    def _inner(self, value: Any) -> Any:  # noqa: ANN401 - JSON
        if isinstance(value, list):
            return [self._inner(item) for item in value]
        if isinstance(value, Mapping):
            return self.schema(value)
        return value

    def _type(self, value: Any) -> Any:  # noqa: ANN401 - JSON
        """Return a type in lower case. llguidance reports unknown types."""
        if isinstance(value, list):
            return [self._type(item) for item in value]
        if isinstance(value, str) and value.lower() in _TYPES:
            return value.lower()
        return value

    def _with_names(self, schema: Schema) -> Schema:
        """Return a schema with the keys of `propertyNames` as properties, if nothing else describes them."""
        names = schema.get("propertyNames")
        if (
            not isinstance(names, Mapping)
            or "properties" in schema
            or "patternProperties" in schema
        ):
            return schema
        names = self._resolved(names)
        value = schema.get("additionalProperties", True)
        others = {
            key: inner
            for key, inner in schema.items()
            if key not in ("propertyNames", "additionalProperties")
        }
        choices = names.get("enum")
        if "const" in names:
            choices = [names["const"]]
        if (
            isinstance(choices, list)
            and choices
            and all(isinstance(inner, str) for inner in choices)
        ):
            return {
                **others,
                "properties": dict.fromkeys(choices, value),
                "additionalProperties": False,
            }
        if isinstance(pattern := names.get("pattern"), str):
            pattern_properties = {pattern: value}
            return {
                **others,
                "patternProperties": pattern_properties,
                "additionalProperties": False,
            }
        return schema

    def _as_union(self, schema: Schema) -> Schema:
        """Return a schema with `anyOf` for `oneOf`, if a tag distinguishes the alternatives."""
        name = self._tag(schema)
        alternatives = schema.get("oneOf")
        if not name or not isinstance(alternatives, list) or "anyOf" in schema:
            return schema
        tags = [tag for alternative in alternatives for tag in self._tags(alternative, name)]
        if len(tags) < len(alternatives) or len(set(tags)) < len(tags):
            return schema
        return {"anyOf" if key == "oneOf" else key: value for key, value in schema.items()}

    def _tags(self, alternative: Any, name: str) -> list[str]:  # noqa: ANN401 - JSON
        """Return the values that the property `name` of an alternative may have."""
        if not isinstance(alternative, Mapping):
            return []
        properties = self._resolved(alternative).get("properties")
        if not isinstance(properties, Mapping):
            return []
        tag = properties.get(name)
        if not isinstance(tag, Mapping):
            return []
        if "const" in tag:
            return [json.dumps(tag["const"])]
        tags = self._resolved(tag).get("enum")
        if isinstance(tags, list):
            return list(map(json.dumps, tags))
        return []

    def _resolved(self, schema: Schema) -> Schema:
        """Return a schema, or the definition to which it refers."""
        reference = schema.get("$ref")
        if isinstance(reference, str):
            target = referred(self._root, reference)
            if isinstance(target, Mapping):
                return target
        return schema

    def _relax_pattern_properties(self, schema: dict[str, Any]) -> None:
        """Remove name patterns that overlap or cannot be read, and then allow other names."""
        patterns = schema.get("patternProperties")
        if not isinstance(patterns, Mapping) or is_possible(
            json.dumps({"patternProperties": dict.fromkeys(patterns, True)})
        ):
            return
        kept: dict[str, Any] = {}
        for pattern, inner in patterns.items():
            if is_possible(
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
    alternatives = next((schema[key] for key in _ALTERNATIVES if key in schema), None)
    if isinstance(alternatives, list):
        return [alternative for alternative in alternatives if isinstance(alternative, Mapping)]
    return []


def _discriminator(schema: Schema) -> str:
    """Return the property that a discriminator names. Empty: none."""
    discriminator = schema.get("discriminator")
    if not isinstance(discriminator, Mapping):
        return ""
    name = discriminator.get("propertyName")
    return name if isinstance(name, str) else ""


def _with_required(schema: Any, name: str | None) -> Any:  # noqa: ANN401 - JSON
    """Return a schema in which the property `name` is required, if it has one."""
    if name is None or not isinstance(schema, dict):
        return schema
    required = schema.get("required", [])
    properties = schema.get("properties")
    if not isinstance(required, list) or not isinstance(properties, Mapping):
        return schema
    if name not in properties or name in required:
        return schema
    return {**schema, "required": [*required, name]}
