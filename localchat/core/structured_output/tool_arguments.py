"""Arguments of a tool call as a grammar, for families that do not write JSON.

Each property has a rule, in the order of the training data. Constraints of a schema beyond types, choices and
nesting apply only to values in JSON.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from localchat.chat_format.tool_calls.family import TagSyntax, ToolCallSyntax
from localchat.core.structured_output.compiler import with_style
from localchat.core.structured_output.lark import TagTerms, json_rule, literal

_QUOTE = '<|"|>'
_GEMMA_KEY = "/[A-Za-z_][A-Za-z0-9_.-]{0,63}/"
_NUMBERS = ("integer", "number")

Schema = Mapping[str, Any]


class ArgumentRule(NamedTuple):
    """A property as a term of a rule, with the rules that the term needs."""

    term: str
    required: bool
    lines: list[str]


def argument_rules(
    rule: str, syntax: ToolCallSyntax, schema: Schema, markup: TagTerms
) -> list[str]:
    """Return the lines of `rule`: the arguments of a tool in the syntax of its family."""
    match syntax.notation:
        case "json":
            return [f"{rule}: {json_rule(with_style(schema))}"]
        case "tags":
            assert syntax.tags is not None
            return _tagged(rule, syntax.tags, schema, markup)
        case "python":
            return _python(rule, schema)
        case "gemma":
            return _gemma(rule, schema, markup)


def _properties(schema: Schema) -> list[tuple[str, Schema, bool]]:
    """Return the key and schema of each property, and whether it is required."""
    properties = schema.get("properties")
    required = schema.get("required")
    if not isinstance(properties, Mapping):
        return []
    return [
        (
            str(key),
            value if isinstance(value, Mapping) else {},
            isinstance(required, list) and key in required,
        )
        for key, value in properties.items()
    ]


def _json(value: Schema, root: Schema) -> str:
    """Return a term for a value in JSON, with the definitions of the root schema."""
    shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
    return json_rule(with_style({**shared, **value}))


def _kind(value: Schema) -> str:
    kind = value.get("type")
    return kind if isinstance(kind, str) else ""


def _choices(value: Schema) -> list[str]:
    """Return the choices of an enum of strings, or an empty list."""
    choices = value.get("enum")
    if not isinstance(choices, list) or not all(isinstance(choice, str) for choice in choices):
        return []
    return choices


def _tagged(rule: str, tags: TagSyntax, schema: Schema, markup: TagTerms) -> list[str]:
    lines = []
    terms = []
    for index, (key, value, required) in enumerate(_properties(schema)):
        argument = f"{rule}_{index}"
        choices = _choices(value)
        is_text = _kind(value) == "string" or bool(choices)
        terms.append(argument if required else f"{argument}?")
        begin = markup.terms(tags.key[0] + key + _key_end(tags, is_text) + tags.value[0])
        end = tags.value[1] + tags.gap
        if is_text and not choices:
            lines += [
                f"{argument}: {begin} {argument}_text",
                *markup.up_to(f"{argument}_text", end),
            ]
        else:
            written = " | ".join(map(literal, choices)) or _json(value, schema)
            lines.append(f"{argument}: {begin} ({written}) {markup.terms(end)}")
    return [f"{rule}: {' '.join(terms) or literal('')}", *lines]


def _key_end(tags: TagSyntax, is_text: bool) -> str:
    """Return the end of a key's tag, with the attribute that declares the type."""
    attribute = tags.other_attribute
    if is_text:
        attribute = tags.string_attribute
    return tags.key[1][0] + attribute + tags.key[1][1:]


def _separated(rule: str, arguments: Sequence[ArgumentRule], between: str) -> list[str]:
    """Return the lines of `rule`: ordered arguments, some optional, separated by `between`."""
    lines = [f"{rule}: {rule}_head_0"]
    for index, (term, required, lines_after) in enumerate(arguments):
        head = f"{rule}_head_{index}"
        tail = f"{rule}_tail_{index}"
        more = f"{rule}_tail_{index + 1}"
        skipped = ""
        optional = ""
        if not required:
            skipped = f" | {rule}_head_{index + 1}"
            optional = "?"
        lines += [
            f"{head}: {term} {more}{skipped}",
            f"{tail}: ({literal(between)} {term}){optional} {more}",
            *lines_after,
        ]
    last = len(arguments)
    return [*lines, f'{rule}_head_{last}: ""', f'{rule}_tail_{last}: ""']


def _python(rule: str, schema: Schema) -> list[str]:
    arguments = [
        ArgumentRule(f"{literal(key + '=')} ({_python_value(value, schema)})", required, [])
        for key, value, required in _properties(schema)
    ]
    return _separated(rule, arguments, ", ")


def _python_value(value: Schema, schema: Schema) -> str:
    kinds = value.get("type")
    if not isinstance(kinds, list):
        kinds = [kinds]
    written = {"boolean": '"True" | "False"', "null": '"None"'}
    if "enum" in value or "const" in value or not all(isinstance(kind, str) for kind in kinds):
        return _json(value, schema)
    return " | ".join(written.get(kind) or _json({**value, "type": kind}, schema) for kind in kinds)


def _gemma(rule: str, schema: Schema, markup: TagTerms) -> list[str]:
    term, lines = _gemma_object(rule, schema, schema, markup)
    return [f"{rule}: {term}", *lines]


def _gemma_object(
    rule: str, value: Schema, root: Schema, markup: TagTerms
) -> tuple[str, list[str]]:
    """Return an object with a schema's properties, sorted by name as in the template."""
    arguments = []
    for index, (key, inner, required) in enumerate(
        sorted(_properties(value), key=lambda property_: property_[0])
    ):
        term, lines = _gemma_value(f"{rule}_{index}", inner, root, markup)
        arguments.append(ArgumentRule(f"{literal(key + ':')} ({term})", required, lines))
    return f'"{{" {rule}_all "}}"', _separated(f"{rule}_all", arguments, ",")


def _gemma_value(rule: str, value: Schema, root: Schema, markup: TagTerms) -> tuple[str, list[str]]:
    kind = _kind(value)
    quote = markup.terms(_QUOTE)
    if choices := _choices(value):
        return " | ".join(f"{quote} {literal(choice)} {quote}" for choice in choices), []
    if kind == "string":
        return f"{quote} {rule}_text", markup.up_to(f"{rule}_text", _QUOTE)
    if kind in ("boolean", "null", *_NUMBERS):
        return _json(value, root), []
    if kind == "object" and _properties(value):
        return _gemma_object(rule, value, root, markup)
    items = value.get("items")
    if kind == "array" and isinstance(items, Mapping):
        term, lines = _gemma_value(f"{rule}_item", items, root, markup)
        return f'"[" (({term}) ("," ({term}))*)? "]"', lines
    anything = f"{rule}_any"
    pairs = f'({_GEMMA_KEY} ":" {anything} ("," {_GEMMA_KEY} ":" {anything})*)?'
    scalar = json_rule(with_style({"type": ["number", "boolean", "null"]}))
    written = {
        "object": f'"{{" {pairs} "}}"',
        "array": f'"[" ({anything} ("," {anything})*)? "]"',
    }
    alternatives = " | ".join([f"{quote} {rule}_text", scalar, *written.values()])
    return written.get(kind, alternatives), [
        f"{anything}: {alternatives}",
        *markup.up_to(f"{rule}_text", _QUOTE),
    ]
