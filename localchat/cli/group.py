"""Root group of commands. A verb loads its module when it is used; anything else is a prompt."""

from importlib import import_module
from typing import TYPE_CHECKING, Final, NamedTuple

import click

from localchat import gc_control
from localchat.cli.options import ARGUMENTS
from localchat.cli.verb_words import ALIASES, refuse_meant_verb, spoken
from localchat.errors import UsageError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


class Verb(NamedTuple):
    """One verb. The table lists all of them for `--help` without importing their modules."""

    module: str
    """Holds the click command as `command`."""
    about: str
    """Its line in the overview."""


VERBS: Final = {
    "run": Verb("localchat.cli.chat.run", "Chat with a model, or ask it one question."),
    "serve": Verb(
        "localchat.cli.serving.serve", "Serve models over the OpenAI, Anthropic and Ollama APIs."
    ),
    "pull": Verb("localchat.cli.models.pull", "Download a model, or resume a download."),
    "list": Verb("localchat.cli.models.list", "List the models on this machine."),
    "show": Verb("localchat.cli.models.show", "Show a model's size, license and capabilities."),
    "fit": Verb(
        "localchat.cli.models.fit",
        "Check whether a model fits in memory, and show what to change if it does not.",
    ),
    "batch": Verb("localchat.cli.serving.batch", "Answer a file of prompts."),
    "bench": Verb("localchat.cli.measure.bench", "Measure a model or a server under load."),
    "quality": Verb(
        "localchat.cli.measure.quality",
        "Compare the answers of models, quantizations and KV cache types.",
    ),
    "tune": Verb(
        "localchat.cli.measure.tune", "Find the fastest settings of a model on this machine."
    ),
    "plan": Verb(
        "localchat.cli.measure.plan", "Estimate how many users a model can serve, and at what cost."
    ),
    "cp": Verb("localchat.cli.models.cp", "Give a model another name."),
    "rm": Verb("localchat.cli.models.rm", "Remove models, aliases and imported links."),
    "import": Verb(
        "localchat.cli.models.import_", "Add a model file under a name, or all models of a folder."
    ),
    "learn": Verb("localchat.cli.chat.learn", "Index documents, then ask about them with @NAME."),
    "history": Verb("localchat.cli.chat.history", "List, search, show and export conversations."),
    "cache": Verb("localchat.cli.chat.cache", "Show or clear the KV cache on disk."),
    "ps": Verb("localchat.cli.serving.ps", "List the models that the running server has loaded."),
    "stop": Verb(
        "localchat.cli.serving.stop", "Stop the running server, or unload one of its models."
    ),
    "doctor": Verb(
        "localchat.cli.settings.doctor", "Show what this machine and this build can do."
    ),
    "config": Verb("localchat.cli.settings.config", "Show and change settings."),
    "preset": Verb("localchat.cli.settings.preset", "List and edit presets, which @NAME applies."),
    "completion": Verb(
        "localchat.cli.settings.completion", "Print the completion script of a shell."
    ),
}

_PROMPT_MODULE = "localchat.cli.chat.run"
_OWN_FLAGS = ("--help", "-h", "--version", "-V")
_HELP_WORDS = ("--help", "-h", "help")
_HELP_ALL = "localchat.cli.group.help_all"
"""Key of the context's notes: the help lists every flag."""
_PROMPT = "\0prompt"
"""Internal name of the prompt command in the arguments; no shell can pass a zero byte."""
_MOST_VERB_WORDS = 3
"""Words after which a verb behind flags is the beginning of a sentence."""
_SEVERAL_NAMES = ("bench", "cp", "import", "quality", "rm")
"""Verbs that take more than one name, so that two words are no sentence yet."""
_PROMPT_FLAGS = (
    *("model", "remote", "system", "files", "continue_last", "conversation", "interactive"),
    *("schema", "regex", "grammar", "extract", "raw_prompt", "max_tokens", "temperature"),
)
"""Names of parameters that say that the words are a prompt."""
_AS_WORD = {"remote": ("serve",), "model": ("serve", "run", "show", "fit", "pull", "rm", "stop")}
"""Flags of a prompt whose value these verbs take as their MODEL argument."""


class RootGroup(click.Group):
    """Runs `localchat VERB …`. Everything else goes to the prompt command, which refuses a near verb."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name == _PROMPT:
            return _prompt_command()
        verb = ALIASES.get(cmd_name, cmd_name)
        return _command(VERBS[verb].module) if verb in VERBS else None

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if len(args) == 2 and args[0] in _HELP_WORDS and args[1] == "all":
            ctx.meta[_HELP_ALL] = True
            args = ["--help"]
        if args and not ctx.resilient_parsing:
            verb, prompt = spoken(args, VERBS)
            args = [_PROMPT, *prompt] if prompt is not None else verb or args
        completing_first_word = ctx.resilient_parsing and not args
        if not completing_first_word and (
            not args or args[0] not in (_PROMPT, *VERBS, *ALIASES, *_OWN_FLAGS)
        ):
            args = [_PROMPT, *args]
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        return ("" if name == _PROMPT else name), command, rest

    def shell_complete(self, ctx: click.Context, incomplete: str) -> "list[CompletionItem]":
        found = super().shell_complete(ctx, incomplete)
        if incomplete.startswith("@"):
            words = next(param for param in _prompt_command().params if param.name == "words")
            found += words.shell_complete(ctx, incomplete)
        if incomplete.startswith("-"):
            found += _prompt_command().shell_complete(ctx, incomplete)
        return found

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
        with formatter.section("Verbs (each has --help)"):
            formatter.write_dl([(name, verb.about) for name, verb in VERBS.items()])
        with formatter.section("By question"):
            formatter.write_dl(
                [(question.question, ", ".join(question.commands)) for question in QUESTIONS]
            )
        write_short(ctx, formatter, flags)


class DefaultGroup(click.Group):
    """A verb with subcommands. Without one of them, the first runs with the given flags."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        flags = bool(args) and args[0].startswith("-") and args[0] not in ctx.help_option_names
        if flags or not (args or ctx.resilient_parsing):
            args = [next(iter(self.commands)), *args]
        return super().parse_args(ctx, args)


def _command(module: str) -> click.Command:
    command = import_module(module).command
    assert isinstance(command, click.Command)
    gc_control.resume_gc()
    return command


def _prompt_command() -> click.Command:
    """The command of a prompt. It resumes garbage collection itself, once the engine is open."""
    command = import_module(_PROMPT_MODULE).prompt_command
    assert isinstance(command, click.Command)
    return command


def refuse_near_verb(words: tuple[str, ...], ctx: click.Context) -> None:
    """Raise UsageError if the words of a prompt were surely meant as a verb. `ctx`: of the prompt command."""
    from localchat.cli.chat.prompt_words import prompt_line

    first = words[0]
    as_prompt = prompt_line(ctx.meta[ARGUMENTS], ctx.command.params)
    if first in (*VERBS, *ALIASES):
        if len(words) > _MOST_VERB_WORDS:
            raise UsageError(
                "a prompt that begins with a verb needs -- before it",
                hint=f"To ask the model: {as_prompt}",
            )
        intended, left = _intended_command(words, ctx)
        unknown = f" ({first} takes no {', '.join(left)})" if left else ""
        raise UsageError(
            f"put flags after the verb: {intended}{unknown}",
            hint=f"To ask the model: {as_prompt}",
        )
    # A flag that only prompts have shows that a prompt was meant.
    if not any(
        ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
        for name in _PROMPT_FLAGS
    ):
        refuse_meant_verb(words, VERBS, as_prompt)


def question_instead(args: list[str], *, is_missing: bool) -> str:
    """Return the command that sends `args` as a prompt, if a sentence began with a verb; else nothing.

    `is_missing`: the verb failed because a model or a file does not exist."""
    from localchat.cli.chat.prompt_words import prompt_line

    if not args or args[0] not in (*VERBS, *ALIASES) or "--" in args:
        return ""
    words = [arg for arg in args[1:] if not arg.startswith("-")]
    verb = _command(VERBS[ALIASES.get(args[0], args[0])].module)
    if isinstance(verb, click.Group) and words and words[0] in verb.commands:
        return ""
    needed = 1
    if is_missing:
        # One name, or two for some verbs, is more likely a typo than a sentence.
        needed = 3 if args[0] in _SEVERAL_NAMES else 2
    if len(words) < needed or any(sign in word for word in words[:2] for sign in ":/.\\"):
        return ""
    return prompt_line(args, _prompt_command().params)


def _intended_command(words: tuple[str, ...], ctx: click.Context) -> tuple[str, list[str]]:
    """The intended command line, and the given flags that its verb does not take."""
    import shlex

    verb = ALIASES.get(words[0], words[0])
    known = {param.name: param for param in _command(VERBS[verb].module).params}
    line = ["localchat", *words]
    left = []
    for param in ctx.command.params:
        if not isinstance(param, click.Option) or param.name is None:
            continue
        if ctx.get_parameter_source(param.name) is not click.core.ParameterSource.COMMANDLINE:
            continue
        value = ctx.params.get(param.name)
        flag = (
            param.secondary_opts[-1] if value is False and param.secondary_opts else param.opts[-1]
        )
        if param.name in known:
            value = (
                [] if param.is_flag or not isinstance(value, str | int | float) else [str(value)]
            )
            line += [flag, *value]
        elif len(words) == 1 and words[0] in _AS_WORD.get(param.name, ()):
            line.insert(2, f"remote:{value}" if param.name == "remote" else str(value))
        else:
            left.append(flag)
    return shlex.join(line), left


def other_spelling(problem: click.NoSuchOption) -> str:
    """A replacement for a flag that a verb does not take; empty if there is none."""
    word = {"--remote": "remote", "-m": "model", "--model": "model"}.get(problem.option_name, "")
    if problem.ctx is None or problem.ctx.info_name not in _AS_WORD.get(word, ()):
        return ""
    return f"write {problem.ctx.command_path} {'remote:NAME' if word == 'remote' else 'MODEL'}"
