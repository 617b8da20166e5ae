"""Tool calls as a grammar: the model's own syntax around the JSON schemas of the tools."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from localchat.chatformat.call_style import CallStyle
from localchat.chatformat.tag_forms import NUMBER
from localchat.errors import UsageError
from localchat.loop.argument_grammar import argument_rules
from localchat.loop.lark import TEXT, Markup

_BREAKS = re.compile(f"(\n|{NUMBER})")
_ANY_NUMBER = "/[0-9]{1,4}/"


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
    if tagged and style.bare and not (begin + form.head).startswith(style.opens):
        begin = style.opens[0] + begin
    return [*_call_rules(style, tools, markup), f"calls: {_calls(style, begin, markup, many=many)}"]


def free_rules(style: CallStyle, tools: Sequence[Tool], markup: Markup, *, many: bool) -> list[str]:
    """Rules that define `free`: any text, in which a call, once its tag is written, keeps to the schemas."""
    form = style.form
    lines = _call_rules(style, tools, markup)
    if form.others:
        calls = _calls(style, form.begin, markup, many=many)
        return [
            *lines,
            f"free: (other {_terms(markup, form.again)})* (other | {calls}) | {TEXT}",
            f"other: ({' | '.join(markup.terms(other) for other in form.others)}) {TEXT}",
        ]
    lead = form.begin + form.head
    tag = next((tag for tag in style.opens if lead.startswith(tag)), "")
    rest = _more(style, markup, many=many)
    if not tag:
        # A bare object is a call at the very beginning only.
        return [*lines, f"free: /[^{{](.|\\n)*/ | {_terms(markup, lead)} {rest}"]
    repeated = "*" if many and style.many else "?"
    return [
        *lines,
        f"free: tagged{repeated} {TEXT}",
        *markup.up_to("opening", tag),
        f"tagged: opening {_terms(markup, lead[len(tag) :])} {rest}",
    ]


def _calls(style: CallStyle, begin: str, markup: Markup, *, many: bool) -> str:
    lead = f"{_terms(markup, begin)} {_terms(markup, style.form.head)}"
    return f"{lead} {_more(style, markup, many=many)}"


def _more(style: CallStyle, markup: Markup, *, many: bool) -> str:
    """A call from its name on, others behind it, and the end."""
    form = style.form
    more = f" ({_terms(markup, form.between)} {_terms(markup, form.head)} call)*"
    return f"call{more if many and style.many else ''} {_terms(markup, form.end)}"


def _call_rules(style: CallStyle, tools: Sequence[Tool], markup: Markup) -> list[str]:
    """`call`: a call from its name on."""
    form = style.form
    lines = ["call: " + " | ".join(f"call_{place}" for place in range(len(tools)))]
    for place, tool in enumerate(tools):
        arguments = f"arguments_{place}"
        lead, tail = _terms(markup, tool.name + form.middle), _terms(markup, form.tail)
        lines.append(f"call_{place}: {lead} {arguments} {tail}")
        lines += argument_rules(arguments, form, tool.schema, markup)
    return lines


def _terms(markup: Markup, text: str) -> str:
    """A part of a form. A line break stands for itself, because what is behind it may be one thing or another
    and the lexer does not go back; NUMBER is any number."""
    parts = [part for part in _BREAKS.split(text) if part]
    return " ".join(_ANY_NUMBER if part == NUMBER else markup.terms(part) for part in parts) or '""'
