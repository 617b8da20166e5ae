"""Root command, and the one place where errors become exit codes."""

import errno
import os
import resource  # now, as no file can be opened where a limit is met
import shlex
import sys
from collections.abc import Sequence

import click

from localchat import __version__
from localchat.cli.context import AppContext
from localchat.cli.group import RootGroup, other_spelling, question_instead
from localchat.cli.signals import interruptible
from localchat.cli.streams import OutputClosed, columns, stdout_trouble, tell
from localchat.cli.verb_words import ALSO
from localchat.cli.word_wrap import wrap_at_words
from localchat.errors import ExitCode, FileMissing, LocalchatError, ModelMissing
from localchat.sanitize import sanitize

_SIGPIPE_STATUS = 141
_COMPLETE = "_LOCALCHAT_COMPLETE"
_PROMPTED = ("localchat", "localchat run")
"""Commands that take a prompt."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EBADF)
"""Errors of click's own writes to stdout, such as a help page; other writes report theirs themselves."""


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
    """Run the command with these arguments; returns the exit code. Raises nothing that a user can cause."""
    used = app if app is not None else AppContext()
    try:
        with interruptible():
            return _flushed(args, used)
    except KeyboardInterrupt:  # a second one, while the end after the first was printed
        return ExitCode.INTERRUPTED


def _flushed(args: Sequence[str], used: AppContext) -> int:
    status = _status(args, used)
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as problem:
        _forget_stdout()
        if isinstance(problem, BrokenPipeError):
            return _SIGPIPE_STATUS
        return status or ExitCode.ERROR
    return status


def _status(args: Sequence[str], used: AppContext) -> int:
    try:
        status = _completed(used) if _COMPLETE in used.environ else _invoked(args, used)
        return status if isinstance(status, int) else ExitCode.OK
    except (OutputClosed, BrokenPipeError):
        return _SIGPIPE_STATUS
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except click.Abort:  # at a question, whose line has no end yet
        tell("")
        return ExitCode.INTERRUPTED
    except click.exceptions.Exit as end:
        return end.exit_code
    except click.ClickException as problem:
        _print_error(_usage_message(problem), _usage_hint(problem, args))
        return ExitCode.USAGE
    except LocalchatError as problem:
        if used.debugging:
            raise
        hint = problem.hint
        if isinstance(problem, ModelMissing | FileMissing):
            instead = question_instead(list(args), is_missing=True)
            hint = f"{hint}\nTo ask the model: {instead}".strip() if instead else hint
        _print_error(*(_limit_reached(problem.__cause__) or (problem.message, hint)))
        return problem.exit_code
    except Exception as problem:  # a traceback helps no user
        if used.debugging:
            raise
        if isinstance(problem, OSError) and problem.errno in _FULL and problem.filename is None:
            _print_error(stdout_trouble(problem).message, "")
            return ExitCode.ERROR
        if isinstance(problem, OSError) and problem.errno == errno.ENAMETOOLONG:
            _print_error(f"a name is too long for a file: {problem.filename!s:.80}…", "")
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
    """Message and hint for a limit of the system that this process has met; None: it met none."""

    def limit(kind: int, unit: int = 1) -> str:
        soft = resource.getrlimit(kind)[0]
        if soft == resource.RLIM_INFINITY:
            return "unlimited"
        return f"{soft // unit:,}"

    if isinstance(problem, MemoryError):
        most = limit(resource.RLIMIT_AS, 1024)
        hint = "close other programs" if most == "unlimited" else "raise it: ulimit -v unlimited"
        return f"out of memory (ulimit -v is {most})", hint
    if isinstance(problem, OSError) and problem.errno in (errno.EMFILE, errno.ENFILE):
        most = limit(resource.RLIMIT_NOFILE)
        return f"too many open files (ulimit -n is {most})", "raise it: ulimit -n 1024"
    if isinstance(problem, RuntimeError) and "start new thread" in str(problem):
        most = limit(resource.RLIMIT_NPROC)
        return (
            f"no thread can be started (ulimit -u is {most})",
            "raise it, or end other programs; ulimit -v limits threads too",
        )
    return None


def _invoked(args: Sequence[str], app: AppContext) -> object:
    """Invoke the command as click's `main` does, without its handling of errors and closed pipes."""
    with root.make_context("localchat", list(args), obj=app) as context:
        return root.invoke(context)


def _completed(app: AppContext) -> int:
    """Print completions for a shell, as the script of `localchat config completion` asks."""
    from click.shell_completion import shell_complete

    return shell_complete(root, {"obj": app}, "localchat", _COMPLETE, app.environ[_COMPLETE])


def _usage_message(problem: click.ClickException) -> str:
    """Return click's message on one line, which lists choices over several."""
    message = " ".join(problem.format_message().split())
    context = problem.ctx if isinstance(problem, click.UsageError) else None
    if context is not None and message.startswith("Got unexpected extra argument"):
        takes = [param for param in context.command.params if isinstance(param, click.Argument)]
        if not takes:
            return f"{context.command_path} takes no arguments"
    return message


def _usage_hint(problem: click.ClickException, args: Sequence[str]) -> str:
    context = problem.ctx if isinstance(problem, click.UsageError) else None
    command = (context.command_path.strip() if context else "") or "localchat"
    if isinstance(problem, click.NoSuchOption):
        if instead := other_spelling(problem):
            return instead
        if command in _PROMPTED:
            start = next(
                (n for n, arg in enumerate(args) if arg.startswith(problem.option_name)), 0
            )
            as_prompt = shlex.join(["localchat", *args[:start], "--", *args[start:]])
            return f"{command} --help lists the flags\nTo send it as a prompt: {as_prompt}"
    elif instead := question_instead(list(args), is_missing=False):
        return f"To ask the model: {instead}"
    return f"see {command} --help"


def _print_error(message: str, hint: str) -> None:
    """Print an error to stderr, sanitized and wrapped at words if that is a terminal."""
    text = f"localchat: {message}\n" + "".join(f"  {line}\n" for line in hint.splitlines())
    if sys.stderr is None:
        return
    try:
        is_terminal = sys.stderr.isatty()
        shown = wrap_at_words(sanitize(text), columns(sys.stderr)) if is_terminal else text
        # A file name may be bytes that are no Unicode: shown escaped rather than not at all.
        sys.stderr.write(shown.encode("utf-8", "backslashreplace").decode("utf-8"))
        sys.stderr.flush()
    except OSError:
        pass  # nobody reads stderr any more


def _forget_stdout() -> None:
    """Redirect stdout to nowhere, because the interpreter's last flush would fail again."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, sys.stdout.fileno())
    except (OSError, ValueError, AttributeError):
        pass  # stdout is not a file, or closed: nothing will be flushed
    finally:
        os.close(nowhere)
