"""Root command, and the only place where errors become exit codes."""

import errno
import os
import re
import shlex
import sys
from collections.abc import Sequence

import click

from localchat import __version__
from localchat.cli.context import AppContext
from localchat.cli.group import RootGroup, UnknownSubcommand, question_instead
from localchat.cli.signals import interruptible
from localchat.cli.streams import OutputClosed, columns, stdout_trouble, tell
from localchat.cli.verb_words import ALSO
from localchat.cli.word_wrap import wrap_at_words
from localchat.errors import ExitCode, FileMissing, LocalchatError, ModelMissing
from localchat.sanitize import one_line, sanitize

_SIGPIPE_STATUS = 141
_COMPLETE = "_LOCALCHAT_COMPLETE"
_PROMPTED = ("localchat", "localchat run")
"""Commands that accept a prompt."""
_TYPES = {
    "is not a valid integer range": "is not a whole number",
    "is not a valid integer": "is not a whole number",
    "is not a valid float range": "is not a number",
    "is not a valid float": "is not a number",
}
"""Click's words for values of a wrong type, and ours."""
_RANGE = re.compile(r"(\d+)<=x<=(\d+)")
_EXTRA = "Got unexpected extra argument"
"""Start of click's message about an argument too many, which follows in parentheses."""
_MIN_FLAG_SIMILARITY = 0.7
"""Less is another word: --vote is not --remote."""
_WRITE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EBADF)
"""Errors of click's own writes to stdout, such as a help page. Other writers report theirs."""


@click.group(
    cls=RootGroup,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="localchat VERB --help explains a verb. localchat alone, on a terminal, starts a conversation. "
    "Everything after -- is a prompt, even if it looks like a verb. "
    f"Also understood: {ALSO}.",
)
@click.version_option(__version__, "-V", "--version", message="localchat %(version)s")
def root() -> None:
    """Chat with a language model on this machine, or pipe text through one.

    \b
    localchat "what is a KV cache?"
    cat report.txt | localchat "sum this up in five lines"
    localchat run MODEL
    """


def run(args: Sequence[str], app: AppContext | None = None) -> int:
    """Run the command and return its exit code. No error that a user can cause is raised."""
    try:
        with interruptible():
            return _run_and_flush(args, app if app is not None else AppContext())
    except KeyboardInterrupt:  # the second one, during the output after the first
        return ExitCode.INTERRUPTED


def _run_and_flush(args: Sequence[str], app: AppContext) -> int:
    status = _status(args, app)
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as problem:
        _forget_stdout()
        if isinstance(problem, BrokenPipeError):
            return _SIGPIPE_STATUS
        return status or ExitCode.ERROR
    return status


def _status(args: Sequence[str], app: AppContext) -> int:
    try:
        if _COMPLETE in app.environ:
            return _print_completions(app)
        status = _invoke(args, app)
        return status if isinstance(status, int) else ExitCode.OK
    except (OutputClosed, BrokenPipeError):
        # Exit like other tools, which SIGPIPE kills.
        return _SIGPIPE_STATUS
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except click.Abort:  # at a question, so end its line
        tell("")
        return ExitCode.INTERRUPTED
    except click.exceptions.Exit as end:
        # Raised by --help and --version.
        return end.exit_code
    except click.ClickException as problem:
        _print_error(_usage_message(problem, args), _usage_hint(problem, args))
        return ExitCode.USAGE
    except LocalchatError as problem:
        if app.debugging:
            raise
        hint = problem.hint
        if isinstance(problem, ModelMissing | FileMissing):
            prompt = question_instead(list(args), is_missing=True)
            if prompt:
                hint = f"{hint}\nTo ask the model: {prompt}".strip()
        _print_error(*(_limit_reached(problem.__cause__) or (problem.message, hint)))
        return problem.exit_code
    except Exception as problem:  # a traceback does not help users
        if app.debugging:
            raise
        if (
            isinstance(problem, OSError)
            and problem.errno in _WRITE_ERRORS
            and problem.filename is None
        ):
            _print_error(stdout_trouble(problem).message, "")
            return ExitCode.ERROR
        if isinstance(problem, OSError) and problem.errno == errno.ENAMETOOLONG:
            _print_error(f"a name is too long for a file: {problem.filename!s:.80}…", "")
            return ExitCode.USAGE
        if isinstance(problem, UnicodeEncodeError) and problem.encoding == "utf-8":
            _print_error(
                f"a file or folder whose name is not UTF-8 cannot be used here: {problem.object:.80}",
                "rename it",
            )
            return ExitCode.USAGE
        if isinstance(problem, FileNotFoundError) and problem.filename is None:
            _print_error("the current folder was deleted", "change to another one: cd")
            return ExitCode.USAGE
        if limit := _limit_reached(problem):
            _print_error(*limit)
            return ExitCode.ERROR
        _print_error(
            f"unexpected: {type(problem).__name__}: {problem}",
            "this is a bug in localchat; LOCALCHAT_DEBUG=1 shows the traceback",
        )
        return ExitCode.ERROR


def _limit_reached(problem: BaseException | None) -> tuple[str, str] | None:
    """Return message and hint if memory, open files or threads have run out."""
    if isinstance(problem, MemoryError):
        return "out of memory", "close other programs, or raise the limit: ulimit -v unlimited"
    if isinstance(problem, OSError) and problem.errno in (errno.EMFILE, errno.ENFILE):
        return "too many open files", "raise the limit: ulimit -n 1024"
    if isinstance(problem, RuntimeError) and "start new thread" in str(problem):
        return (
            "cannot start a thread",
            "close other programs, or raise the limits: ulimit -u, ulimit -v",
        )
    return None


def _invoke(args: Sequence[str], app: AppContext) -> object:
    """Invoke the command like click's `main`, without its handling of errors and closed pipes."""
    with root.make_context("localchat", list(args), obj=app) as context:
        return root.invoke(context)


def _print_completions(app: AppContext) -> int:
    """Print completions for the script of `localchat config completion`."""
    from click.shell_completion import shell_complete

    return shell_complete(root, {"obj": app}, "localchat", _COMPLETE, app.environ[_COMPLETE])


def _usage_message(problem: click.ClickException, args: Sequence[str]) -> str:
    """Return click's message on one line. Click lists choices on several."""
    context = _context(problem)
    if isinstance(problem, click.NoSuchOption):
        return _unknown_flag(problem.option_name, args, context)
    if isinstance(problem, click.BadOptionUsage) and "requires" in problem.message:
        return f"{problem.option_name} needs a value"
    if isinstance(problem, click.BadParameter) and context is not None:
        return _parameter_message(problem, context)
    message = " ".join(problem.format_message().split())
    if context is None or not message.startswith(_EXTRA):
        return message
    names = [
        param.make_metavar(context).strip("[].{}").replace("|", " or ")
        for param in context.command.params
        if isinstance(param, click.Argument)
    ]
    if not names:
        return f"{context.command_path} takes no arguments"
    return f"{context.command_path} takes only {' and '.join(names)}"


def _parameter_message(problem: click.BadParameter, context: click.Context) -> str:
    """Return the message for a missing or wrong value."""
    name = problem.param_hint
    if isinstance(problem.param, click.Option):
        name = max(problem.param.opts, key=len)
    elif problem.param is not None:
        name = problem.param.make_metavar(context).strip("[].{}").replace("|", " or ")
    if isinstance(problem, click.MissingParameter):
        return f"{context.command_path} needs {name}"
    message = " ".join(problem.message.split()).removesuffix(".")
    for words, ours in _TYPES.items():
        message = message.replace(words, ours)
    message = _RANGE.sub(r"\1 to \2", message)
    return f"{name}: {message[:1].lower()}{message[1:]}"


def _unknown_flag(name: str, args: Sequence[str], context: click.Context | None) -> str:
    """Return the message for an unknown flag, with the nearest one. Click would list unrelated ones."""
    from localchat.suggestions import closest
    from localchat.verbs import OTHER_FLAGS

    # Click splits -ngl into letters.
    typed = next((arg for arg in args if arg in OTHER_FLAGS and arg.startswith(name)), name)
    message = f"there is no flag {typed}"
    if context is None:
        return message
    params = context.command.params
    arguments = [
        param.make_metavar(context) for param in params if isinstance(param, click.Argument)
    ]
    if typed in ("-m", "--model") and any("MODEL" in name for name in arguments):
        return f"{message}; name the model without one: {context.command_path} MODEL"
    flags = {
        flag.lstrip("-"): flag
        for param in params
        if isinstance(param, click.Option) and not param.hidden
        for flag in (*param.opts, *param.secondary_opts)
    }
    advice = OTHER_FLAGS.get(typed, "")
    if advice.lstrip("-").partition(" ")[0] in flags:
        message += f"; did you mean {advice}?"
    elif near := closest(name.lstrip("-"), flags, min_similarity=_MIN_FLAG_SIMILARITY):
        message += f"; did you mean {flags[near[0]]}?"
    return message


def _context(problem: click.ClickException) -> click.Context | None:
    if isinstance(problem, click.UsageError):
        return problem.ctx
    return None


def _is_about_a_value(problem: click.ClickException) -> bool:
    """Return True for a missing or wrong value of a flag. No prompt has such a flag by accident."""
    if isinstance(problem, click.BadParameter):
        return isinstance(problem.param, click.Option)
    return isinstance(problem, click.BadOptionUsage)


def _has_output(command: click.Command) -> bool:
    """Return True if a command writes to the file of `-o`."""
    return any("--output" in param.opts for param in command.params)


def _usage_hint(problem: click.ClickException, args: Sequence[str]) -> str:
    command = "localchat"
    if context := _context(problem):
        command = context.command_path.strip() or command
    if isinstance(problem, UnknownSubcommand) and problem.hint:
        return problem.hint
    extra = problem.message.removeprefix(f"{_EXTRA} (").removesuffix(")")
    if context is not None and extra in args and _has_output(context.command):
        index = args.index(extra)
        with_flag = shlex.join(["localchat", *args[:index], "-o", *args[index:]])
        return f"-o names the file to write: {with_flag}"
    if _is_about_a_value(problem):
        return f"see {command} --help"
    if isinstance(problem, click.NoSuchOption):
        if command in _PROMPTED:
            start = next(
                (index for index, arg in enumerate(args) if arg.startswith(problem.option_name)),
                0,
            )
            prompt = shlex.join(["localchat", *args[:start], "--", *args[start:]])
            return f"{command} --help lists the flags\nTo send it as a prompt: {prompt}"
    elif prompt := question_instead(list(args), is_missing=False):
        return f"To ask the model: {prompt}"
    return f"see {command} --help"


def _print_error(message: str, hint: str) -> None:
    """Print an error to stderr, sanitized and wrapped at words if that is a terminal."""
    text = f"localchat: {one_line(message)}\n" + "".join(
        f"  {line}\n" for line in hint.splitlines()
    )
    if sys.stderr is None:
        return
    try:
        if sys.stderr.isatty():
            text = wrap_at_words(sanitize(text), columns(sys.stderr))
        # A file name may contain bytes that are not Unicode. Show them escaped.
        sys.stderr.write(text.encode("utf-8", "backslashreplace").decode("utf-8"))
        sys.stderr.flush()
    except OSError:
        pass  # stderr was closed by its reader


def _forget_stdout() -> None:
    """Redirect stdout to /dev/null, because the interpreter's last flush would fail again."""
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, sys.stdout.fileno())
    except (OSError, ValueError, AttributeError):
        pass  # stdout is closed or not a file, so the interpreter flushes nothing
    finally:
        os.close(null)
