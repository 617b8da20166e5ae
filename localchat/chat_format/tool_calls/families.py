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
        head="<tool_call>",
        middle=tags.gap,
        tail=tags.end,
        between=tags.gap,
        notation="tags",
        tags=tags,
    )
    return ToolCallFamily(
        name, signs=signs, syntax=syntax, opens=("<tool_call>",), closes=("</tool_call>",)
    )


def _dsml(name: str, outer: str) -> ToolCallFamily:
    begin = f"<｜DSML｜{outer}>"
    end = f"</｜DSML｜{outer}>"
    syntax = tagged(family.DSML, begin=begin + "\n", end="\n" + end)
    return ToolCallFamily(
        name,
        signs=(begin,),
        syntax=syntax,
        opens=(begin, family.DSML.name[0]),
        closes=(end,),
        inner_tags=("｜DSML｜",),
    )


def _object_list(begin: str, end: str = "") -> ToolCallSyntax:
    """Return the syntax of a JSON list of calls between two tags."""
    return ToolCallSyntax(*_OBJECT, begin=begin + "[", between=", ", end="]" + end)


def _listed(name: str, sign: str, begin: str, end: str) -> ToolCallFamily:
    return ToolCallFamily(
        name,
        signs=(sign,),
        syntax=_object_list(begin, end),
        opens=(begin,),
        closes=(end,),
        untagged=True,
    )


def _lfm(name: str, sign: str) -> ToolCallFamily:
    begin = "<|tool_call_start|>"
    end = "<|tool_call_end|>"
    syntax = ToolCallSyntax(
        head="",
        middle="(",
        tail=")",
        begin=begin + "[",
        between=", ",
        end="]" + end,
        notation="python",
    )
    return ToolCallFamily(
        name, signs=(sign,), syntax=syntax, opens=(begin,), closes=(end,), untagged=True
    )


HERMES = ToolCallFamily(
    "hermes",
    signs=("<tool_call>",),
    syntax=ToolCallSyntax(
        head='<tool_call>\n{"name": "', middle='", "arguments": ', tail="}\n</tool_call>"
    ),
    opens=("<tool_call>",),
    closes=("</tool_call>",),
    untagged=True,
)

_MISTRAL = ToolCallFamily(
    "mistral",
    signs=("[TOOL_CALLS]", "[ARGS]"),
    syntax=ToolCallSyntax(head="[TOOL_CALLS]", middle="[ARGS]", tail="", between=""),
    opens=("[TOOL_CALLS]",),
    closes=("[/TOOL_CALLS]",),
    separators=("[CALL_ID]", "[ARGS]"),
    short_ids=True,
)

_LLAMA = ToolCallFamily(
    "llama3",
    signs=('{"name": function name, "parameters"',),
    syntax=ToolCallSyntax(head='{"name": "', middle='", "parameters": ', tail="}", between="; "),
    opens=("<|python_tag|>",),
    untagged=True,
    parallel=False,
)

TOOL_CALL_FAMILIES: tuple[ToolCallFamily, ...] = (
    ToolCallFamily(
        "harmony",
        signs=("<|channel|>commentary", "functions."),
        syntax=ToolCallSyntax(
            head="<|channel|>commentary to=functions.",
            middle=" <|constrain|>json<|message|>",
            tail="",
            message_starts=tuple(
                f"<|channel|>{channel}<|message|>"
                for channel in ("analysis", "commentary", "final")
            ),
            message_separator="<|end|><|start|>assistant",
        ),
        opens=("<|channel|>",),
        inner_tags=_HARMONY,
        parallel=False,
    ),
    ToolCallFamily(
        "muse",
        signs=("<atem:function_calls>", "<|message|>"),
        syntax=tagged(family.ATEM, begin="<atem:function_calls>\n", end="\n</atem:function_calls>"),
        opens=("<atem:function_calls>", family.ATEM.name[0]),
        closes=("</atem:function_calls>",),
        inner_tags=("<|start|>", "<|message|>", "<|eom|>"),
    ),
    ToolCallFamily(
        "minimax-2",
        signs=("<minimax:tool_call>",),
        syntax=tagged(family.INVOKE, begin="<minimax:tool_call>\n", end="\n</minimax:tool_call>"),
        opens=("<minimax:tool_call>", family.INVOKE.name[0]),
        closes=("</minimax:tool_call>",),
    ),
    ToolCallFamily(
        "seed",
        signs=("<seed:tool_call>",),
        syntax=wrapped(family.SEED, "seed:tool_call"),
        opens=("<seed:tool_call>", "<function="),
        closes=("</seed:tool_call>", "</function>"),
    ),
    ToolCallFamily(
        "qwen3-coder",
        signs=("<function=", "<parameter="),
        syntax=wrapped(family.QWEN, "tool_call"),
        opens=("<tool_call>", "<function="),
        closes=("</tool_call>", "</function>"),
    ),
    ToolCallFamily(
        "minicpm",
        signs=('<function name="', '<param name="'),
        syntax=tagged(family.MINICPM),
        opens=(family.MINICPM.name[0],),
        closes=("</function>",),
    ),
    ToolCallFamily(
        "hunyuan",
        signs=("<tool_call:opensource>",),
        syntax=ToolCallSyntax(
            head="<tool_call:opensource>",
            middle="<tool_sep:opensource>\n",
            tail="</tool_call:opensource>",
            begin="<tool_calls:opensource>\n",
            end="\n</tool_calls:opensource>",
            notation="tags",
            tags=family.HUNYUAN,
        ),
        opens=("<tool_calls:opensource>", "<tool_call:opensource>"),
        closes=("</tool_call:opensource>", "</tool_calls:opensource>"),
        separators=("<tool_sep:opensource>",),
    ),
    _glm("glm-dense", ("<tool_call>probe_tool<arg_key>",), family.GLM_DENSE),
    _glm("glm", ("<tool_call>", "<arg_key>"), family.GLM),
    _dsml("deepseek-v3.2", "function_calls"),
    _dsml("deepseek-v4", "tool_calls"),
    ToolCallFamily(
        "kimi-2",
        signs=("<|tool_call_argument_begin|>",),
        syntax=ToolCallSyntax(
            head="<|tool_call_begin|>functions.",
            middle=f":{NUMBER}<|tool_call_argument_begin|>",
            tail="<|tool_call_end|>",
            begin="<|tool_calls_section_begin|>",
            between="",
            end="<|tool_calls_section_end|>",
        ),
        opens=("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
        closes=("<|tool_call_end|>", "<|tool_calls_section_end|>"),
        separators=("<|tool_call_argument_begin|>",),
    ),
    ToolCallFamily(
        "gemma-4",
        signs=("<|tool_call>call:",),
        syntax=ToolCallSyntax(
            head="<|tool_call>call:", middle="", tail="<tool_call|>", between="", notation="gemma"
        ),
        opens=("<|tool_call>",),
        closes=("<tool_call|>",),
        inner_tags=('<|"|>',),
    ),
    ToolCallFamily(
        "command",
        signs=("<|START_ACTION|>",),
        syntax=ToolCallSyntax(
            head=f'{{"tool_call_id": "{NUMBER}", "tool_name": "',
            middle='", "parameters": ',
            tail="}",
            begin="<|START_ACTION|>[\n    ",
            between=",\n    ",
            end="\n]<|END_ACTION|>",
        ),
        opens=("<|START_ACTION|>",),
        closes=("<|END_ACTION|>",),
    ),
    _lfm("lfm2", "<|tool_list_start|>"),
    _lfm("lfm2.5", "<|tool_call_start|>"),
    _lfm("lfm2.5-bare", "List of tools: ["),
    ToolCallFamily(
        "deepseek-r1",
        signs=("<｜tool▁sep｜>", "```json"),
        syntax=ToolCallSyntax(
            head="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
            middle="\n```json\n",
            tail="\n```<｜tool▁call▁end｜>",
            begin="<｜tool▁calls▁begin｜>",
            end="<｜tool▁calls▁end｜>",
        ),
        opens=_DEEP_OPENS,
        closes=_DEEP_CLOSES,
        separators=_DEEP_SPLITS,
    ),
    ToolCallFamily(
        "deepseek-v3.1",
        signs=("<｜tool▁sep｜>",),
        syntax=ToolCallSyntax(
            head="<｜tool▁call▁begin｜>",
            middle="<｜tool▁sep｜>",
            tail="<｜tool▁call▁end｜>",
            begin="<｜tool▁calls▁begin｜>",
            between="",
            end="<｜tool▁calls▁end｜>",
        ),
        opens=_DEEP_OPENS,
        closes=_DEEP_CLOSES,
        separators=_DEEP_SPLITS,
    ),
    _MISTRAL,
    replace(
        _MISTRAL,
        name="mistral-list",
        signs=("[TOOL_CALLS]",),
        syntax=_object_list("[TOOL_CALLS]"),
    ),
    ToolCallFamily(
        "phi",
        signs=("<|tool_call|>",),
        syntax=_object_list("<|tool_call|>", "<|/tool_call|>"),
        opens=("<|tool_call|>", "functools"),
        closes=("<|/tool_call|>",),
        untagged=True,
    ),
    _listed("nemotron", "<TOOLCALL>", "<TOOLCALL>", "</TOOLCALL>"),
    _listed("apriel", "<tool_calls>[", "<tool_calls>", "</tool_calls>"),
    HERMES,
    _LLAMA,
    replace(_LLAMA, name="python-tag", signs=("<|python_tag|>",)),
)
"""Families in the order of detection: the most specific signs come first."""

UNKNOWN = ToolCallFamily(
    "unknown",
    signs=(),
    syntax=HERMES.syntax,
    opens=(
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
    closes=(
        "</tool_call>",
        "</tool_calls>",
        "</TOOLCALL>",
        "</function_calls>",
        "[/TOOL_CALLS]",
        "<|/tool_call|>",
        "<|tool_call_end|>",
    ),
    separators=("[ARGS]",),
    untagged=True,
)
"""Fallback for templates of no known family: the common tags, and JSON objects without a tag."""


UNSURE = ("glm", "hermes", "unknown")
"""Families that share their signs with others. A rendered call identifies them better than the source."""


def family_of(template: str) -> ToolCallFamily:
    """Return the family of a template. template: its source, or a tool call that it rendered."""
    for candidate in TOOL_CALL_FAMILIES:
        if all(sign in template for sign in candidate.signs):
            return candidate
    return UNKNOWN
