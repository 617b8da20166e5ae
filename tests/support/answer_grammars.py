"""Shared by tests: ONE, SCHEMA, SIGNS."""

from localchat.engine.request import Grammar
from tests.support.tool_calls import FORMS

SCHEMA = Grammar(
    "json_schema",
    '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], '
    '"additionalProperties": false}',
)


SIGNS = {
    "hermes": "<tool_call>",
    "llama3": '{"name": function name, "parameters"',
    "mistral": "[TOOL_CALLS][ARGS]",
    "mistral-list": "[TOOL_CALLS]",
    "deepseek-r1": "<｜tool▁sep｜>```json",
    "deepseek-v3.1": "<｜tool▁sep｜>",
    "phi": "<|tool_call|>",
    "qwen3-coder": "<function=<parameter=",
    "seed": "<seed:tool_call>",
    "glm": "<tool_call><arg_key>",
    "hunyuan": "<tool_call:opensource>",
    "minimax-2": "<minimax:tool_call>",
    "muse": "<atem:function_calls><|message|>",
    "minicpm": '<function name="<param name="',
    "deepseek-v3.2": "<｜DSML｜function_calls>",
    "kimi-2": "<|tool_call_argument_begin|>",
    "gemma-4": "<|tool_call>call:",
    "command": "<|START_ACTION|>",
    "lfm2": "<|tool_list_start|>",
    "nemotron": "<TOOLCALL>",
    "apriel": "<tool_calls>[",
}


ONE = {
    **FORMS,
    "llama3": '{"name": "get_weather", "parameters": {"town": "Köln", "days": 3}}',
    "mistral-list": '[TOOL_CALLS][{"name": "get_weather", "arguments": {"town": "Köln", "days": 3}}, '
    '{"name": "get_time", "arguments": {}}]',
    "phi": '<|tool_call|>[{"name": "get_weather", "arguments": {"town": "Köln", "days": 3}}, '
    '{"name": "get_time", "arguments": {}}]<|/tool_call|>',
    "gemma-4": FORMS["gemma-4"].replace('town:<|"|>Köln<|"|>,days:3', 'days:3,town:<|"|>Köln<|"|>'),
}
