"""The grammar of a whole answer: reasoning first, free, where the model reasons; then what the request asks.

With a grammar and tools together, an answer is either: a text of the grammar, or calls. With `tool_choice`
`required`, or the name of a tool, it is calls alone, whatever the grammar.
"""

import json
from collections.abc import Sequence
from typing import Any

from localchat.chatformat import ChatFormat
from localchat.chatformat.rendered import Rendered
from localchat.engine.request import GenerateRequest, Messages
from localchat.errors import UsageError
from localchat.loop.backend import Tokenizer
from localchat.loop.call_grammar import Tool, call_rules, free_rules, tool_of
from localchat.loop.grammar import Wanted, check_schema, entry_of, styled, wanted
from localchat.loop.lark import Markup

_CHOICES = ("auto", "none", "required")
_GAP = r"/[ \t\r\n]{0,8}/"


def answer_grammar(
    request: GenerateRequest, rendered: Rendered | None, chat: ChatFormat, tokenizer: Tokenizer
) -> Wanted | None:
    """What binds the answer to `request`; None: nothing does. Raises UsageError."""
    messages = request.prompt if isinstance(request.prompt, Messages) else None
    tools = _tools(messages)
    entries = [] if request.grammar is None else [entry_of(request.grammar)]
    forced = messages is not None and messages.tool_choice not in ("auto", "none")
    strict = bool(tools) and any(tool.strict for tool in tools)
    if not (entries or forced or strict):
        return None
    markup = Markup(tokenizer, (*chat.calls.markup, *chat.reasoning.markup))
    lines: list[str] = []
    bodies: list[str] = []
    if entries and not forced:
        bodies.append("@answer")
    if tools:
        many = messages is not None and messages.parallel_tool_calls
        if strict and not bodies and not forced:
            lines += free_rules(chat.calls, tools, markup, many=many)
            bodies.append("free")
        else:
            lines += call_rules(chat.calls, tools, markup, many=many, tagged=bool(bodies))
            bodies.append("calls")
    before, more = _reasoning(rendered, chat, markup)
    lark = "\n".join([f"start: {before}body", f"body: {' | '.join(bodies)}", *lines, *more])
    main = {"name": "main", "lark_grammar": lark}
    used = entries if "@answer" in bodies else []
    parts = [Wanted(json.dumps({"grammars": [_schema(tool)]}), _called(tool)) for tool in tools]
    if used and request.grammar is not None:
        parts.insert(0, wanted(request.grammar))
    source = json.dumps({"grammars": [main, *used]})
    return Wanted(source, parts[0].name if len(parts) == 1 else "the tools", tuple(parts))


def _called(tool: Tool) -> str:
    return f"the parameters of the tool {tool.name!r}"


def _schema(tool: Tool) -> dict[str, Any]:
    return {"name": "answer", "json_schema": styled(tool.schema)}


def _tools(messages: Messages | None) -> Sequence[Tool]:
    """The tools that the answer may call."""
    if messages is None:
        return ()
    choice = messages.tool_choice
    tools = [tool_of(tool) for tool in messages.tools]
    if choice == "none" or (choice == "auto" and not tools):
        return ()
    for tool in tools:
        check_schema(tool.schema, _called(tool))
    if not tools:
        raise UsageError(f"tool_choice {choice!r}: the request has no tools")
    if choice in _CHOICES:
        return tools
    named = [tool for tool in tools if tool.name == choice]
    if not named:
        raise UsageError(
            f"tool_choice {choice!r}: no tool of the request is called so",
            hint=f"auto, none, required, or one of: {', '.join(tool.name for tool in tools)}",
        )
    return named


def _reasoning(
    rendered: Rendered | None, chat: ChatFormat, markup: Markup
) -> tuple[str, list[str]]:
    """What comes before the answer proper, as a term and the rules behind it."""
    if rendered is None or not (rendered.opens_reasoning or rendered.may_reason):
        return "", []
    family = chat.reasoning
    lines: list[str] = []
    for place, tag in enumerate(family.closes):
        lines += markup.up_to(f"thought_{place}", tag)
    thoughts = " | ".join(f"thought_{place}" for place in range(len(family.closes)))
    lines.append(f"thought: {thoughts}")
    passed = [tag for tag in family.dropped if tag not in family.closes]
    around = " | ".join(markup.terms(tag) for tag in passed)
    lines.append(f"gap: {_GAP}" + (f" ({around})*" if around else ""))
    if rendered.opens_reasoning:
        return "thought gap ", lines
    opens = " | ".join(markup.terms(tag) for tag in family.opens)
    lines.append(f"opening_thought: {_GAP} ({opens})")
    return "(opening_thought thought)? gap " if around else "(opening_thought thought gap)? ", lines
