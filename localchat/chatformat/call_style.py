"""What is known of how a family of models writes tool calls."""

from dataclasses import dataclass, replace
from typing import Literal

from localchat.chatformat.tag_forms import TagForm


@dataclass(frozen=True, slots=True)
class CallForm:
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
    tags: TagForm | None = None
    others: tuple[str, ...] = ()
    again: str = ""


@dataclass(frozen=True, slots=True)
class CallStyle:
    """A family. `signs`: texts that its template has, all of them. `opens`: tags behind which a call stands, or
    a list of calls; `closes`: tags behind one; `splits`: tags between a name and its arguments; `naming`: those
    of them that stand before the name; `controls`: tags inside arguments. `bare`: an object or Python call at
    the very beginning of an answer is a call too, if it names a tool that was offered. `short_ids`: ids are
    nine letters and digits. `many`: more than one call in an answer."""

    name: str
    signs: tuple[str, ...]
    form: CallForm
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


def tagged(tags: TagForm, begin: str = "", between: str = "\n", end: str = "") -> CallForm:
    """The form of a family with a tag for each argument."""
    return CallForm(
        tags.name[0],
        tags.name[1] + tags.gap,
        tags.end,
        begin=begin,
        between=between,
        end=end,
        written="tags",
        tags=tags,
    )


def wrapped(tags: TagForm, outer: str) -> CallForm:
    """The same, each call between tags of its own."""
    form = tagged(tags)
    return replace(form, head=f"<{outer}>\n{form.head}", tail=f"{form.tail}\n</{outer}>")
