"""How families of models write tool calls: the tags of each, and the form that a grammar holds them to."""

from dataclasses import replace

from localchat.chatformat import tag_forms
from localchat.chatformat.call_style import CallForm, CallStyle, tagged, wrapped
from localchat.chatformat.tag_forms import NUMBER, TagForm

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


def _glm(name: str, signs: tuple[str, ...], tags: TagForm) -> CallStyle:
    form = CallForm("<tool_call>", tags.gap, tags.end, between=tags.gap, written="tags", tags=tags)
    return CallStyle(name, signs, form, ("<tool_call>",), ("</tool_call>",))


def _dsml(name: str, outer: str) -> CallStyle:
    begin, end = f"<｜DSML｜{outer}>", f"</｜DSML｜{outer}>"
    form = tagged(tag_forms.DSML, begin + "\n", end="\n" + end)
    return CallStyle(
        name, (begin,), form, (begin, tag_forms.DSML.name[0]), (end,), controls=("｜DSML｜",)
    )


def _listed(name: str, sign: str, begin: str, end: str) -> CallStyle:
    """A list of objects between two tags."""
    form = CallForm(*_OBJECT, begin=begin + "[", between=", ", end="]" + end)
    return CallStyle(name, (sign,), form, (begin,), (end,), bare=True)


def _lfm(name: str, sign: str) -> CallStyle:
    begin, end = "<|tool_call_start|>", "<|tool_call_end|>"
    form = CallForm("", "(", ")", begin=begin + "[", between=", ", end="]" + end, written="python")
    return CallStyle(name, (sign,), form, (begin,), (end,), bare=True)


HERMES = CallStyle(
    "hermes",
    ("<tool_call>",),
    CallForm('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>"),
    ("<tool_call>",),
    ("</tool_call>",),
    bare=True,
)

_MISTRAL = CallStyle(
    "mistral",
    ("[TOOL_CALLS]", "[ARGS]"),
    CallForm("[TOOL_CALLS]", "[ARGS]", "", between=""),
    ("[TOOL_CALLS]",),
    ("[/TOOL_CALLS]",),
    ("[CALL_ID]", "[ARGS]"),
    short_ids=True,
)

_LLAMA = CallStyle(
    "llama3",
    ('{"name": function name, "parameters"',),
    CallForm('{"name": "', '", "parameters": ', "}", between="; "),
    ("<|python_tag|>",),
    bare=True,
    many=False,
)

STYLES: tuple[CallStyle, ...] = (
    CallStyle(
        "harmony",
        ("<|channel|>commentary", "functions."),
        CallForm(
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
        many=False,
    ),
    CallStyle(
        "muse",
        ("<atem:function_calls>", "<|message|>"),
        tagged(tag_forms.ATEM, "<atem:function_calls>\n", end="\n</atem:function_calls>"),
        ("<atem:function_calls>", tag_forms.ATEM.name[0]),
        ("</atem:function_calls>",),
        controls=("<|start|>", "<|message|>", "<|eom|>"),
    ),
    CallStyle(
        "functionary-3.2",
        (">>>all", "<|end_header_id|>"),
        CallForm("", "\n", "", between=">>>", others=("all\n",), again=">>>"),
        (">>>",),
    ),
    CallStyle(
        "minimax-3",
        ("]<]minimax[>[",),
        CallForm(
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
    CallStyle(
        "minimax-2",
        ("<minimax:tool_call>",),
        tagged(tag_forms.INVOKE, "<minimax:tool_call>\n", end="\n</minimax:tool_call>"),
        ("<minimax:tool_call>", tag_forms.INVOKE.name[0]),
        ("</minimax:tool_call>",),
    ),
    CallStyle(
        "seed",
        ("<seed:tool_call>",),
        wrapped(tag_forms.SEED, "seed:tool_call"),
        ("<seed:tool_call>", "<function="),
        ("</seed:tool_call>", "</function>"),
    ),
    CallStyle(
        "qwen3-coder",
        ("<function=", "<parameter="),
        wrapped(tag_forms.QWEN, "tool_call"),
        ("<tool_call>", "<function="),
        ("</tool_call>", "</function>"),
    ),
    CallStyle(
        "functionary-3.1",
        ("<function=example_function_name>", "</function>"),
        CallForm("<function=", ">", "</function>", between=""),
        ("<function=", "<|python_tag|>"),
        ("</function>",),
    ),
    CallStyle(
        "minicpm",
        ('<function name="', '<param name="'),
        tagged(tag_forms.MINICPM),
        (tag_forms.MINICPM.name[0],),
        ("</function>",),
    ),
    CallStyle(
        "hunyuan",
        ("<tool_call:opensource>",),
        CallForm(
            "<tool_call:opensource>",
            "<tool_sep:opensource>\n",
            "</tool_call:opensource>",
            begin="<tool_calls:opensource>\n",
            end="\n</tool_calls:opensource>",
            written="tags",
            tags=tag_forms.HUNYUAN,
        ),
        ("<tool_calls:opensource>", "<tool_call:opensource>"),
        ("</tool_call:opensource>", "</tool_calls:opensource>"),
        ("<tool_sep:opensource>",),
    ),
    _glm("glm-dense", ("<tool_call>probe_tool<arg_key>",), tag_forms.GLM_DENSE),
    _glm("glm", ("<tool_call>", "<arg_key>"), tag_forms.GLM),
    _dsml("deepseek-v3.2", "function_calls"),
    _dsml("deepseek-v4", "tool_calls"),
    CallStyle(
        "kimi-3",
        ("<|open|>", "<|sep|>"),
        tagged(tag_forms.KIMI, "<|open|>tools<|sep|>", "", "<|close|>tools<|sep|>"),
        ("<|open|>tools<|sep|>", tag_forms.KIMI.name[0]),
        ("<|close|>tools<|sep|>", "<|close|>message<|sep|>"),
        controls=("<|open|>", "<|close|>", "<|sep|>"),
    ),
    CallStyle(
        "kimi-2",
        ("<|tool_call_argument_begin|>",),
        CallForm(
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
    CallStyle(
        "solar",
        ("<|tool_call:name|>",),
        CallForm(
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
    CallStyle(
        "gemma-4",
        ("<|tool_call>call:",),
        CallForm("<|tool_call>call:", "", "<tool_call|>", between="", written="gemma"),
        ("<|tool_call>",),
        ("<tool_call|>",),
        controls=('<|"|>',),
    ),
    CallStyle(
        "command",
        ("<|START_ACTION|>",),
        CallForm(
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
    CallStyle(
        "command-plus",
        ("Action:", "directly-answer"),
        CallForm(
            '{\n        "tool_name": "',
            '",\n        "parameters": ',
            "\n    }",
            begin="Action:\n```json\n[\n    ",
            between=",\n    ",
            end="\n]```",
        ),
        ("Action:",),
    ),
    CallStyle(
        "apertus",
        ("<|tools_prefix|>",),
        CallForm(
            '{"', '": ', "}", begin="<|tools_prefix|>[", between=", ", end="]<|tools_suffix|>"
        ),
        ("<|tools_prefix|>",),
        ("<|tools_suffix|>",),
    ),
    _lfm("lfm2", "<|tool_list_start|>"),
    _lfm("lfm2.5", "<|tool_call_start|>"),
    _lfm("lfm2.5-bare", "List of tools: ["),
    CallStyle(
        "gigachat-3.1",
        ("<|function_call|>",),
        CallForm("<|function_call|>" + _OBJECT[0], *_OBJECT[1:]),
        ("<|function_call|>", "function call<|role_sep|>"),
        many=False,
    ),
    CallStyle(
        "gigachat",
        ("function call<|role_sep|>",),
        CallForm("<|message_sep|>\n\nfunction call<|role_sep|>\n" + _OBJECT[0], *_OBJECT[1:]),
        ("<|message_sep|>\n\nfunction call<|role_sep|>", "function call<|role_sep|>"),
        controls=("<|message_sep|>", "<|role_sep|>"),
        many=False,
    ),
    CallStyle(
        "deepseek-r1",
        ("<｜tool▁sep｜>", "```json"),
        CallForm(
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
    CallStyle(
        "deepseek-v3.1",
        ("<｜tool▁sep｜>",),
        CallForm(
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
        form=CallForm(*_OBJECT, begin="[TOOL_CALLS][", between=", ", end="]"),
    ),
    CallStyle(
        "phi",
        ("<|tool_call|>",),
        CallForm(*_OBJECT, begin="<|tool_call|>[", between=", ", end="]<|/tool_call|>"),
        ("<|tool_call|>", "functools"),
        ("<|/tool_call|>",),
        bare=True,
    ),
    CallStyle(
        "firefunction",
        ("functools[",),
        CallForm(*_OBJECT, begin="functools[", between=", ", end="]"),
        ("functools",),
        bare=True,
    ),
    _listed("nemotron", "<TOOLCALL>", "<TOOLCALL>", "</TOOLCALL>"),
    _listed("apriel", "<tool_calls>[", "<tool_calls>", "</tool_calls>"),
    CallStyle(
        "minimax-1",
        ("<tool_calls>",),
        CallForm(*_OBJECT, begin="<tool_calls>\n", end="\n</tool_calls>"),
        ("<tool_calls>",),
        ("</tool_calls>",),
        bare=True,
    ),
    HERMES,
    _LLAMA,
    replace(_LLAMA, name="python-tag", signs=("<|python_tag|>",)),
)
"""Families, the more telling signs first."""

UNKNOWN = CallStyle(
    "unknown",
    (),
    HERMES.form,
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
"""A template that shows no family: the usual tags, and a bare object."""


UNSURE = ("glm", "minimax-1", "hermes", "unknown")
"""Families that share their signs with others: how a call is rendered tells more than the source."""


def style_of(template: str) -> CallStyle:
    """The family that a template's source shows, or a call as it renders one."""
    for style in STYLES:
        if all(sign in template for sign in style.signs):
            return style
    return UNKNOWN
