"""Syntax of a family's tool calls, and the tags by which they are found."""

from dataclasses import dataclass, replace
from typing import Literal

NUMBER = "\0"
"""Stands for any number in a syntax."""


@dataclass(frozen=True, slots=True)
class TagSyntax:
    """Tags of a call that writes a tag for each argument. Pairs stand before and after their part."""

    name: tuple[str, str]
    """If the first ends in a quote, so does the name, and more attributes may follow it."""
    key: tuple[str, str]
    value: tuple[str, str]
    end: str
    gap: str = "\n"
    """Text that training puts between these parts."""
    text: str = ""
    """Attribute after the key that declares the value a string."""
    other: str = ""
    """Attribute after the key that declares another type, written in place of `{}`."""
    padded: bool = False
    """A line break at either end of a value is not part of it."""
    shield: tuple[str, str] = ("", "")
    """Marks around a value that contains tags."""


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
"""Syntaxes that begin with a tag of their own."""

BARE: tuple[TagSyntax, ...] = (GLM, HUNYUAN)
"""Syntaxes that begin with the name, after a tag that others share."""


@dataclass(frozen=True, slots=True)
class ToolCallSyntax:
    """Calls as a family's training writes them; a grammar holds the model to it.

    A list of calls is `begin`, the calls with `between` between them, `end`. A call is `head`, the name,
    `middle`, the arguments, `tail`.
    """

    head: str
    middle: str
    tail: str
    begin: str = ""
    between: str = "\n"
    end: str = ""
    written: Literal["json", "tags", "python", "gemma", "minimax"] = "json"
    """Notation of the arguments."""
    tags: TagSyntax | None = None
    """Set for the notation `tags`."""
    others: tuple[str, ...] = ()
    """Beginnings of messages that are not calls, if an answer may have several messages."""
    again: str = ""
    """Text between two messages of an answer."""


@dataclass(frozen=True, slots=True)
class ToolCallFamily:
    """Models that write tool calls alike: how to find their calls, and how to write them."""

    name: str
    signs: tuple[str, ...]
    """Texts that its template has, all of them."""
    syntax: ToolCallSyntax
    opens: tuple[str, ...]
    """Tags before a call or a list of calls."""
    closes: tuple[str, ...] = ()
    """Tags after a call or a list of calls."""
    splits: tuple[str, ...] = ()
    """Tags between a name and its arguments."""
    naming: tuple[str, ...] = ()
    """Those of `splits` that stand before the name."""
    controls: tuple[str, ...] = ()
    """Tags inside arguments."""
    bare: bool = False
    """An object or Python call at the beginning of an answer is a call too, if it names an offered tool."""
    short_ids: bool = False
    """Ids are nine letters and digits."""
    parallel: bool = True
    """An answer may have more than one call."""

    @property
    def markup(self) -> tuple[str, ...]:
        """Every tag. The detokenizer must print those that are control tokens."""
        return (*self.opens, *self.closes, *self.splits, *self.controls)


def tagged(tags: TagSyntax, begin: str = "", between: str = "\n", end: str = "") -> ToolCallSyntax:
    """Syntax of a family with a tag for each argument."""
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
    """The same, with tags around each call."""
    syntax = tagged(tags)
    return replace(syntax, head=f"<{outer}>\n{syntax.head}", tail=f"{syntax.tail}\n</{outer}>")
