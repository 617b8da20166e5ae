"""`localchat "prompt"`: one answer, or a conversation where nothing is asked and a person sits there."""

import re
from typing import TYPE_CHECKING, Final

import click

from localchat.cli.options import ThinkingCommand, engine_options

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


FORCED = "localchat.cli.ask.forced"


def complete_conversation(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> "list[CompletionItem]":
    """The latest conversations whose id begins so, with their titles."""
    from localchat.cli.conversation_options import complete

    return complete(ctx, incomplete)


class AskCommand(ThinkingCommand):
    """Knows whether `--` stood before the words, and shows the overview as its help."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[FORCED] = "--" in args
        return super().parse_args(ctx, args)

    def get_help(self, ctx: click.Context) -> str:
        return ctx.parent.get_help() if ctx.parent is not None else super().get_help(ctx)


def prompt_options(function: "click.decorators.FC") -> "click.decorators.FC":
    """The flags that belong to one call and are no settings."""
    for decorator in (
        click.option("--regex", metavar="PATTERN", help="Answer with a match of this pattern."),
        click.option("--grammar", metavar="FILE", help="Answer with a text of this Lark grammar."),
        click.option(
            "--schema", metavar="FILE|JSON", help="Answer with JSON that this JSON Schema allows."
        ),
        click.option(
            "--conversation",
            "conversation",
            metavar="ID",
            shell_complete=complete_conversation,
            help="Go on with this conversation; its first digits do.",
        ),
        click.option(
            "-c",
            "--continue",
            "continue_last",
            is_flag=True,
            help="Go on with the last conversation.",
        ),
        click.option(
            "--raw-prompt", is_flag=True, help="Send the prompt without the chat template."
        ),
        click.option("--json", "as_json", is_flag=True, help="Print one JSON object with figures."),
        click.option(
            "-x", "--extract", is_flag=True, help="Print the first fenced code block only."
        ),
        click.option("-i", "--interactive", is_flag=True, help="Then go on as a conversation."),
        click.option(
            "-f",
            "--file",
            "files",
            multiple=True,
            metavar="FILE",
            help="Text that comes first; repeatable.",
        ),
    ):
        function = decorator(function)
    return function


@click.command("ask", cls=AskCommand)
@click.argument("words", nargs=-1)
@prompt_options
@engine_options(with_model=True)
@click.pass_context
def command(ctx: click.Context, /, words: tuple[str, ...], **_: object) -> int:
    """Ask the model."""
    from localchat.cli.group import refuse_near_verb

    if words and not ctx.meta[FORCED]:
        refuse_near_verb(words, ctx)
    from localchat.cli.converse import converse  # loads what a prompt needs

    return converse(ctx, " ".join(words))


# The first fenced code block of a Markdown text (CommonMark's fences; the indentation of the opening fence
# is taken off the lines).


_OPEN: Final = re.compile(r"^( {0,3})(`{3,}(?=[^`\n]*$)|~{3,})[^\n]*$", re.MULTILINE)


def first_code_block(text: str, *, finished: bool = True) -> str | None:
    """The code between the first fences, without them; None where there is none. A block that is never
    closed reaches to the end of a finished text, and is none yet in an unfinished one."""
    opening = _OPEN.search(text)
    if opening is None:
        return None
    indent, fence = opening.group(1), opening.group(2)
    code: list[str] = []
    for line in text[opening.end() + 1 :].splitlines(keepends=True):
        bare = line.strip()
        closes = bare and not bare.strip(fence[0]) and len(bare) >= len(fence)
        if closes and len(line) - len(line.lstrip(" ")) <= 3 and (finished or line.endswith("\n")):
            return "".join(code)
        code.append(_without(indent, line))
    return "".join(code) if finished else None


def _without(indent: str, line: str) -> str:
    spaces = len(line) - len(line.lstrip(" "))
    return line[min(len(indent), spaces) :]
