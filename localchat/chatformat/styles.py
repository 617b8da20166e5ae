"""How families of models write tool calls: the tags of each, and the form that a grammar holds them to."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CallForm:
    """Calls as the family's training writes them: `begin`, then the calls with `between` in between, then
    `end`. A call is `head`, the name, `middle`, the arguments as JSON (or as `xml` parameters), `tail`."""

    head: str
    middle: str
    tail: str
    begin: str = ""
    between: str = "\n"
    end: str = ""
    xml: bool = False


@dataclass(frozen=True, slots=True)
class CallStyle:
    """A family. `signs`: texts that its template has, all of them. `opens`: tags behind which a call stands, or
    a list of calls; `closes`: tags behind one; `splits`: tags between a name and its arguments. `bare`: an
    object at the very beginning of an answer is a call too, if it names a tool that was offered. `short_ids`:
    ids are nine letters and digits. `many`: more than one call in an answer."""

    name: str
    signs: tuple[str, ...]
    form: CallForm
    opens: tuple[str, ...]
    closes: tuple[str, ...] = ()
    splits: tuple[str, ...] = ()
    bare: bool = False
    short_ids: bool = False
    many: bool = True

    @property
    def markup(self) -> tuple[str, ...]:
        """Every tag: where it is a control token, the detokenizer must print it for the parser."""
        return (*self.opens, *self.closes, *self.splits)


_OBJECT = ('{"name": "', '", "arguments": ', "}")
_DEEP_OPENS = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>")
_DEEP_CLOSES = ("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>")
_DEEP_SPLITS = ("<｜tool▁sep｜>",)

HERMES = CallStyle(
    "hermes",
    ("<tool_call>",),
    CallForm('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>"),
    ("<tool_call>",),
    ("</tool_call>",),
    bare=True,
)

STYLES: tuple[CallStyle, ...] = (
    CallStyle(
        "qwen3-coder",
        ("<function=", "<parameter="),
        CallForm("<tool_call>\n<function=", ">\n", "</function>\n</tool_call>", xml=True),
        ("<tool_call>", "<function="),
        ("</tool_call>", "</function>"),
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
    CallStyle(
        "mistral",
        ("[TOOL_CALLS]", "[ARGS]"),
        CallForm("[TOOL_CALLS]", "[ARGS]", "", between=""),
        ("[TOOL_CALLS]",),
        ("[/TOOL_CALLS]",),
        ("[CALL_ID]", "[ARGS]"),
        short_ids=True,
    ),
    CallStyle(
        "mistral-list",
        ("[TOOL_CALLS]",),
        CallForm(*_OBJECT, begin="[TOOL_CALLS][", between=", ", end="]"),
        ("[TOOL_CALLS]",),
        ("[/TOOL_CALLS]",),
        ("[CALL_ID]", "[ARGS]"),
        short_ids=True,
    ),
    CallStyle(
        "phi",
        ("<|tool_call|>",),
        CallForm(*_OBJECT, begin="<|tool_call|>[", between=", ", end="]<|/tool_call|>"),
        ("<|tool_call|>", "functools"),
        ("<|/tool_call|>",),
        bare=True,
    ),
    HERMES,
    CallStyle(
        "llama3",
        ('{"name": function name, "parameters"',),
        CallForm('{"name": "', '", "parameters": ', "}", between="; "),
        ("<|python_tag|>",),
        bare=True,
        many=False,
    ),
    CallStyle(
        "python-tag",
        ("<|python_tag|>",),
        CallForm('{"name": "', '", "parameters": ', "}", between="; "),
        ("<|python_tag|>",),
        bare=True,
        many=False,
    ),
)
"""Families, the more telling signs first."""

UNKNOWN = CallStyle(
    "unknown",
    (),
    HERMES.form,
    ("<tool_call>", "[TOOL_CALLS]", "<|tool_call|>", "<|python_tag|>", "```tool_code"),
    ("</tool_call>", "[/TOOL_CALLS]", "<|/tool_call|>"),
    ("[ARGS]",),
    bare=True,
)
"""A template that shows no family: the usual tags, and a bare object."""


def style_of(template: str) -> CallStyle:
    """The family that a template's source shows."""
    for style in STYLES:
        if all(sign in template for sign in style.signs):
            return style
    return UNKNOWN
