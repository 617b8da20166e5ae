"""The command itself, and the one place where errors become exit codes."""

import errno
import os
import sys
from collections.abc import Sequence

import click

from localchat import __version__
from localchat.cli.context import AppContext
from localchat.cli.group import RootGroup, other_spelling
from localchat.cli.signals import interruptible
from localchat.errors import ExitCode, LocalchatError

_SIGPIPE_STATUS = 141
_COMPLETE = "_LOCALCHAT_COMPLETE"
_PROMPTED = ("localchat", "localchat run")
"""Commands that take a prompt."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EBADF)
"""Of a write to stdout that click does, as that of a help page; every other one is told where it happens."""


@click.group(
    cls=RootGroup,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="localchat alone, on a terminal, begins a conversation. What stands behind -- is a prompt, "
    "also where it looks like a verb.",
)
@click.version_option(__version__, message="localchat %(version)s")
def root() -> None:
    """Chat with a language model on this machine, or pipe text through one.

    \b
    localchat "what is a KV cache?"
    cat report.txt | localchat "sum this up in five lines"
    localchat run MODEL
    """


def run(args: Sequence[str], app: AppContext | None = None) -> int:
    """Run the command with these arguments; returns the exit code and never raises what a user can cause."""
    used = app if app is not None else AppContext()
    try:
        with interruptible():
            return _flushed(args, used)
    except KeyboardInterrupt:  # a second one, while the first one's end was being said
        return ExitCode.INTERRUPTED


def _flushed(args: Sequence[str], used: AppContext) -> int:
    status = _status(args, used)
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as problem:
        _forget_stdout()
        return _SIGPIPE_STATUS if isinstance(problem, BrokenPipeError) else status or ExitCode.ERROR
    return status


def _status(args: Sequence[str], used: AppContext) -> int:
    from localchat.cli.streams import OutputClosed, stdout_trouble

    try:
        status = _completed(used) if _COMPLETE in used.environ else _invoked(args, used)
        return status if isinstance(status, int) else ExitCode.OK
    except (OutputClosed, BrokenPipeError):
        return _SIGPIPE_STATUS
    except (KeyboardInterrupt, click.Abort):
        return ExitCode.INTERRUPTED
    except click.exceptions.Exit as end:
        return end.exit_code
    except click.ClickException as problem:
        # click lists choices over several lines
        _say(" ".join(problem.format_message().split()), _usage_hint(problem))
        return ExitCode.USAGE
    except LocalchatError as problem:
        if used.debugging:
            raise
        _say(problem.message, problem.hint)
        return problem.exit_code
    except Exception as problem:  # the last line of defence: a traceback helps no user
        if used.debugging:
            raise
        if isinstance(problem, OSError) and problem.errno in _FULL and problem.filename is None:
            _say(stdout_trouble(problem).message, "")
            return ExitCode.ERROR
        _say(
            f"unexpected: {type(problem).__name__}: {problem}",
            "this is a fault of localchat; LOCALCHAT_DEBUG=1 shows where it happened",
        )
        return ExitCode.ERROR


def _invoked(args: Sequence[str], app: AppContext) -> object:
    """What click's own `main` does, without its opinions on errors and closed pipes."""
    with root.make_context("localchat", list(args), obj=app) as context:
        return root.invoke(context)


def _completed(app: AppContext) -> int:
    """Answer a shell that asks what could stand here (the script of `localchat completion` does)."""
    from click.shell_completion import shell_complete

    return shell_complete(root, {"obj": app}, "localchat", _COMPLETE, app.environ[_COMPLETE])


def _usage_hint(problem: click.ClickException) -> str:
    context = problem.ctx if isinstance(problem, click.UsageError) else None
    command = (context.command_path.strip() if context else "") or "localchat"
    if isinstance(problem, click.NoSuchOption):
        if instead := other_spelling(problem):
            return instead
        if command in _PROMPTED:
            return f"{command} --help lists the flags; a prompt that begins with a dash stands behind --"
    return f"{command} --help tells more"


def _say(message: str, hint: str) -> None:
    """An error on stderr, made inert where that is a terminal."""
    from localchat.sanitize import sanitize

    text = f"localchat: {message}\n" + "".join(f"  {line}\n" for line in hint.splitlines())
    if sys.stderr is None:
        return
    try:
        shown = sanitize(text) if sys.stderr.isatty() else text
        # A file name may be bytes that are no Unicode: shown escaped rather than not at all.
        sys.stderr.write(shown.encode("utf-8", "backslashreplace").decode("utf-8"))
        sys.stderr.flush()
    except OSError:
        pass  # nobody is left to tell


def _forget_stdout() -> None:
    """Let the interpreter's last flush write nowhere: its reader is gone, or the disk is full."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, sys.stdout.fileno())
    except (OSError, ValueError, AttributeError):
        pass  # stdout is no file, or closed: nothing will be flushed
    finally:
        os.close(nowhere)
