"""Shared by tests: BOTH, FORMS, NAMED, TOOLS, gather, parser, whole."""

from typing import Any

from localchat.chat_format.parser import Answer, Call, Parser, Part
from localchat.chat_format.tool_calls.families import TOOL_CALL_FAMILIES, UNKNOWN
from localchat.chat_format.tool_calls.parser import CallParser

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {
                "town": {"type": "string"},
                "days": {"type": "integer"},
                "unit": {"type": ["string", "null"]},
                "where": {"type": "object"},
            },
        },
    },
}


CLOCK: dict[str, Any] = {"type": "function", "function": {"name": "get_time"}}


TOOLS = (WEATHER, CLOCK)


NAMED = {family.name: family for family in (*TOOL_CALL_FAMILIES, UNKNOWN)}


BOTH = [("get_weather", '{"town": "Köln", "days": 3}'), ("get_time", "{}")]


FORMS = {
    "hermes": "<tool_call>\n"
    '{"name": "get_weather", "arguments": {"town": "Köln", "days": 3}}\n</tool_call>\n'
    '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>',
    "llama3": '<|python_tag|>{"name": "get_weather", "parameters": {"town": "Köln", "days": 3}}; '
    '{"name": "get_time", "parameters": {}}',
    "mistral": '[TOOL_CALLS]get_weather[ARGS]{"town": "Köln", "days": 3}[TOOL_CALLS]get_time[ARGS]{}',
    "mistral-list": '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"town": "Köln", "days": 3}}, '
    '{"name": "get_time", "arguments": {}, "id": "abcdef123"}]',
    "deepseek-r1": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
    '```json\n{"town": "Köln", "days": 3}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function'
    "<｜tool▁sep｜>get_time\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek-v3.1": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
    '{"town": "Köln", "days": 3}<｜tool▁call▁end｜><｜tool▁call▁begin｜>get_time<｜tool▁sep｜>{}'
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "phi": '<|tool_call|>[{"name": "get_weather", "arguments": {"town": "Köln", "days": 3}}, '
    '{"type": "function", "function": {"name": "get_time", "arguments": {}}}]<|/tool_call|>',
    "qwen3-coder": "<tool_call>\n<function=get_weather>\n<parameter=town>\nKöln\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n"
    "<tool_call>\n<function=get_time>\n</function>\n</tool_call>",
    "seed": "<seed:tool_call>\n<function=get_weather>\n<parameter=town>Köln</parameter>\n"
    "<parameter=days>3</parameter>\n</function>\n</seed:tool_call>\n"
    "<seed:tool_call>\n<function=get_time>\n</function>\n</seed:tool_call>",
    "glm": "<tool_call>get_weather\n<arg_key>town</arg_key>\n<arg_value>Köln</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>get_time\n</tool_call>",
    "glm-dense": "<tool_call>get_weather<arg_key>town</arg_key><arg_value>Köln</arg_value>"
    "<arg_key>days</arg_key><arg_value>3</arg_value></tool_call><tool_call>get_time</tool_call>",
    "hunyuan": "<tool_calls:opensource>\n<tool_call:opensource>get_weather<tool_sep:opensource>\n"
    "<arg_key:opensource>town</arg_key:opensource>\n<arg_value:opensource>Köln</arg_value:opensource>\n"
    "<arg_key:opensource>days</arg_key:opensource>\n<arg_value:opensource>3</arg_value:opensource>\n"
    "</tool_call:opensource>\n<tool_call:opensource>get_time<tool_sep:opensource>\n</tool_call:opensource>\n"
    "</tool_calls:opensource>",
    "minimax-2": '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="town">Köln</parameter>\n'
    '<parameter name="days">3</parameter>\n</invoke>\n<invoke name="get_time">\n</invoke>\n'
    "</minimax:tool_call>",
    "muse": '<atem:function_calls>\n<atem:invoke name="get_weather">\n'
    '<atem:parameter name="town">Köln</atem:parameter>\n<atem:parameter name="days">3</atem:parameter>\n'
    '</atem:invoke>\n<atem:invoke name="get_time">\n</atem:invoke>\n</atem:function_calls>',
    "minicpm": '<function name="get_weather"><param name="town">Köln</param><param name="days">3</param>'
    '</function>\n<function name="get_time"></function>',
    "deepseek-v3.2": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
    '<｜DSML｜parameter name="town" string="true">Köln</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    '<｜DSML｜invoke name="get_time">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
    "kimi-2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
    '<|tool_call_argument_begin|>{"town": "Köln", "days": 3}<|tool_call_end|><|tool_call_begin|>'
    "functions.get_time:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
    "gemma-4": '<|tool_call>call:get_weather{town:<|"|>Köln<|"|>,days:3}<tool_call|>'
    "<|tool_call>call:get_time{}<tool_call|>",
    "command": '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_weather", '
    '"parameters": {"town": "Köln", "days": 3}},\n    {"tool_call_id": "1", "tool_name": "get_time", '
    '"parameters": {}}\n]<|END_ACTION|>',
    "lfm2": '<|tool_call_start|>[get_weather(town="Köln", days=3), get_time()]<|tool_call_end|>',
    "nemotron": '<TOOLCALL>[{"name": "get_weather", "arguments": {"town": "Köln", "days": 3}}, '
    '{"name": "get_time", "arguments": {}}]</TOOLCALL>',
    "apriel": '<tool_calls>[{"name": "get_weather", "arguments": {"town": "Köln", "days": 3}}, '
    '{"name": "get_time", "arguments": {}}]</tool_calls>',
}


def parser(family: str) -> CallParser:
    return CallParser(NAMED[family], TOOLS)


def gather(parts: list[Part]) -> tuple[str, list[tuple[str, str]]]:
    """Text, and (name, arguments) of each call."""
    text = "".join(part.text for part in parts if isinstance(part, Answer))
    calls: dict[int, tuple[str, str]] = {}
    for part in parts:
        if isinstance(part, Call):
            name, arguments = calls.get(part.number, ("", ""))
            assert not (name and part.name), "a name twice"
            assert bool(part.name) == bool(part.id)
            calls[part.number] = (name + part.name, arguments + part.arguments)
    assert list(calls) == list(range(len(calls)))
    return text, list(calls.values())


def whole(one: Parser, text: str) -> tuple[str, list[tuple[str, str]]]:
    return gather([*one.feed(text), *one.finish()])
