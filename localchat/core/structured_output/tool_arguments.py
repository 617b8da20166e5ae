"""The arguments of a call as a grammar, where a family writes them in another way than as JSON.

A rule for each property, in the order that training has; what a schema says beyond types, choices and nesting
binds where the value is JSON.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from localchat.chat_format.tool_calls.family import TagForm, ToolCallSyntax
from localchat.chat_format.tool_calls.minimax_body import MARK
from localchat.core.structured_output.compiler import styled
from localchat.core.structured_output.lark import Markup, json_rule, literal

_QUOTE = '<|"|>'
_GEMMA_KEY = "/[A-Za-z_][A-Za-z0-9_.-]{0,63}/"
_NUMBERS = ("integer", "number")
_KINDS = ("object", "array", "boolean", *_NUMBERS)

Schema = Mapping[str, Any]


class Argument(NamedTuple):
    """A property as a term of a rule, and the rules behind it."""

    term: str
    required: bool
    lines: list[str]


def argument_rules(rule: str, form: ToolCallSyntax, schema: Schema, markup: Markup) -> list[str]:
    """Rules that define `rule`: the arguments of a tool as `form` writes them."""
    match form.written:
        case "json":
            return [f"{rule}: {json_rule(styled(schema))}"]
        case "tags":
            assert form.tags is not None
            return _tagged(rule, form.tags, schema, markup)
        case "python":
            return _python(rule, schema)
        case "gemma":
            return _gemma(rule, schema, markup)
        case "minimax":
            return _nested(rule, schema, markup)


def _properties(schema: Schema) -> list[tuple[str, Schema, bool]]:
    """Key, schema and whether it must be there."""
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


def _json(value: Schema, whole: Schema) -> str:
    """A value as JSON, with what the whole schema shares."""
    shared = {key: whole[key] for key in ("$defs", "definitions") if key in whole}
    return json_rule(styled({**shared, **value}))


def _kind(value: Schema) -> str:
    kind = value.get("type")
    return kind if isinstance(kind, str) else ""


def _choices(value: Schema) -> list[str]:
    """The choices of an enum of strings."""
    choices = value.get("enum")
    if not isinstance(choices, list) or not all(isinstance(one, str) for one in choices):
        return []
    return choices


# ------------------------------------------------------------------------ a tag for each argument


def _tagged(rule: str, tags: TagForm, schema: Schema, markup: Markup) -> list[str]:
    lines, terms = [], []
    for place, (key, value, required) in enumerate(_properties(schema)):
        one = f"{rule}_{place}"
        choices = _choices(value)
        is_text = _kind(value) == "string" or bool(choices)
        terms.append(one if required else f"{one}?")
        begin = markup.terms(tags.key[0] + key + _behind_key(tags, value, is_text) + tags.value[0])
        end = tags.value[1] + tags.gap
        if is_text and not choices:
            lines += [f"{one}: {begin} {one}_text", *markup.up_to(f"{one}_text", end)]
        else:
            said = " | ".join(map(literal, choices)) if choices else _json(value, schema)
            lines.append(f"{one}: {begin} ({said}) {markup.terms(end)}")
    return [f"{rule}: {' '.join(terms) or literal('')}", *lines]


def _behind_key(tags: TagForm, value: Schema, is_text: bool) -> str:
    """The end of a key's tag, with the attribute that says what the value is."""
    said = tags.text if is_text else tags.other
    if not said:
        return tags.key[1]
    kind = _kind(value)
    named = "number" if kind in _NUMBERS else kind if kind in _KINDS else "object"
    return tags.key[1][0] + said.format(named) + tags.key[1][1:]


# ------------------------------------------------------------------------ between commas


def _listed(rule: str, arguments: Sequence[Argument], between: str) -> list[str]:
    """Arguments in their order, those that may be left out too, and `between` only between them."""
    lines = [f"{rule}: {rule}_head_0"]
    for place, (term, required, behind) in enumerate(arguments):
        head, tail = f"{rule}_head_{place}", f"{rule}_tail_{place}"
        more = f"{rule}_tail_{place + 1}"
        skipped = "" if required else f" | {rule}_head_{place + 1}"
        lines += [
            f"{head}: {term} {more}{skipped}",
            f"{tail}: ({literal(between)} {term}){'' if required else '?'} {more}",
            *behind,
        ]
    last = len(arguments)
    return [*lines, f'{rule}_head_{last}: ""', f'{rule}_tail_{last}: ""']


def _python(rule: str, schema: Schema) -> list[str]:
    arguments = [
        Argument(f"{literal(key + '=')} ({_python_value(value, schema)})", required, [])
        for key, value, required in _properties(schema)
    ]
    return _listed(rule, arguments, ", ")


def _python_value(value: Schema, schema: Schema) -> str:
    kinds = value.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    said = {"boolean": '"True" | "False"', "null": '"None"'}
    if "enum" in value or "const" in value or not all(isinstance(kind, str) for kind in kinds):
        return _json(value, schema)
    return " | ".join(said.get(kind) or _json({**value, "type": kind}, schema) for kind in kinds)


# ------------------------------------------------------------------------ Gemma's objects


def _gemma(rule: str, schema: Schema, markup: Markup) -> list[str]:
    term, lines = _gemma_object(rule, schema, schema, markup)
    return [f"{rule}: {term}", *lines]


def _gemma_object(rule: str, value: Schema, whole: Schema, markup: Markup) -> tuple[str, list[str]]:
    """An object with the properties of a schema, by the alphabet as the template has them."""
    arguments = []
    for place, (key, inner, required) in enumerate(
        sorted(_properties(value), key=lambda one: one[0])
    ):
        term, lines = _gemma_value(f"{rule}_{place}", inner, whole, markup)
        arguments.append(Argument(f"{literal(key + ':')} ({term})", required, lines))
    return f'"{{" {rule}_all "}}"', _listed(f"{rule}_all", arguments, ",")


def _gemma_value(rule: str, value: Schema, whole: Schema, markup: Markup) -> tuple[str, list[str]]:
    kind, quote = _kind(value), markup.terms(_QUOTE)
    if choices := _choices(value):
        return " | ".join(f"{quote} {literal(one)} {quote}" for one in choices), []
    if kind == "string":
        return f"{quote} {rule}_text", markup.up_to(f"{rule}_text", _QUOTE)
    if kind in ("boolean", "null", *_NUMBERS):
        return _json(value, whole), []
    if kind == "object" and _properties(value):
        return _gemma_object(rule, value, whole, markup)
    items = value.get("items")
    if kind == "array" and isinstance(items, Mapping):
        term, lines = _gemma_value(f"{rule}_item", items, whole, markup)
        return f'"[" (({term}) ("," ({term}))*)? "]"', lines
    anything = f"{rule}_any"
    pairs = f'({_GEMMA_KEY} ":" {anything} ("," {_GEMMA_KEY} ":" {anything})*)?'
    scalar = json_rule(styled({"type": ["number", "boolean", "null"]}))
    said = {
        "object": f'"{{" {pairs} "}}"',
        "array": f'"[" ({anything} ("," {anything})*)? "]"',
    }
    shown = [said[kind]] if kind in said else [f"{quote} {rule}_text", scalar, *said.values()]
    whole_any = [f"{quote} {rule}_text", scalar, *said.values()]
    return " | ".join(shown), [
        f"{anything}: {' | '.join(whole_any)}",
        *markup.up_to(f"{rule}_text", _QUOTE),
    ]


# ------------------------------------------------------------------------ MiniMax's nested tags


def _nested(rule: str, schema: Schema, markup: Markup) -> list[str]:
    lines, terms = [], []
    for place, (key, value, required) in enumerate(_properties(schema)):
        one = f"{rule}_{place}"
        terms.append(one if required else f"{one}?")
        term, behind = _nested_value(one, key, value, schema, markup)
        lines += [f"{one}: {term}", *behind]
    return [f"{rule}: {' '.join(terms) or literal('')}", *lines]


def _nested_value(
    rule: str, tag: str, value: Schema, whole: Schema, markup: Markup
) -> tuple[str, list[str]]:
    """A value between its tags."""
    begin, end = markup.terms(f"{MARK}<{tag}>"), f"{MARK}</{tag}>"
    kind, close = _kind(value), markup.terms(end)
    if choices := _choices(value):
        return f"{begin} ({' | '.join(map(literal, choices))}) {close}", []
    if kind == "string":
        return f"{begin} {rule}_text", markup.up_to(f"{rule}_text", end)
    if kind == "object" and _properties(value):
        return f"{begin} {rule}_all {close}", _nested(f"{rule}_all", value, markup)
    items = value.get("items")
    if kind == "array" and isinstance(items, Mapping):
        term, lines = _nested_value(f"{rule}_item", "item", items, whole, markup)
        return f"{begin} ({term})* {close}", lines
    return f"{begin} ({_json(value, whole)}) {close}", []
