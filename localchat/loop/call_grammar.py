"""Tool calls as a grammar: the model's own syntax around the JSON schemas of the tools."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from localchat.chatformat.styles import CallStyle
from localchat.errors import UsageError
from localchat.loop.grammar import styled
from localchat.loop.lark import TEXT, Markup, json_rule, literal


class Tool(NamedTuple):
    """What a request says of a tool. `strict`: its arguments always keep to the schema."""

    name: str
    schema: Mapping[str, Any]
    strict: bool = False


def tool_of(description: Mapping[str, Any]) -> Tool:
    """A tool of a request, whether or not it is wrapped as a function. Raises UsageError."""
    function = description.get("function", description)
    if not isinstance(function, Mapping) or not function.get("name"):
        raise UsageError("a tool of the request has no name")
    name = str(function["name"])
    schema = function.get("parameters") or {"type": "object", "properties": {}}
    if not isinstance(schema, Mapping):
        raise UsageError(f"the parameters of the tool {name!r} are no JSON schema")
    return Tool(name, schema, bool(function.get("strict")))


def call_rules(
    style: CallStyle, tools: Sequence[Tool], markup: Markup, *, many: bool, tagged: bool = False
) -> list[str]:
    """Rules that define `calls`: one call of one of `tools` or, with `many`, one after the other. `tagged`: a
    tag tells them from another answer also where the family usually writes a bare object."""
    form = style.form
    begin = form.begin
    if tagged and not (begin + form.head).startswith(style.opens):
        begin = style.opens[0] + begin
    first = f"{markup.terms(begin)} {markup.terms(form.head)} call"
    more = f" ({markup.terms(form.between)} {markup.terms(form.head)} call)*"
    calls = f"calls: {first}{more if many and style.many else ''} {markup.terms(form.end)}"
    return [*_call_rules(style, tools, markup), calls]


def free_rules(style: CallStyle, tools: Sequence[Tool], markup: Markup, *, many: bool) -> list[str]:
    """Rules that define `free`: any text, in which a call, once its tag is written, keeps to the schemas."""
    form = style.form
    lines = _call_rules(style, tools, markup)
    lead = form.begin + form.head
    tag = next((tag for tag in style.opens if lead.startswith(tag)), "")
    more = f" ({markup.terms(form.between)} {markup.terms(form.head)} call)*"
    rest = f"call{more if many and style.many else ''} {markup.terms(form.end)}"
    if not tag:
        # A bare object is a call at the very beginning only.
        return [*lines, f"free: /[^{{](.|\\n)*/ | {markup.terms(lead)} {rest}"]
    repeated = "*" if many and style.many else "?"
    return [
        *lines,
        f"free: tagged{repeated} {TEXT}",
        *markup.up_to("opening", tag),
        f"tagged: opening {markup.terms(lead[len(tag) :])} {rest}",
    ]


def _call_rules(style: CallStyle, tools: Sequence[Tool], markup: Markup) -> list[str]:
    """`call`: a call from its name on."""
    form = style.form
    lines = ["call: " + " | ".join(f"call_{place}" for place in range(len(tools)))]
    for place, tool in enumerate(tools):
        arguments = f"arguments_{place}"
        lead, tail = markup.terms(tool.name + form.middle), markup.terms(form.tail)
        lines.append(f"call_{place}: {lead} {arguments} {tail}")
        if form.xml:
            lines += _parameters(arguments, tool.schema)
        else:
            lines.append(f"{arguments}: {json_rule(styled(tool.schema))}")
    return lines


def _parameters(rule: str, schema: Mapping[str, Any]) -> list[str]:
    """Parameters between tags, in the schema's order; a string stands bare, anything else as JSON."""
    properties = schema.get("properties")
    if not isinstance(properties, Mapping):
        properties = {}
    required = schema.get("required")
    lines, terms = [], []
    for place, (key, value) in enumerate(properties.items()):
        one = f"{rule}_{place}"
        terms.append(one if isinstance(required, list) and key in required else f"{one}?")
        begin = literal(f"<parameter={key}>\n")
        kind = value.get("type") if isinstance(value, Mapping) else None
        if kind == "string" and not value.get("enum"):
            lines += [
                f"{one}: {begin} {one}_text",
                f"{one}_text[lazy]: /(.|\\n)*\\n<\\/parameter>\\n/",
            ]
        else:
            inner = {**_shared(schema), **value} if isinstance(value, Mapping) else {}
            said = _spelled(value) or json_rule(styled(inner))
            lines.append(f'{one}: {begin} ({said}) "\\n</parameter>\\n"')
    return [f"{rule}: {' '.join(terms) or literal('')}", *lines]


def _shared(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {key: schema[key] for key in ("$defs", "definitions") if key in schema}


def _spelled(value: Mapping[str, Any]) -> str:
    """The choices of an enum of strings, which stand bare."""
    choices = value.get("enum") if isinstance(value, Mapping) else None
    if not isinstance(choices, list) or not all(isinstance(one, str) for one in choices):
        return ""
    return " | ".join(map(literal, choices))
