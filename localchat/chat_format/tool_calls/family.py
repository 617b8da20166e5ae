"""The forms in which families of models write a call with a tag for each argument."""

from dataclasses import dataclass, replace
from typing import Literal

NUMBER = "\0"
"""In a form: any number."""


@dataclass(frozen=True, slots=True)
class TagSyntax:
    """`name[0]`, the name, `name[1]`; for each argument `key[0]`, its key, `key[1]`, `value[0]`, the value,
    `value[1]`; then `end`. Where the first of `name` ends in a quote, so does the name, and more attributes may
    follow it. `gap`: what training puts behind these parts. `text`, `other`: an attribute behind the key that
    says whether the value is a string (in `{}`, what else it is). `padded`: a line break at
    either end of a value is none of it. `shield`: what stands around a value that holds tags of its own."""

    name: tuple[str, str]
    key: tuple[str, str]
    value: tuple[str, str]
    end: str
    gap: str = "\n"
    text: str = ""
    other: str = ""
    padded: bool = False
    shield: tuple[str, str] = ("", "")


def _invoke(prefix: str, *, text: str = "", other: str = "") -> TagSyntax:
    return TagSyntax(
        (f'<{prefix}invoke name="', '">'),
        (f'<{prefix}parameter name="', '">'),
        ("", f"</{prefix}parameter>"),
        f"</{prefix}invoke>",
        text=text,
        other=other,
    )


QWEN = TagSyntax(
    ("<function=", ">"),
    ("<parameter=", ">"),
    ("\n", "\n</parameter>"),
    "</function>",
    padded=True,
)
SEED = TagSyntax(("<function=", ">"), ("<parameter=", ">"), ("", "</parameter>"), "</function>")
MINICPM = TagSyntax(
    ('<function name="', '">'),
    ('<param name="', '">'),
    ("", "</param>"),
    "</function>",
    gap="",
    shield=("<![CDATA[", "]]>"),
)
INVOKE = _invoke("")
DSML = _invoke("｜DSML｜", text=' string="true"', other=' string="false"')
ATEM = _invoke("atem:")
KIMI = TagSyntax(
    ('<|open|>call tool="', f'" index="{NUMBER}"<|sep|>'),
    ('<|open|>argument key="', '"<|sep|>'),
    ("", "<|close|>argument<|sep|>"),
    "<|close|>call<|sep|>",
    gap="",
    text=' type="string"',
    other=' type="{}"',
)
GLM = TagSyntax(
    ("", ""),
    ("<arg_key>", "</arg_key>"),
    ("\n<arg_value>", "</arg_value>"),
    "</tool_call>",
)
GLM_DENSE = TagSyntax(GLM.name, GLM.key, ("<arg_value>", "</arg_value>"), GLM.end, gap="")
HUNYUAN = TagSyntax(
    ("", "<tool_sep:opensource>"),
    ("<arg_key:opensource>", "</arg_key:opensource>"),
    ("\n<arg_value:opensource>", "</arg_value:opensource>"),
    "</tool_call:opensource>",
)

HEADED: tuple[TagSyntax, ...] = (QWEN, MINICPM, INVOKE, DSML, ATEM, KIMI)
"""Forms that a tag of their own begins."""

BARE: tuple[TagSyntax, ...] = (GLM, HUNYUAN)
"""Forms that begin with the name, behind a tag that others have too."""


# What is known of how a family of models writes tool calls.


@dataclass(frozen=True, slots=True)
class ToolCallSyntax:
    """Calls as the family's training writes them: `begin`, then the calls with `between` in between, then
    `end`. A call is `head`, the name, `middle`, the arguments, `tail`. `written`: what the arguments are; as
    tags, `tags` says which. `others`: how messages begin that are no calls, where an answer may have several,
    `again` between them."""

    head: str
    middle: str
    tail: str
    begin: str = ""
    between: str = "\n"
    end: str = ""
    written: Literal["json", "tags", "python", "gemma", "minimax"] = "json"
    tags: TagSyntax | None = None
    others: tuple[str, ...] = ()
    again: str = ""


@dataclass(frozen=True, slots=True)
class ToolCallFamily:
    """A family. `signs`: texts that its template has, all of them. `opens`: tags behind which a call stands, or
    a list of calls; `closes`: tags behind one; `splits`: tags between a name and its arguments; `naming`: those
    of them that stand before the name; `controls`: tags inside arguments. `bare`: an object or Python call at
    the very beginning of an answer is a call too, if it names a tool that was offered. `short_ids`: ids are
    nine letters and digits. `many`: more than one call in an answer."""

    name: str
    signs: tuple[str, ...]
    syntax: ToolCallSyntax
    opens: tuple[str, ...]
    closes: tuple[str, ...] = ()
    splits: tuple[str, ...] = ()
    naming: tuple[str, ...] = ()
    controls: tuple[str, ...] = ()
    bare: bool = False
    short_ids: bool = False
    many: bool = True

    @property
    def markup(self) -> tuple[str, ...]:
        """Every tag: where it is a control token, the detokenizer must print it for the parser."""
        return (*self.opens, *self.closes, *self.splits, *self.controls)


def tagged(tags: TagSyntax, begin: str = "", between: str = "\n", end: str = "") -> ToolCallSyntax:
    """The form of a family with a tag for each argument."""
    return ToolCallSyntax(
        tags.name[0],
        tags.name[1] + tags.gap,
        tags.end,
        begin=begin,
        between=between,
        end=end,
        written="tags",
        tags=tags,
    )


def wrapped(tags: TagSyntax, outer: str) -> ToolCallSyntax:
    """The same, each call between tags of its own."""
    syntax = tagged(tags)
    return replace(syntax, head=f"<{outer}>\n{syntax.head}", tail=f"{syntax.tail}\n</{outer}>")
