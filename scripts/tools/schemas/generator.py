"""Random JSON Schemas: nested, with enums, patterns, bounds, unions and recursion.

A number is the seed, so it names a schema.
"""

import random
from collections.abc import Callable
from typing import Any, TypeAlias

Schema: TypeAlias = dict[str, Any]

_NAMES = (
    *(
        "name",
        "title",
        "kind",
        "size",
        "model",
        "tokens",
        "notes",
        "tags",
        "steps",
        "left",
        "right",
    ),
    *("date", "id", "state", "items", "value", "count", "ratio", "path", "level", "größe", 'a "b"'),
)
_WORDS = ("red", "green", "blue", "KV cache", "small", "large", "über", "x/y", 'q"t', "none", "")
_PATTERNS = (
    r"^[a-z]{2,8}$",
    r"^[A-Z][a-z]{1,10}( [A-Z][a-z]{1,10})?$",
    r"^\d{4}-\d{2}-\d{2}$",
    r"^(red|green|blue)-[0-9]{1,3}$",
    r"^v\d{1,2}\.\d{1,2}(\.\d{1,2})?$",
    r"^[0-9a-f]{8}$",
    r"^\+?[0-9 ]{5,15}$",
    r"^[^@ ]{1,10}@[a-z]{2,8}\.(org|net)$",
)
_FORMATS = ("date", "uuid", "ipv4", "time")
_MOST_DEPTH = 4


def schema(number: int) -> Schema:
    """The schema of this number: an object, as in most requests, or anything else."""
    chance = random.Random(number)
    if chance.random() < 0.15:
        return _recursive(chance)
    made = _object(chance, 0) if chance.random() < 0.8 else _any(chance, 0)
    if chance.random() < 0.2:
        shared = _any(chance, _MOST_DEPTH - 1)
        made = {
            "$defs": {"shared": shared},
            "type": "object",
            "properties": {"one": {"$ref": "#/$defs/shared"}, "rest": made},
            "required": ["one", "rest"],
            "additionalProperties": False,
        }
    return made


def _any(chance: random.Random, depth: int) -> Schema:
    flat: list[Callable[[random.Random], Schema]] = [
        *(_string, _string, _pattern, _enum, _integer, _number, _plain, _format),
    ]
    if depth >= _MOST_DEPTH or chance.random() < 0.45:
        return chance.choice(flat)(chance)
    deep = chance.choice((_object, _object, _array, _union))
    return deep(chance, depth + 1)


def _string(chance: random.Random) -> Schema:
    low = chance.choice((0, 0, 1, 3))
    return {"type": "string", "minLength": low, "maxLength": low + chance.randint(1, 30)}


def _pattern(chance: random.Random) -> Schema:
    return {"type": "string", "pattern": chance.choice(_PATTERNS)}


def _format(chance: random.Random) -> Schema:
    return {"type": "string", "format": chance.choice(_FORMATS)}


def _enum(chance: random.Random) -> Schema:
    values: list[Any] = chance.sample(_WORDS, chance.randint(1, 5))
    if chance.random() < 0.3:
        values += [chance.randint(-9, 9), None, True]
    return {"enum": values} if chance.random() < 0.8 else {"const": values[0]}


def _integer(chance: random.Random) -> Schema:
    low = chance.choice((-1000, -5, 0, 0, 1, 17))
    bounds: list[Schema] = [
        {},
        {"minimum": low},
        {"minimum": low, "maximum": low + chance.randint(1, 5000)},
        {"exclusiveMinimum": low, "exclusiveMaximum": low + 100},
    ]
    return {"type": "integer", **chance.choice(bounds)}


def _number(chance: random.Random) -> Schema:
    low = chance.choice((-1, 0, 0.5))
    bounds: list[Schema] = [{}, {"minimum": low, "maximum": low + 2}, {"exclusiveMinimum": low}]
    return {"type": "number", **chance.choice(bounds)}


def _plain(chance: random.Random) -> Schema:
    return {"type": chance.choice(("boolean", "null", "boolean"))}


def _array(chance: random.Random, depth: int) -> Schema:
    items = _any(chance, depth)
    low = chance.choice((0, 0, 1, 2))
    made: Schema = {"type": "array", "items": items}
    if chance.random() < 0.9:
        made |= {"minItems": low, "maxItems": low + chance.randint(0, 4)}
    if chance.random() < 0.15:
        made |= {"prefixItems": [_any(chance, _MOST_DEPTH)], "minItems": 1, "maxItems": 3}
    return made


def _object(chance: random.Random, depth: int) -> Schema:
    names = chance.sample(_NAMES, chance.randint(1, 5 if depth else 6))
    made: Schema = {
        "type": "object",
        "properties": {name: _any(chance, depth + 1) for name in names},
        "required": [name for name in names if chance.random() < 0.7],
        "additionalProperties": False,
    }
    return made


def _union(chance: random.Random, depth: int) -> Schema:
    if chance.random() < 0.3:
        return {"type": ["string", "null"], "maxLength": chance.randint(1, 12)}
    if chance.random() < 0.4:
        return {"anyOf": [_tagged(chance, depth, kind) for kind in ("plain", "other")]}
    return {"anyOf": [_any(chance, depth + 1) for _ in range(chance.randint(2, 3))]}


def _tagged(chance: random.Random, depth: int, kind: str) -> Schema:
    return {
        "type": "object",
        "properties": {"kind": {"const": kind}, "of": _any(chance, depth + 1)},
        "required": ["kind", "of"],
        "additionalProperties": False,
    }


def _recursive(chance: random.Random) -> Schema:
    node: Schema = {"type": "object", "additionalProperties": False}
    value = _any(chance, _MOST_DEPTH)
    if chance.random() < 0.5:
        node["properties"] = {
            "value": value,
            "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
        }
        node["required"] = ["value", "next"]
    else:
        children = {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2}
        node["properties"] = {"label": value, "children": children}
        node["required"] = ["label"]
    return {"$defs": {"node": node}, "$ref": "#/$defs/node"}
