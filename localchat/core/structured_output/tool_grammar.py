"""Grammar of a whole answer: free reasoning first, if the model reasons, then what the request constrains.

With a grammar and tools, an answer is either a text of the grammar or tool calls. With `tool_choice`
`required`, or the name of a tool, it consists of calls only, even if there is a grammar. Calls use the model's
own syntax around the JSON schemas of the tools.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from localchat.backend_api.interface import Tokenizer
from localchat.chat_format import ChatFormat
from localchat.chat_format.parser import Rendered
from localchat.chat_format.tool_calls.family import NUMBER, ToolCallFamily
from localchat.core.structured_output.compiler import (
    GrammarSpec,
    check_schema,
    entry_source,
    grammar_spec,
    with_ends,
    with_style,
)
from localchat.core.structured_output.lark import TEXT, TagTerms, pattern
from localchat.core.structured_output.relaxation import is_possible, relax
from localchat.core.structured_output.tool_arguments import argument_rules
from localchat.engine.request import GenerateRequest, Messages
from localchat.errors import UsageError

_BREAKS = re.compile(f"(\n|{NUMBER})")
_ANY_NUMBER = "/[0-9]{1,4}/"
_BARE_KEYS = frozenset(("$schema", "description", "properties", "required", "title", "type"))
"""Keywords of a schema that describes no key beside its `properties`."""


class ToolSpec(NamedTuple):
    """A tool of a request."""

    name: str
    schema: Mapping[str, Any]
    strict: bool = False
    """The arguments must satisfy the schema."""
    dropped: tuple[str, ...] = ()
    """Keywords that were removed from the schema."""


def read_tool(description: Mapping[str, Any]) -> ToolSpec:
    """Read a tool of a request, with or without a `function` wrapper. Raises UsageError."""
    function = description.get("function", description)
    if not isinstance(function, Mapping) or not function.get("name"):
        raise UsageError("a tool of the request has no name")
    name = str(function["name"])
    schema = function.get("parameters") or {"type": "object", "properties": {}}
    if not isinstance(schema, Mapping):
        raise UsageError(f"the parameters of the tool {name!r} are not a JSON schema")
    is_bare = schema.keys() <= _BARE_KEYS and not schema.get("required")
    if is_bare and schema.get("properties") == {}:
        # A function without parameters fails if a model invents an argument.
        schema = {**schema, "additionalProperties": False}
    return ToolSpec(name, schema, bool(function.get("strict")))


def call_rules(
    family: ToolCallFamily,
    tools: Sequence[ToolSpec],
    markup: TagTerms,
    *,
    many: bool,
    tagged: bool = False,
) -> list[str]:
    """Return the lines of `calls`: a call of one of `tools`, or several with `many`.

    `tagged`: a tag marks the calls even if the family usually writes a bare object.
    """
    syntax = family.syntax
    begin = syntax.begin
    if tagged and family.untagged and not (begin + syntax.head).startswith(family.opens):
        begin = family.opens[0] + begin
    return [
        *_call_rules(family, tools, markup),
        f"calls: {_calls(family, begin, markup, many=many)}",
    ]


def free_rules(
    family: ToolCallFamily, tools: Sequence[ToolSpec], markup: TagTerms, *, many: bool
) -> list[str]:
    """Return the lines of `free`: any text, in which a call must satisfy the schemas after its tag."""
    syntax = family.syntax
    lines = _call_rules(family, tools, markup)
    if syntax.message_starts:
        calls = _calls(family, syntax.begin, markup, many=many)
        return [
            *lines,
            f"free: (other {_terms(markup, syntax.message_separator)})* (other | {calls}) | {TEXT}",
            f"other: ({' | '.join(markup.terms(other) for other in syntax.message_starts)}) {TEXT}",
        ]
    lead = syntax.begin + syntax.head
    tag = next((tag for tag in family.opens if lead.startswith(tag)), "")
    call = _rest(family, markup, many=many)
    bare_calls, bare_lines = _bare_calls(family, tools, anywhere=bool(tag))
    if not tag:
        # Without a tag, only an object that begins like a call is one, and only at the very start.
        return [*lines, f"free: {' | '.join([*bare_calls, TEXT])}", *bare_lines]
    repeated = "*" if many and family.parallel else "?"
    tagged = f"opening {_terms(markup, lead[len(tag) :])} {call}"
    return [
        *lines,
        f"free: tagged{repeated} {TEXT}",
        *markup.up_to("opening", tag),
        f"tagged: {' | '.join([tagged, *bare_calls])}",
        *bare_lines,
    ]


def _bare_calls(
    family: ToolCallFamily, tools: Sequence[ToolSpec], *, anywhere: bool
) -> tuple[list[str], list[str]]:
    """Return calls without a tag, which small models write, as terms and the rules that they need.

    Such a call begins where an object names an offered tool before its arguments. Every other object is text.
    `anywhere`: also after a text, not only at the start of the answer.
    """
    if not family.untagged or '"name": "' not in family.syntax.head:
        return [], []
    terms = []
    lines = []
    before = r"\s*"
    if anywhere:
        before = r"(.|\n)*"
    for index, tool in enumerate(tools):
        name = pattern(tool.name)
        # The lazy text ends at the colon. White space after it would never be part of it.
        start = rf'/{before}\{{\s*"name":\s*"{name}",\s*"(arguments|parameters)":/'
        lines.append(f"bare_{index}[lazy]: {start}")
        terms.append(rf"bare_{index} (/\s+/)? arguments_{index} /\s*\}}/")
    return terms, lines


def _calls(family: ToolCallFamily, begin: str, markup: TagTerms, *, many: bool) -> str:
    lead = f"{_terms(markup, begin)} {_terms(markup, family.syntax.head)}"
    return f"{lead} {_rest(family, markup, many=many)}"


def _rest(family: ToolCallFamily, markup: TagTerms, *, many: bool) -> str:
    """Return a call from its name on, further calls, and the end."""
    syntax = family.syntax
    calls = "call"
    if many and family.parallel:
        calls += f" ({_terms(markup, syntax.between)} {_terms(markup, syntax.head)} call)*"
    return f"{calls} {_terms(markup, syntax.end)}"


def _call_rules(family: ToolCallFamily, tools: Sequence[ToolSpec], markup: TagTerms) -> list[str]:
    """Return the lines of `call`: a call from its name on."""
    syntax = family.syntax
    lines = ["call: " + " | ".join(f"call_{index}" for index in range(len(tools)))]
    for index, tool in enumerate(tools):
        arguments = f"arguments_{index}"
        lead = _terms(markup, tool.name + syntax.middle)
        tail = _terms(markup, syntax.tail)
        lines.append(f"call_{index}: {lead} {arguments} {tail}")
        lines += argument_rules(arguments, syntax, tool.schema, markup)
    return lines


def _terms(markup: TagTerms, text: str) -> str:
    """Return a part of a call's syntax as terms. NUMBER stands for any number.

    A line break is a term of its own, because either of two terms may follow it and the lexer cannot backtrack.
    """
    parts = [part for part in _BREAKS.split(text) if part]
    return " ".join(_ANY_NUMBER if part == NUMBER else markup.terms(part) for part in parts) or '""'


_TOOL_CHOICES = ("auto", "none", "required")
_GAP = r"/[ \t\r\n]{0,8}/"


def answer_grammar(
    request: GenerateRequest, rendered: Rendered | None, chat: ChatFormat, tokenizer: Tokenizer
) -> GrammarSpec | None:
    """Return the grammar of the answer to `request`. None: no constraints. Raises UsageError."""
    messages = request.prompt if isinstance(request.prompt, Messages) else None
    tools = _tools(messages)
    answer = None if request.grammar is None else grammar_spec(request.grammar)
    forced = messages is not None and messages.tool_choice not in ("auto", "none")
    strict = bool(tools) and any(tool.strict for tool in tools)
    bound = bool(tools) and messages is not None and messages.bind_arguments
    if not (answer or forced or strict or bound):
        return None
    tools = [_relaxed(tool, spares_request=bound and not tool.strict) for tool in tools]
    markup = TagTerms(tokenizer, (*chat.tool_call_family.markup, *chat.reasoning_family.markup))
    lines: list[str] = []
    bodies: list[str] = []
    if answer and not forced:
        bodies.append("@answer")
    if tools:
        many = messages is not None and messages.parallel_tool_calls
        if (strict or bound) and not bodies and not forced:
            lines += free_rules(chat.tool_call_family, tools, markup, many=many)
            bodies.append("free")
        else:
            lines += call_rules(
                chat.tool_call_family, tools, markup, many=many, tagged=bool(bodies)
            )
            bodies.append("calls")
    before, more = _reasoning(rendered, chat, markup)
    lark = "\n".join([f"start: {before}body", f"body: {' | '.join(bodies)}", *lines, *more])
    main = {"name": "main", "lark_grammar": lark}
    parts = [
        GrammarSpec(
            entry_source({"json_schema": with_style(tool.schema)}),
            _display_name(tool),
            field="tools",
            dropped=tool.dropped,
            strict=tool.strict,
        )
        for tool in tools
    ]
    used = []
    if answer and "@answer" in bodies:
        parts.insert(0, answer)
        used = json.loads(answer.source)["grammars"]
    source = json.dumps({"grammars": [main, *used]})
    name = parts[0].name if len(parts) == 1 else "the tools"
    optional = not (answer or forced or strict)
    return GrammarSpec(source, name, tuple(parts), optional=optional)


def _relaxed(tool: ToolSpec, *, spares_request: bool) -> ToolSpec:
    """Return a tool with a schema that llguidance accepts. Raises UsageError.

    `spares_request`: take any object for an unusable schema instead of raising. The tools of a chat may be
    those of an MCP server, whose schema must not end every answer.
    """
    try:
        check_schema(tool.schema, _display_name(tool))
        relaxed, dropped = relax(tool.schema, "tools")
        schema = with_ends(relaxed, _display_name(tool), "tools")
        if not spares_request or is_possible(json.dumps(with_style(schema))):
            return tool._replace(schema=schema, dropped=dropped)
    except UsageError:
        if not spares_request:
            raise
    return tool._replace(schema={"type": "object"}, dropped=("parameters",))


def _display_name(tool: ToolSpec) -> str:
    return f"the parameters of the tool {tool.name!r}"


def _tools(messages: Messages | None) -> Sequence[ToolSpec]:
    """Return the tools that the answer may call. Raises UsageError."""
    if messages is None:
        return ()
    choice = messages.tool_choice
    tools = [read_tool(tool) for tool in messages.tools]
    if choice == "none" or (choice == "auto" and not tools):
        return ()
    if not messages.bind_arguments:
        for tool in tools:
            check_schema(tool.schema, _display_name(tool))
    if not tools:
        raise UsageError(f"tool_choice is {choice!r}, and the request has no tools")
    if choice in _TOOL_CHOICES:
        return tools
    named = [tool for tool in tools if tool.name == choice]
    if not named:
        raise UsageError(
            f"tool_choice is {choice!r}, and no tool of the request has that name",
            hint=f"use auto, none, required, or one of: {', '.join(tool.name for tool in tools)}",
        )
    return named


def _reasoning(
    rendered: Rendered | None, chat: ChatFormat, markup: TagTerms
) -> tuple[str, list[str]]:
    """Return the reasoning before the answer, as a term and the rules that it needs."""
    if rendered is None or not (rendered.opens_reasoning or rendered.may_reason):
        return "", []
    family = chat.reasoning_family
    lines: list[str] = []
    for index, tag in enumerate(family.closes):
        lines += markup.up_to(f"thought_{index}", tag)
    thoughts = " | ".join(f"thought_{index}" for index in range(len(family.closes)))
    lines.append(f"thought: {thoughts}")
    passed = [tag for tag in family.dropped if tag not in family.closes]
    around = " | ".join(markup.terms(tag) for tag in passed)
    gap = f"gap: {_GAP}"
    if around:
        gap += f" ({around})*"
    lines.append(gap)
    if rendered.opens_reasoning:
        return "thought gap ", lines
    opens = " | ".join(markup.terms(tag) for tag in family.opens)
    lines.append(f"opening_thought: {_GAP} ({opens})")
    if around:
        return "(opening_thought thought)? gap ", lines
    return "(opening_thought thought gap)? ", lines
