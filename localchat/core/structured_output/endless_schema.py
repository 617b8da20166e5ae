"""Endless schemas: every value that such a schema allows contains another value of the same schema.

No text ends such a value, so an answer would fail or be cut off. llguidance finds only the simplest cases.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final
from urllib.parse import unquote

_MAX_PASSES: Final = 32
"""Limit of the work for a hostile schema. Definitions are in an order that needs fewer passes."""
_ALTERNATIVES: Final = ("anyOf", "oneOf")
_NESTED: Final = ("object", "array")
_DATA: Final = ("const", "enum", "default", "examples")

Schema = Mapping[str, Any]


def finite_schema(schema: Schema) -> Schema | None:
    """Return a schema without references to endless values. None: no finite value satisfies it.

    A model that started such a value could not end it.
    """
    targets = dict(_targets(schema, schema))
    ends = _Ends(targets)
    names = list(targets)
    for _ in range(_MAX_PASSES):
        before = len(ends.finite)
        ends.finite.update(
            name for name in names if name not in ends.finite and ends.of(targets[name])
        )
        if len(ends.finite) == before:
            break
        names.reverse()
    else:
        return schema
    endless = targets.keys() - ends.finite
    if not endless:
        # An unusable schema is wrong for a reason of its own.
        return schema
    if not ends.of(schema):
        return None
    return {key: _without(value, endless) for key, value in schema.items()}


def _without(value: Any, endless: Collection[str]) -> Any:  # noqa: ANN401 - JSON
    """Replace references by a schema that allows nothing."""
    if isinstance(value, list):
        return [_without(item, endless) for item in value]
    if not isinstance(value, Mapping):
        return value
    reference = value.get("$ref")
    if isinstance(reference, str) and reference in endless:
        return False
    data = {key: item for key, item in value.items() if key in _DATA}
    return {key: _without(item, endless) for key, item in value.items()} | data


class _Ends:
    """Decides which parts of a schema allow a finite value, given the finite references."""

    def __init__(self, targets: Mapping[str, Any]) -> None:
        """`targets`: schemas by the references to them."""
        self._targets = targets
        self.finite: set[str] = set()

    def of(self, schema: Any) -> bool:  # noqa: ANN401 - JSON
        """Return True if a part allows a finite value. Unknown keywords are assumed to allow one."""
        if not isinstance(schema, Mapping):
            return schema is not False
        if "const" in schema or "enum" in schema:
            return True
        reference = schema.get("$ref")
        if isinstance(reference, str) and self._is_unknown(reference):
            return False
        if not all(map(self.of, _list(schema.get("allOf")))):
            return False
        for keyword in _ALTERNATIVES:
            alternatives = _list(schema.get(keyword))
            if alternatives and not any(map(self.of, alternatives)):
                return False
        return self._has_finite_type(schema)

    def _is_unknown(self, reference: str) -> bool:
        return reference in self._targets and reference not in self.finite

    def _has_finite_type(self, schema: Schema) -> bool:
        types = _list(schema.get("type"))
        if isinstance(schema.get("type"), str):
            types = [schema["type"]]
        if not types or any(kind not in _NESTED for kind in types):
            return True
        return ("object" in types and self._is_finite_object(schema)) or (
            "array" in types and self._is_finite_array(schema)
        )

    def _is_finite_object(self, schema: Schema) -> bool:
        properties = schema.get("properties", {})
        required = [name for name in _list(schema.get("required")) if isinstance(name, str)]
        others = schema.get("additionalProperties", True)
        if not isinstance(properties, Mapping) or "patternProperties" in schema:
            return True
        return all(self.of(properties.get(name, others)) for name in required)

    def _is_finite_array(self, schema: Schema) -> bool:
        items = schema.get("items", True)
        first = _list(schema.get("prefixItems"))
        count = schema.get("minItems", 0)
        if not isinstance(count, int | float):
            return True
        return all(map(self.of, first[: int(count)])) and (count <= len(first) or self.of(items))


def _targets(root: Schema, value: Any) -> Iterator[tuple[str, Any]]:  # noqa: ANN401 - JSON
    """Yield the references anywhere in a schema, with the schemas to which they refer."""
    if isinstance(value, list):
        for item in value:
            yield from _targets(root, item)
    elif isinstance(value, Mapping):
        reference = value.get("$ref")
        if isinstance(reference, str) and (target := referred(root, reference)) is not None:
            yield reference, target
        for item in value.values():
            yield from _targets(root, item)


def referred(root: Schema, reference: str) -> Any:  # noqa: ANN401 - JSON
    """Return the target of a reference within the root, None if it is missing."""
    if reference != "#" and not reference.startswith("#/"):
        # Another document, or an anchor.
        return None
    target: Any = root
    for part in unquote(reference).split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(target, list) and key.isdecimal() and int(key) < len(target):
            target = target[int(key)]
        elif isinstance(target, Mapping):
            target = target.get(key)
        else:
            return None
    return target


def _list(value: Any) -> list[Any]:  # noqa: ANN401 - JSON
    if isinstance(value, list):
        return value
    return []
