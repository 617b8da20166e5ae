"""Root group of commands. A verb loads its module when it is used. Anything else is a prompt."""

from importlib import import_module
from typing import TYPE_CHECKING

import click

from localchat import gc_control
from localchat.cli.options import ARGUMENTS
from localchat.cli.verb_words import refuse_meant_verb, translate, without_alias
from localchat.errors import UsageError
from localchat.suggestions import closest
from localchat.verbs import ALIASES, HEADINGS, VERBS

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


_QUESTION_WIDTH = 36
"""Columns of the questions in the overview, so that each fits in one line."""
_PROMPT_MODULE = "localchat.cli.chat.run"
_OWN_FLAGS = ("--help", "-h", "--version", "-V")
_HELP_WORDS = ("--help", "-h", "help")
_HELP_ALL = "localchat.cli.group.help_all"
"""Key in the notes of the context. If set, the help lists every flag."""
_PROMPT = "\0prompt"
"""Internal name of the prompt command in the arguments. No shell can pass a zero byte."""
_MAX_VERB_WORDS = 3
"""Words up to which a verb after flags is a verb. More words are a sentence."""
_SEVERAL_NAMES = ("bench", "cp", "import", "quality", "rm")
"""Verbs that take several names. Two words after them are not yet a sentence."""
_SUBCOMMAND_WORDS = (
    ("rm", "unset", "clear", "remove", "delete", "del"),
    ("list", "show", "ls"),
    ("add", "set", "new", "create", "edit"),
    ("rename", "mv"),
)
"""Words for the same act. A group of verbs has some of them."""
_PROMPT_FLAGS = (
    *("model", "remote", "system", "files", "continue_last", "conversation", "interactive"),
    *("schema", "regex", "grammar", "extract", "raw_prompt", "max_tokens", "temperature"),
)
"""Names of parameters that only prompts have."""


class RootGroup(click.Group):
    """Runs `localchat VERB …`. Everything else goes to the prompt command, which refuses misspelled verbs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name == _PROMPT:
            return _prompt_command()
        return _command(VERBS[cmd_name].module) if cmd_name in VERBS else None

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if len(args) == 2 and args[0] in _HELP_WORDS and args[1] == "all":
            ctx.meta[_HELP_ALL] = True
            args = ["--help"]
        if args and not ctx.resilient_parsing:
            args = translate(args)
        args = without_alias(args)
        # Without arguments, a shell completes the first word. Only the group itself offers verbs for it.
        completing_first_word = ctx.resilient_parsing and not args
        if not completing_first_word and (
            not args or args[0] not in (_PROMPT, *VERBS, *_OWN_FLAGS)
        ):
            args = [_PROMPT, *args]
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name, command, remaining = super().resolve_command(ctx, args)
        if name == _PROMPT:
            name = ""
        return name, command, remaining

    def shell_complete(self, ctx: click.Context, incomplete: str) -> "list[CompletionItem]":
        items = super().shell_complete(ctx, incomplete)
        if incomplete.startswith("@"):
            words = next(param for param in _prompt_command().params if param.name == "words")
            items += words.shell_complete(ctx, incomplete)
        if incomplete.startswith("-"):
            items += _prompt_command().shell_complete(ctx, incomplete)
        return items

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        name = ctx.command_path
        formatter.write_usage(name, "[FLAGS] [PROMPT]")
        formatter.write_usage(name, "VERB ...", prefix="   or: ")

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from localchat.cli.flag_groups import write_all, write_short
        from localchat.session.commands import QUESTIONS

        params = (*_prompt_command().params, *self.get_params(ctx))
        flags = [param for param in params if isinstance(param, click.Option)]
        if ctx.meta.get(_HELP_ALL):
            write_all(ctx, formatter, flags)
            return
        column = max(map(len, VERBS))
        for folder, heading in HEADINGS.items():
            verbs = [verb for verb in VERBS.values() if verb.folder == folder]
            with formatter.section(heading):
                # Padded, so that the texts of all sections begin in one column.
                formatter.write_dl([(verb.name.ljust(column), verb.about) for verb in verbs])
        with formatter.section("By question"):
            formatter.write_dl(
                [(question.question, ", ".join(question.commands)) for question in QUESTIONS],
                col_max=_QUESTION_WIDTH,
            )
        write_short(ctx, formatter, flags)


class DefaultGroup(click.Group):
    """A verb with subcommands. Without a subcommand, the first one runs with the given flags."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        has_flag = bool(args) and args[0].startswith("-") and args[0] not in ctx.help_option_names
        if has_flag or not (args or ctx.resilient_parsing):
            args = [next(iter(self.commands)), *args]
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if self.get_command(ctx, args[0]) is None:
            raise UnknownSubcommand(self, ctx, args[0])
        return super().resolve_command(ctx, args)


class UnknownSubcommand(click.UsageError):
    """Error for a word that is not a subcommand, with what was probably meant."""

    def __init__(self, group: DefaultGroup, ctx: click.Context, word: str) -> None:
        super().__init__(f"{ctx.command_path} has no command {word}", ctx)
        names = group.list_commands(ctx)
        similar = [
            name for words in _SUBCOMMAND_WORDS if word in words for name in words if name in names
        ]
        lines = []
        for name in similar or closest(word, names):
            command = group.get_command(ctx, name)
            assert command is not None
            lines.append(f"{ctx.command_path} {name}: {command.get_short_help_str(100)}")
        if word in VERBS and lines:
            lines.append(f"localchat {word}: {VERBS[word].about}")
        self.hint = "\n".join(lines)


def _command(module: str) -> click.Command:
    command = import_module(module).command
    assert isinstance(command, click.Command)
    gc_control.resume_gc()
    return command


def _verb_command(name: str) -> click.Command:
    """Return the command of a verb or of an alias."""
    verb, *subcommands = ALIASES.get(name, (name,))
    command = _command(VERBS[verb].module)
    for subcommand in subcommands:
        assert isinstance(command, click.Group)
        child = command.get_command(click.Context(command), subcommand)
        assert child is not None
        command = child
    return command


def _prompt_command() -> click.Command:
    """Return the command of a prompt. It resumes garbage collection once the engine is open."""
    command = import_module(_PROMPT_MODULE).prompt_command
    assert isinstance(command, click.Command)
    return command


def refuse_near_verb(words: tuple[str, ...], ctx: click.Context) -> None:
    """Raise UsageError if a prompt was certainly meant as a verb. `ctx` is that of the prompt command."""
    from localchat.cli.chat.prompt_words import prompt_line

    first = words[0]
    as_prompt = prompt_line(ctx.meta[ARGUMENTS], ctx.command.params)
    if first in (*VERBS, *ALIASES):
        if len(words) > _MAX_VERB_WORDS:
            raise UsageError(
                "a prompt that begins with a verb needs -- before it",
                hint=f"To ask the model: {as_prompt}",
            )
        raise UsageError(
            f"put flags after the verb: localchat {' '.join(words)} FLAGS",
            hint=f"localchat {first} --help lists them\nTo ask the model: {as_prompt}",
        )
    # A flag that only prompts have shows that a prompt was meant.
    if not any(_is_given(ctx, name) for name in _PROMPT_FLAGS):
        refuse_meant_verb(words, as_prompt)


def question_instead(args: list[str], *, is_missing: bool) -> str:
    """Return the command that sends a sentence as a prompt, or an empty string.

    `is_missing`: the verb failed because a model or a file does not exist.
    """
    from localchat.cli.chat.prompt_words import has_other_flags, prompt_line

    if not args or args[0] not in (*VERBS, *ALIASES) or "--" in args:
        return ""
    params = _prompt_command().params
    if has_other_flags(args, params):
        # A flag that only the verb has shows that the verb was meant.
        return ""
    words = [arg for arg in args[1:] if not arg.startswith("-")]
    verb = _verb_command(args[0])
    subcommands: list[str] = []
    if isinstance(verb, click.Group):
        subcommands = verb.list_commands(click.Context(verb))
    if words and words[0] in subcommands:
        return ""
    min_words = 1
    if is_missing:
        # One name, or two for some verbs, is more likely a typo than a sentence.
        min_words = 3 if args[0] in _SEVERAL_NAMES else 2
    if len(words) < min_words or any(sign in arg for arg in words[:2] for sign in ":/.\\"):
        return ""
    return prompt_line(args, params)


def _is_given(ctx: click.Context, name: str) -> bool:
    """Return True if the command line contains this parameter."""
    return ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
