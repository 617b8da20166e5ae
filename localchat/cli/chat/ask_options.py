"""Read the flags of one call that are not settings, such as its grammar."""

import re
from typing import TYPE_CHECKING, Final

import click
import msgspec

from localchat.cli.options import utf8_argument
from localchat.config.paths import expand_home, read_input
from localchat.engine.request import Grammar
from localchat.errors import FileMissing, UsageError

if TYPE_CHECKING:
    from localchat.tools.tool import Effect


class AskOptions(msgspec.Struct, frozen=True):
    """The flags of one call."""

    interactive: bool
    as_json: bool
    extract: bool
    raw_prompt: bool
    require_complete: bool
    yes: bool
    grammar: Grammar | None

    @property
    def allowed(self) -> "frozenset[Effect]":
        """Effects of tools that need no question."""
        if self.yes:
            return frozenset({"read"})
        return frozenset()


def ask_options(ctx: click.Context) -> AskOptions:
    """Return the flags of this call. Raises UsageError, FileMissing."""
    names = ("interactive", "as_json", "extract", "raw_prompt", "require_complete", "yes")
    flags = {name: bool(ctx.params[name]) for name in names}
    grammar = requested_grammar(ctx)
    options = AskOptions(**flags, grammar=grammar)
    if options.interactive and (options.as_json or options.extract or options.raw_prompt):
        raise UsageError("-i is a conversation; --json, -x and --raw-prompt are for one answer")
    if options.interactive and options.grammar is not None:
        raise UsageError("-i is a conversation; --schema, --grammar and --regex are for one answer")
    unused = {"-s": "system", "-c": "continue_last", "--conversation": "conversation"}
    for flag, parameter in unused.items():
        if options.raw_prompt and ctx.params[parameter]:
            raise UsageError(
                f"--raw-prompt sends the prompt as it is, so {flag} would have no effect",
                hint="write instructions and earlier messages into the prompt",
            )
    return options


_GRAMMAR_FLAGS: Final = ("schema", "grammar", "regex")
_MAX_GRAMMAR_BYTES: Final = 1 << 20
_INLINE: Final = {
    "--schema": "give the path of a schema, or a schema that begins with {",
    "--grammar": "give the path of a grammar, or a grammar that begins with start: or root ::=",
}
"""Forms of each flag."""
_RULE: Final = re.compile(r"\s*(?:[\w-]+\s*::=|start\s*:)")
"""Beginning of a grammar in GBNF or Lark. A file name may have a colon, but hardly after `start`."""


def requested_grammar(ctx: click.Context) -> Grammar | None:
    """Return the grammar that the flags request. The engine checks it. Raises UsageError, FileMissing."""
    flags = {name: ctx.params[name] for name in _GRAMMAR_FLAGS if ctx.params.get(name) is not None}
    if len(flags) > 1:
        raise UsageError(f"{' and '.join('--' + name for name in flags)} cannot be combined")
    match flags:
        case {"schema": argument}:
            text = utf8_argument(argument)
            is_schema = text.lstrip().startswith("{") or text in ("true", "false")
            if not is_schema:
                text = _read_grammar("--schema", text)
            return Grammar("json_schema", text)
        case {"grammar": argument}:
            if _RULE.match(argument):
                return Grammar("lark", utf8_argument(argument))
            return Grammar("lark", _read_grammar("--grammar", argument))
        case {"regex": pattern}:
            return Grammar("regex", utf8_argument(pattern))
    return None


def _read_grammar(flag: str, name: str) -> str:
    try:
        data = read_input(expand_home(name), _MAX_GRAMMAR_BYTES)
    except FileNotFoundError as problem:
        raise FileMissing(f"{flag}: there is no file {name}", hint=_INLINE[flag]) from problem
    except OSError as problem:
        raise UsageError(f"{flag}: {name} cannot be read: {problem.strerror}") from problem
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        raise UsageError(f"{flag}: {name} is not UTF-8 (byte {problem.start:,})") from problem
