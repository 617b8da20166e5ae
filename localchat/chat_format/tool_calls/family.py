"""Types that describe the tool-call syntax of a model family."""

from dataclasses import dataclass, replace
from typing import Literal

NUMBER = "\0"
"""Placeholder for any number in a syntax."""


@dataclass(frozen=True, slots=True)
class TagSyntax:
    """Tags of a call with a tag for each argument. A pair surrounds its part."""

    name: tuple[str, str]
    """If the first tag ends in a quote, the name is an attribute, and more attributes may follow."""
    key: tuple[str, str]
    value: tuple[str, str]
    end: str
    gap: str = "\n"
    """Text between these parts in training data."""
    string_attribute: str = ""
    """Attribute after the key that declares a string."""
    other_attribute: str = ""
    """Attribute after the key that declares a value of another type."""
    padded: bool = False
    """Whether a line break at either end of a value is padding."""
    shield: tuple[str, str] = ("", "")
    """Marks around a value that contains tags."""


def _invoke(prefix: str, *, string_attribute: str = "", other_attribute: str = "") -> TagSyntax:
    return TagSyntax(
        name=(f'<{prefix}invoke name="', '">'),
        key=(f'<{prefix}parameter name="', '">'),
        value=("", f"</{prefix}parameter>"),
        end=f"</{prefix}invoke>",
        string_attribute=string_attribute,
        other_attribute=other_attribute,
    )


QWEN = TagSyntax(
    name=("<function=", ">"),
    key=("<parameter=", ">"),
    value=("\n", "\n</parameter>"),
    end="</function>",
    padded=True,
)
SEED = TagSyntax(
    name=("<function=", ">"),
    key=("<parameter=", ">"),
    value=("", "</parameter>"),
    end="</function>",
)
MINICPM = TagSyntax(
    name=('<function name="', '">'),
    key=('<param name="', '">'),
    value=("", "</param>"),
    end="</function>",
    gap="",
    shield=("<![CDATA[", "]]>"),
)
INVOKE = _invoke("")
DSML = _invoke("｜DSML｜", string_attribute=' string="true"', other_attribute=' string="false"')
ATEM = _invoke("atem:")
GLM = TagSyntax(
    name=("", ""),
    key=("<arg_key>", "</arg_key>"),
    value=("\n<arg_value>", "</arg_value>"),
    end="</tool_call>",
)
GLM_DENSE = TagSyntax(
    name=GLM.name, key=GLM.key, value=("<arg_value>", "</arg_value>"), end=GLM.end, gap=""
)
HUNYUAN = TagSyntax(
    name=("", "<tool_sep:opensource>"),
    key=("<arg_key:opensource>", "</arg_key:opensource>"),
    value=("\n<arg_value:opensource>", "</arg_value:opensource>"),
    end="</tool_call:opensource>",
)

TAG_FIRST: tuple[TagSyntax, ...] = (QWEN, MINICPM, INVOKE, DSML, ATEM)
"""Syntaxes that start with a tag of their own."""

NAME_FIRST: tuple[TagSyntax, ...] = (GLM, HUNYUAN)
"""Syntaxes that start with the name, after a tag that they share with others."""


@dataclass(frozen=True, slots=True)
class ToolCallSyntax:
    """Tool calls as a family's training data writes them. Grammars enforce this syntax.

    A list of calls is `begin`, the calls separated by `between`, and `end`. A call is `head`, the name,
    `middle`, the arguments, and `tail`.
    """

    head: str
    middle: str
    tail: str
    begin: str = ""
    between: str = "\n"
    end: str = ""
    notation: Literal["json", "tags", "python", "gemma"] = "json"
    """Notation of the arguments."""
    tags: TagSyntax | None = None
    """Set for the notation `tags`."""
    message_starts: tuple[str, ...] = ()
    """Starts of messages other than calls, if an answer may consist of several messages."""
    message_separator: str = ""
    """Text between two messages of an answer."""


@dataclass(frozen=True, slots=True)
class ToolCallFamily:
    """Models that write tool calls in the same way."""

    name: str
    signs: tuple[str, ...]
    """Texts that all occur in the family's templates."""
    syntax: ToolCallSyntax
    opens: tuple[str, ...]
    """Tags before a call or a list of calls."""
    closes: tuple[str, ...] = ()
    """Tags after a call or a list of calls."""
    separators: tuple[str, ...] = ()
    """Tags between a name and its arguments."""
    inner_tags: tuple[str, ...] = ()
    """Tags inside arguments."""
    untagged: bool = False
    """Whether an answer may start with a JSON or Python call without a tag, if it names an offered tool."""
    short_ids: bool = False
    """Whether ids consist of nine letters and digits."""
    parallel: bool = True
    """Whether an answer may contain several calls."""

    @property
    def markup(self) -> tuple[str, ...]:
        """All tags. The detokenizer must print them even if they are control tokens."""
        return (*self.opens, *self.closes, *self.separators, *self.inner_tags)


def tagged(tags: TagSyntax, begin: str = "", end: str = "") -> ToolCallSyntax:
    """Return the syntax of a family with a tag for each argument."""
    return ToolCallSyntax(
        head=tags.name[0],
        middle=tags.name[1] + tags.gap,
        tail=tags.end,
        begin=begin,
        between="\n",
        end=end,
        notation="tags",
        tags=tags,
    )


def wrapped(tags: TagSyntax, outer: str) -> ToolCallSyntax:
    """Return the same syntax with an outer tag around each call."""
    syntax = tagged(tags)
    return replace(syntax, head=f"<{outer}>\n{syntax.head}", tail=f"{syntax.tail}\n</{outer}>")
