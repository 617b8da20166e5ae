"""JSON schemas and tool calls that are generated from a seed, and the check of what a model makes of them."""

import json
import random
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

_NAMES: Final = ("title", "city", "owner", "count", "score", "active", "tags", "level", "day")
_TEXTS: Final = ("Lima", "Oslo", "Ada", "Rome", "Nairobi", "Grace", "Quito", "Edsger")
_DAYS: Final = ("monday", "friday", "sunday")
_TOOLS: Final = (
    *("book_table", "send_message", "set_alarm", "add_task"),
    *("find_flight", "play_song", "turn_lamp", "order_part"),
)
_KINDS: Final = ("string", "integer", "boolean", "enum", "array")


class SchemaTask(NamedTuple):
    """A question whose answer must be JSON of this schema."""

    prompt: str
    schema: dict[str, Any]


class ToolTask(NamedTuple):
    """A question that a tool call with these arguments answers."""

    prompt: str
    tool: dict[str, Any]
    name: str
    arguments: dict[str, Any]


def schema_task(number: int) -> SchemaTask:
    """The task of this number; always the same."""
    draw = random.Random(f"schema {number}")
    schema = _object(draw, 2 + number % 3)
    if number % 2:
        schema["properties"]["place"] = _object(draw, 2)
        schema["required"].append("place")
    prompt = (
        "Invent an example and write it as one JSON object that fits this JSON schema. Answer with the JSON "
        f"alone.\n{json.dumps(schema)}"
    )
    return SchemaTask(prompt, schema)


def tool_task(number: int) -> ToolTask:
    """The task of this number; always the same."""
    draw = random.Random(f"tool {number}")
    schema = _object(draw, 1 + number % 3)
    name = _TOOLS[number % len(_TOOLS)]
    arguments = {key: _value(draw, one) for key, one in schema["properties"].items()}
    told = ", ".join(f"{key} {json.dumps(value)}" for key, value in arguments.items())
    function = {"name": name, "description": name.replace("_", " "), "parameters": schema}
    prompt = f"Call the tool {name} with {told}."
    return ToolTask(prompt, {"type": "function", "function": function}, name, arguments)


def json_value(text: str) -> Any:  # noqa: ANN401 - whatever JSON it is
    """The JSON of an answer, also from within a fence. Raises ValueError."""
    text = text.strip()
    if text.startswith("```"):
        text = text.partition("\n")[2].rpartition("```")[0]
    return json.loads(text)


def fits(value: object, schema: Mapping[str, Any]) -> bool:
    """Whether a value fits a schema of this module."""
    if "enum" in schema:
        return value in schema["enum"]
    match schema["type"]:
        case "object":
            properties = schema["properties"]
            return (
                isinstance(value, dict)
                and set(schema["required"]) <= set(value) <= set(properties)
                and all(fits(one, properties[key]) for key, one in value.items())
            )
        case "array":
            return isinstance(value, list) and all(fits(one, schema["items"]) for one in value)
        case "string":
            return isinstance(value, str)
        case "boolean":
            return isinstance(value, bool)
    return isinstance(value, int) and not isinstance(value, bool)


def _object(draw: random.Random, count: int) -> dict[str, Any]:
    names = draw.sample(_NAMES, count)
    properties = {name: _schema(draw.choice(_KINDS)) for name in names}
    return {
        "type": "object",
        "properties": properties,
        "required": names,
        "additionalProperties": False,
    }


def _schema(kind: str) -> dict[str, Any]:
    if kind == "enum":
        return {"type": "string", "enum": list(_DAYS)}
    if kind == "array":
        return {"type": "array", "items": {"type": "string"}}
    return {"type": kind}


def _value(draw: random.Random, schema: Mapping[str, Any]) -> Any:  # noqa: ANN401 - of any kind
    if "enum" in schema:
        return draw.choice(schema["enum"])
    match schema["type"]:
        case "array":
            return draw.sample(_TEXTS, 2)
        case "string":
            return draw.choice(_TEXTS)
        case "boolean":
            return draw.random() < 0.5
    return draw.randrange(2, 99)
