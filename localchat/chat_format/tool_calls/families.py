"""Table of the families of models and their tool-call syntaxes."""

from dataclasses import replace

from localchat.chat_format.tool_calls import family
from localchat.chat_format.tool_calls.family import (
    NUMBER,
    TagSyntax,
    ToolCallFamily,
    ToolCallSyntax,
    tagged,
    wrapped,
)

_OBJECT = ('{"name": "', '", "arguments": ', "}")
_DEEP_OPENS = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>")
_DEEP_CLOSES = ("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>")
_DEEP_SPLITS = ("<｜tool▁sep｜>",)
_HARMONY = (
    "<|start|>",
    "<|channel|>",
    "<|constrain|>",
    "<|message|>",
    "<|end|>",
    "<|call|>",
    "<|return|>",
)


def _glm(name: str, signs: tuple[str, ...], tags: TagSyntax) -> ToolCallFamily:
    syntax = ToolCallSyntax(
        "<tool_call>", tags.gap, tags.end, between=tags.gap, written="tags", tags=tags
    )
    return ToolCallFamily(name, signs, syntax, ("<tool_call>",), ("</tool_call>",))


def _dsml(name: str, outer: str) -> ToolCallFamily:
    begin = f"<｜DSML｜{outer}>"
    end = f"</｜DSML｜{outer}>"
    syntax = tagged(family.DSML, begin + "\n", end="\n" + end)
    return ToolCallFamily(
        name, (begin,), syntax, (begin, family.DSML.name[0]), (end,), controls=("｜DSML｜",)
    )


def _listed(name: str, sign: str, begin: str, end: str) -> ToolCallFamily:
    """A list of objects between two tags."""
    syntax = ToolCallSyntax(*_OBJECT, begin=begin + "[", between=", ", end="]" + end)
    return ToolCallFamily(name, (sign,), syntax, (begin,), (end,), bare=True)


def _lfm(name: str, sign: str) -> ToolCallFamily:
    begin = "<|tool_call_start|>"
    end = "<|tool_call_end|>"
    syntax = ToolCallSyntax(
        "", "(", ")", begin=begin + "[", between=", ", end="]" + end, written="python"
    )
    return ToolCallFamily(name, (sign,), syntax, (begin,), (end,), bare=True)


HERMES = ToolCallFamily(
    "hermes",
    ("<tool_call>",),
    ToolCallSyntax('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>"),
    ("<tool_call>",),
    ("</tool_call>",),
    bare=True,
)

_MISTRAL = ToolCallFamily(
    "mistral",
    ("[TOOL_CALLS]", "[ARGS]"),
    ToolCallSyntax("[TOOL_CALLS]", "[ARGS]", "", between=""),
    ("[TOOL_CALLS]",),
    ("[/TOOL_CALLS]",),
    ("[CALL_ID]", "[ARGS]"),
    short_ids=True,
)

_LLAMA = ToolCallFamily(
    "llama3",
    ('{"name": function name, "parameters"',),
    ToolCallSyntax('{"name": "', '", "parameters": ', "}", between="; "),
    ("<|python_tag|>",),
    bare=True,
    parallel=False,
)

TOOL_CALL_FAMILIES: tuple[ToolCallFamily, ...] = (
    ToolCallFamily(
        "harmony",
        ("<|channel|>commentary", "functions."),
        ToolCallSyntax(
            "<|channel|>commentary to=functions.",
            " <|constrain|>json<|message|>",
            "",
            others=tuple(
                f"<|channel|>{channel}<|message|>"
                for channel in ("analysis", "commentary", "final")
            ),
            again="<|end|><|start|>assistant",
        ),
        ("<|channel|>",),
        controls=_HARMONY,
        parallel=False,
    ),
    ToolCallFamily(
        "muse",
        ("<atem:function_calls>", "<|message|>"),
        tagged(family.ATEM, "<atem:function_calls>\n", end="\n</atem:function_calls>"),
        ("<atem:function_calls>", family.ATEM.name[0]),
        ("</atem:function_calls>",),
        controls=("<|start|>", "<|message|>", "<|eom|>"),
    ),
    ToolCallFamily(
        "functionary-3.2",
        (">>>all", "<|end_header_id|>"),
        ToolCallSyntax("", "\n", "", between=">>>", others=("all\n",), again=">>>"),
        (">>>",),
    ),
    ToolCallFamily(
        "minimax-3",
        ("]<]minimax[>[",),
        ToolCallSyntax(
            ']<]minimax[>[<invoke name="',
            '">',
            "]<]minimax[>[</invoke>",
            begin="]<]minimax[>[<tool_call>\n",
            end="\n]<]minimax[>[</tool_call>",
            written="minimax",
        ),
        ("]<]minimax[>[<tool_call>", ']<]minimax[>[<invoke name="'),
        ("]<]minimax[>[</tool_call>",),
        controls=("]<]minimax[>[",),
    ),
    ToolCallFamily(
        "minimax-2",
        ("<minimax:tool_call>",),
        tagged(family.INVOKE, "<minimax:tool_call>\n", end="\n</minimax:tool_call>"),
        ("<minimax:tool_call>", family.INVOKE.name[0]),
        ("</minimax:tool_call>",),
    ),
    ToolCallFamily(
        "seed",
        ("<seed:tool_call>",),
        wrapped(family.SEED, "seed:tool_call"),
        ("<seed:tool_call>", "<function="),
        ("</seed:tool_call>", "</function>"),
    ),
    ToolCallFamily(
        "qwen3-coder",
        ("<function=", "<parameter="),
        wrapped(family.QWEN, "tool_call"),
        ("<tool_call>", "<function="),
        ("</tool_call>", "</function>"),
    ),
    ToolCallFamily(
        "functionary-3.1",
        ("<function=example_function_name>", "</function>"),
        ToolCallSyntax("<function=", ">", "</function>", between=""),
        ("<function=", "<|python_tag|>"),
        ("</function>",),
    ),
    ToolCallFamily(
        "minicpm",
        ('<function name="', '<param name="'),
        tagged(family.MINICPM),
        (family.MINICPM.name[0],),
        ("</function>",),
    ),
    ToolCallFamily(
        "hunyuan",
        ("<tool_call:opensource>",),
        ToolCallSyntax(
            "<tool_call:opensource>",
            "<tool_sep:opensource>\n",
            "</tool_call:opensource>",
            begin="<tool_calls:opensource>\n",
            end="\n</tool_calls:opensource>",
            written="tags",
            tags=family.HUNYUAN,
        ),
        ("<tool_calls:opensource>", "<tool_call:opensource>"),
        ("</tool_call:opensource>", "</tool_calls:opensource>"),
        ("<tool_sep:opensource>",),
    ),
    _glm("glm-dense", ("<tool_call>probe_tool<arg_key>",), family.GLM_DENSE),
    _glm("glm", ("<tool_call>", "<arg_key>"), family.GLM),
    _dsml("deepseek-v3.2", "function_calls"),
    _dsml("deepseek-v4", "tool_calls"),
    ToolCallFamily(
        "kimi-3",
        ("<|open|>", "<|sep|>"),
        tagged(family.KIMI, "<|open|>tools<|sep|>", "", "<|close|>tools<|sep|>"),
        ("<|open|>tools<|sep|>", family.KIMI.name[0]),
        ("<|close|>tools<|sep|>", "<|close|>message<|sep|>"),
        controls=("<|open|>", "<|close|>", "<|sep|>"),
    ),
    ToolCallFamily(
        "kimi-2",
        ("<|tool_call_argument_begin|>",),
        ToolCallSyntax(
            "<|tool_call_begin|>functions.",
            f":{NUMBER}<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
            begin="<|tool_calls_section_begin|>",
            between="",
            end="<|tool_calls_section_end|>",
        ),
        ("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
        ("<|tool_call_end|>", "<|tool_calls_section_end|>"),
        ("<|tool_call_argument_begin|>",),
    ),
    ToolCallFamily(
        "solar",
        ("<|tool_call:name|>",),
        ToolCallSyntax(
            f"<|tool_call:begin|>{NUMBER}<|tool_call:name|>",
            "<|tool_call:args|>",
            "<|tool_call:end|>",
            begin="<|tool_calls|>",
            between="",
        ),
        ("<|tool_calls|>", "<|tool_call:begin|>"),
        ("<|tool_call:end|>", "<|calls|>"),
        ("<|tool_call:name|>", "<|tool_call:args|>"),
        ("<|tool_call:name|>",),
    ),
    ToolCallFamily(
        "gemma-4",
        ("<|tool_call>call:",),
        ToolCallSyntax("<|tool_call>call:", "", "<tool_call|>", between="", written="gemma"),
        ("<|tool_call>",),
        ("<tool_call|>",),
        controls=('<|"|>',),
    ),
    ToolCallFamily(
        "command",
        ("<|START_ACTION|>",),
        ToolCallSyntax(
            f'{{"tool_call_id": "{NUMBER}", "tool_name": "',
            '", "parameters": ',
            "}",
            begin="<|START_ACTION|>[\n    ",
            between=",\n    ",
            end="\n]<|END_ACTION|>",
        ),
        ("<|START_ACTION|>",),
        ("<|END_ACTION|>",),
    ),
    ToolCallFamily(
        "command-plus",
        ("Action:", "directly-answer"),
        ToolCallSyntax(
            '{\n        "tool_name": "',
            '",\n        "parameters": ',
            "\n    }",
            begin="Action:\n```json\n[\n    ",
            between=",\n    ",
            end="\n]```",
        ),
        ("Action:",),
    ),
    ToolCallFamily(
        "apertus",
        ("<|tools_prefix|>",),
        ToolCallSyntax(
            '{"', '": ', "}", begin="<|tools_prefix|>[", between=", ", end="]<|tools_suffix|>"
        ),
        ("<|tools_prefix|>",),
        ("<|tools_suffix|>",),
    ),
    _lfm("lfm2", "<|tool_list_start|>"),
    _lfm("lfm2.5", "<|tool_call_start|>"),
    _lfm("lfm2.5-bare", "List of tools: ["),
    ToolCallFamily(
        "gigachat-3.1",
        ("<|function_call|>",),
        ToolCallSyntax("<|function_call|>" + _OBJECT[0], *_OBJECT[1:]),
        ("<|function_call|>", "function call<|role_sep|>"),
        parallel=False,
    ),
    ToolCallFamily(
        "gigachat",
        ("function call<|role_sep|>",),
        ToolCallSyntax("<|message_sep|>\n\nfunction call<|role_sep|>\n" + _OBJECT[0], *_OBJECT[1:]),
        ("<|message_sep|>\n\nfunction call<|role_sep|>", "function call<|role_sep|>"),
        controls=("<|message_sep|>", "<|role_sep|>"),
        parallel=False,
    ),
    ToolCallFamily(
        "deepseek-r1",
        ("<｜tool▁sep｜>", "```json"),
        ToolCallSyntax(
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
            "\n```json\n",
            "\n```<｜tool▁call▁end｜>",
            begin="<｜tool▁calls▁begin｜>",
            end="<｜tool▁calls▁end｜>",
        ),
        _DEEP_OPENS,
        _DEEP_CLOSES,
        _DEEP_SPLITS,
    ),
    ToolCallFamily(
        "deepseek-v3.1",
        ("<｜tool▁sep｜>",),
        ToolCallSyntax(
            "<｜tool▁call▁begin｜>",
            "<｜tool▁sep｜>",
            "<｜tool▁call▁end｜>",
            begin="<｜tool▁calls▁begin｜>",
            between="",
            end="<｜tool▁calls▁end｜>",
        ),
        _DEEP_OPENS,
        _DEEP_CLOSES,
        _DEEP_SPLITS,
    ),
    _MISTRAL,
    replace(
        _MISTRAL,
        name="mistral-list",
        signs=("[TOOL_CALLS]",),
        syntax=ToolCallSyntax(*_OBJECT, begin="[TOOL_CALLS][", between=", ", end="]"),
    ),
    ToolCallFamily(
        "phi",
        ("<|tool_call|>",),
        ToolCallSyntax(*_OBJECT, begin="<|tool_call|>[", between=", ", end="]<|/tool_call|>"),
        ("<|tool_call|>", "functools"),
        ("<|/tool_call|>",),
        bare=True,
    ),
    ToolCallFamily(
        "firefunction",
        ("functools[",),
        ToolCallSyntax(*_OBJECT, begin="functools[", between=", ", end="]"),
        ("functools",),
        bare=True,
    ),
    _listed("nemotron", "<TOOLCALL>", "<TOOLCALL>", "</TOOLCALL>"),
    _listed("apriel", "<tool_calls>[", "<tool_calls>", "</tool_calls>"),
    ToolCallFamily(
        "minimax-1",
        ("<tool_calls>",),
        ToolCallSyntax(*_OBJECT, begin="<tool_calls>\n", end="\n</tool_calls>"),
        ("<tool_calls>",),
        ("</tool_calls>",),
        bare=True,
    ),
    HERMES,
    _LLAMA,
    replace(_LLAMA, name="python-tag", signs=("<|python_tag|>",)),
)
"""Families, the most specific signs first."""

UNKNOWN = ToolCallFamily(
    "unknown",
    (),
    HERMES.syntax,
    (
        "<tool_call>",
        "<tool_calls>",
        "<TOOLCALL>",
        "<function_calls>",
        "[TOOL_CALLS]",
        "<|tool_call|>",
        "<|tool_call_start|>",
        "<|python_tag|>",
        "```tool_code",
    ),
    (
        "</tool_call>",
        "</tool_calls>",
        "</TOOLCALL>",
        "</function_calls>",
        "[/TOOL_CALLS]",
        "<|/tool_call|>",
        "<|tool_call_end|>",
    ),
    ("[ARGS]",),
    bare=True,
)
"""For a template that shows no family: the common tags, and a bare object."""


UNSURE = ("glm", "minimax-1", "hermes", "unknown")
"""Families that share their signs with others: a rendered call identifies them better than the source."""


def family_of(template: str) -> ToolCallFamily:
    """Find the family by a template's source, or by a call as the template renders it."""
    for candidate in TOOL_CALL_FAMILIES:
        if all(sign in template for sign in candidate.signs):
            return candidate
    return UNKNOWN
