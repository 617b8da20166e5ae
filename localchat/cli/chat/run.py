"""Commands `localchat "prompt"` and `localchat run MODEL ["prompt"]`: their flags and help.

The module that answers is imported when a command runs, because `--help` needs only the flags.
"""

from typing import TYPE_CHECKING

import click

from localchat.cli.chat.prompt_words import marked, unmarked
from localchat.cli.options import (
    AFTER_DASHES,
    ARGUMENTS,
    ThinkingCommand,
    complete_file,
    complete_model,
    engine_options,
)

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


class PromptWords(ThinkingCommand):
    """Accepts words that begin with a dash, and notes a `--` before the words."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[AFTER_DASHES] = "--" in args
        ctx.meta[ARGUMENTS] = tuple(args)
        remaining = super().parse_args(ctx, marked(args, self.params))
        ctx.params["words"] = unmarked(ctx.params.get("words") or ())
        return remaining


class PromptCommand(PromptWords):
    """Shows the overview as its help."""

    def get_help(self, ctx: click.Context) -> str:
        if ctx.parent is not None:
            return ctx.parent.get_help()
        return super().get_help(ctx)


def complete_conversation(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> "list[CompletionItem]":
    """Complete ids of the latest conversations, with their titles."""
    from localchat.cli.chat.conversation_options import complete

    return complete(ctx, incomplete)


def complete_mention(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> "list[CompletionItem]":
    """Complete documents as `@name`."""
    if not incomplete.startswith("@"):
        return []
    from localchat.cli.document_options import complete_documents

    return complete_documents(ctx, param, incomplete, sign="@")


def prompt_options(function: "click.decorators.FC") -> "click.decorators.FC":
    """Add the flags of one call that are not settings."""
    for decorator in (
        click.option(
            "--regex", metavar="PATTERN", help="Constrain the answer to a regular expression."
        ),
        click.option(
            "--grammar",
            metavar="FILE|GRAMMAR",
            shell_complete=complete_file,
            help="Constrain the answer to a grammar (Lark or GBNF).",
        ),
        click.option(
            "--schema",
            metavar="FILE|JSON",
            shell_complete=complete_file,
            help="Constrain the answer to a JSON Schema.",
        ),
        click.option(
            "--conversation",
            "conversation",
            metavar="ID",
            shell_complete=complete_conversation,
            help="Continue a conversation. The first digits of its ID suffice.",
        ),
        click.option(
            "-c",
            "--continue",
            "continue_last",
            is_flag=True,
            help="Continue the last conversation.",
        ),
        click.option(
            "--raw-prompt", is_flag=True, help="Send the prompt without the chat template."
        ),
        click.option(
            "--json",
            "as_json",
            is_flag=True,
            help="Print one JSON object with the answer and its metrics.",
        ),
        click.option(
            "-x", "--extract", is_flag=True, help="Print only the first code block of the answer."
        ),
        click.option(
            "--require-complete",
            is_flag=True,
            help="Exit with code 7 if a limit or a loop ended the answer.",
        ),
        click.option("--yes", is_flag=True, help="Allow tool calls that only read without asking."),
        click.option("-i", "--interactive", is_flag=True, help="Keep chatting after the answer."),
        click.option(
            "-f",
            "--file",
            "files",
            multiple=True,
            metavar="FILE",
            shell_complete=complete_file,
            help="Attach a file (text, PDF, DOCX, HTML, picture, recording) before the prompt. Repeatable.",
        ),
    ):
        function = decorator(function)
    return function


@click.command("ask", cls=PromptCommand)
@click.argument("words", nargs=-1, shell_complete=complete_mention)
@prompt_options
@engine_options(with_model=True)
@click.pass_context
def prompt_command(ctx: click.Context, /, words: tuple[str, ...], **_: object) -> int:
    """Ask the model."""
    from localchat.cli.group import refuse_near_verb

    if words and not ctx.meta[AFTER_DASHES]:
        refuse_near_verb(words, ctx)
    from localchat.cli.chat.ask import ask

    return ask(ctx, " ".join(words))


class RunCommand(PromptWords):
    """Lists only the most used flags in its help."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from localchat.cli.flag_groups import write_short

        options = [param for param in self.params if isinstance(param, click.Option)]
        write_short(ctx, formatter, options)


@click.command("run", cls=RunCommand)
@click.argument("model_word", metavar="[MODEL]", required=False, shell_complete=complete_model)
@click.argument("words", metavar="[PROMPT]", nargs=-1, shell_complete=complete_mention)
@prompt_options
@engine_options(with_model=False)
@click.pass_context
def command(
    ctx: click.Context, /, model_word: str | None, words: tuple[str, ...], **_: object
) -> int:
    """Chat with a model, or ask it one question.

    MODEL is a name or the path of a GGUF file. On a terminal, the command offers to download a missing model,
    lists models if you name none, and starts a conversation if there is no prompt.
    """
    from localchat.cli.chat.ask import ask

    if model_word is None and not _uses_remote(ctx):
        from localchat.cli.chat.choose_model import chosen_model

        model_word = chosen_model(ctx)
    return ask(ctx, " ".join(words), model_word)


def _uses_remote(ctx: click.Context) -> bool:
    """Return True if a remote server answers, so that no local model is needed."""
    from localchat.cli.resolve import Inputs

    return Inputs.of(ctx).settings().settings.remote is not None
