"""Command `localchat launch`: start a coding agent of others on a model of this machine."""

import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from localchat.cli.context import AppContext, app_context
from localchat.cli.options import complete_model, load_flags
from localchat.cli.output import print_lines, table
from localchat.cli.serving.agent_programs import KEY_VARIABLE, PROGRAMS, Program, ServedModel
from localchat.cli.signals import left_to_program, terminate_gracefully
from localchat.errors import DoesNotFit, EngineDied, LocalchatError, UsageError
from localchat.models.resolve import GUIDE
from localchat.units import tokens

if TYPE_CHECKING:
    from localchat.cli.resolve import Setup
    from localchat.measure.server_process import ServerProcess

_SLOTS: Final = 4
"""Requests computed at once: an agent, its subagents, and the titles that it asks for."""
_KEEP_ALIVE_FOREVER: Final = "-1"
_SIGNAL_EXIT: Final = 128
"""Shells report a program that signal N ended as 128 + N."""
_EXIT_S: Final = 10.0


@click.command("launch")
@click.argument(
    "program_name", metavar="[PROGRAM]", required=False, type=click.Choice(list(PROGRAMS))
)
@click.argument("arguments", metavar="[-- ARGS...]", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "-m",
    "--model",
    "model",
    metavar="MODEL",
    shell_complete=complete_model,
    help="Model for the program. Default: the one of a running server, or the last one used.",
)
@click.option(
    "--attach/--no-attach",
    "attach",
    default=None,
    help="Use the model of a running `localchat serve`. Default: on.",
)
@load_flags
@click.pass_context
def command(
    ctx: click.Context,
    /,
    program_name: str | None,
    arguments: tuple[str, ...],
    **_: object,
) -> int:
    """Start a coding agent on a model of this machine.

    PROGRAM is claude, codex, opencode, crush, gptme or aider. Without it, the command lists them. It sets the
    address and the model for this run only, by variables and flags. A running server is used if it has loaded
    the model with enough context. Otherwise a server runs as long as the program. Arguments for the program
    come after `--`.
    """
    app = app_context(ctx)
    if program_name is None:
        _list_programs(app)
        return 0
    program = PROGRAMS[program_name]
    executable = _executable(program, app.environ)
    if executable is None:
        raise LocalchatError(
            f"{program.title} is not installed: there is no program {program.name}",
            hint=f"install it: {program.install}",
        )
    setup = _setup(ctx)
    with (
        terminate_gracefully(),
        tempfile.TemporaryDirectory(prefix="localchat-") as folder,
        _served(ctx, setup, program) as (served, server),
    ):
        process = _start(program, [executable, *arguments], served, Path(folder), app.environ)
        return _wait(process, program, server)


def _executable(program: Program, environ: Mapping[str, str]) -> str | None:
    return shutil.which(program.name, path=environ.get("PATH"))


def _list_programs(app: AppContext) -> None:
    """Print the programs, where they are, and what they need."""
    rows = []
    for program in PROGRAMS.values():
        path = _executable(program, app.environ)
        state = path or f"not installed: {program.install}"
        rows.append((program.name, tokens(program.min_context), state))
    print_lines(app.environ, table(("PROGRAM", "CONTEXT", "INSTALLED"), rows, right=(1,)))


def _setup(ctx: click.Context) -> "Setup":
    """Return the model for the program. Raises UsageError for one that cannot act as an agent."""
    from localchat.cli.resolve import resolve_setup
    from localchat.cli.work_model import work_model

    choice = work_model(ctx)
    setup = resolve_setup(ctx, choice.local_word)
    if setup.model.remote is not None:
        raise UsageError(
            "launch needs a model of this machine",
            hint=f"point the program at {setup.model.remote.url} yourself",
        )
    if setup.model.word == GUIDE:
        raise UsageError("the built-in guide cannot call tools", hint="-m MODEL chooses another")
    return setup


@contextmanager
def _served(
    ctx: click.Context, setup: "Setup", program: Program
) -> "Iterator[tuple[ServedModel, ServerProcess | None]]":
    """Find a running server that has the model, or start one for the block. Raises LocalchatError."""
    running = None
    if setup.settings.attach:
        running = _running(setup, program)
    if running is not None:
        setup.terminal.notify(
            f"{program.title} uses {running.model} of the server at {running.url}"
        )
        yield running, None
        return
    from localchat.cli.options import given_flags
    from localchat.config.parameters import PARAMETERS
    from localchat.measure.server_process import ServerCommand, server_process
    from localchat.measure.variants import setting_text

    context_tokens = _context(setup, program)
    settings = {
        key: setting_text(flag.value)
        for key, flag in given_flags(ctx).items()
        if key in PARAMETERS and key != "model"
    }
    settings["context_length"] = str(context_tokens)
    settings["keep_alive"] = _KEEP_ALIVE_FOREVER
    key = secrets.token_urlsafe(24)
    command = ServerCommand(
        str(setup.model.path), settings, _SLOTS, loop_guard=True, cache_disk=True, key=key
    )
    setup.terminal.progress(f"loading {setup.model.name}")
    with server_process(command, setup.app.environ) as server:
        setup.terminal.progress("")
        yield ServedModel(server.url, key, setup.model.name, context_tokens), server


def _running(setup: "Setup", program: Program) -> ServedModel | None:
    """Return the model of a running server. None if none has it, or its context is too short.

    Raises UsageError if the server with the model rejects our key.
    """
    from localchat.cli.attach import running_servers

    # Its clients need a key only if the server was started with some.
    key = setup.app.environ.get("LOCALCHAT_API_KEY", "none")
    needed = program.min_context
    if setup.origins["context_length"].startswith("--"):
        needed = setup.settings.context_length or needed
    path = setup.model.path.resolve()
    for server, loaded in running_servers(setup.paths):
        name = next((model.name for model in loaded if Path(model.path).resolve() == path), "")
        contexts = _contexts(server.url, key)
        if contexts is None:
            if not name:
                continue
            raise UsageError(
                f"the server at {server.url} requires an API key",
                hint="export LOCALCHAT_API_KEY=KEY, or start another server: --no-attach",
            )
        if not name and next(iter(contexts), "") == setup.model.name:
            # The server's own model, which it has unloaded because it was idle.
            name = setup.model.name
        context_tokens = contexts.get(name, 0)
        if context_tokens >= needed:
            return ServedModel(server.url, key, name, context_tokens)
        if name:
            setup.terminal.notify(
                f"the server at {server.url} runs {name} with a context of {context_tokens:,} tokens, but "
                f"{needed:,} are needed; it is loaded a second time"
            )
    return None


def _contexts(url: str, key: str) -> dict[str, int] | None:
    """Return the contexts of a server's models by name, its own first. None if it rejects the key."""
    from localchat.http_transport import query_client

    with query_client(key) as client:
        response = client.get(f"{url}/v1/models")
    if response.status_code == HTTPStatus.UNAUTHORIZED:
        return None
    return {entry["id"]: entry.get("max_model_len", 0) for entry in response.json()["data"]}


def _context(setup: "Setup", program: Program) -> int:
    """Choose the context for a program, and report it.

    Raises UsageError if the model or the flag allows too little, and DoesNotFit if the memory does.
    """
    from msgspec import structs

    from localchat.backend_api.registry import usable_machine
    from localchat.cli.resolve import subject_of
    from localchat.models.assess import assess
    from localchat.models.resolve import planned_load

    name = setup.model.name
    need = f"{program.title} needs a context of {program.min_context:,} tokens"
    subject = subject_of(setup.model, setup.settings)
    trained = subject.model.context_train or program.good_context
    context_tokens = setup.settings.context_length or min(program.good_context, trained)
    if context_tokens < program.min_context:
        if setup.settings.context_length:
            origin = setup.origins["context_length"]
            raise UsageError(
                f"{need}; {origin} is {context_tokens:,}", hint=f"--ctx {program.min_context}"
            )
        raise UsageError(
            f"{need}; {name} has {trained:,}", hint="choose a model with a longer context: -m MODEL"
        )
    options = planned_load(setup.settings, setup.paths, max_slots=_SLOTS)
    options = structs.replace(options, context_tokens=context_tokens)
    plan = assess(subject, options, usable_machine(), None, speed=False).plan
    if not plan.fits and not plan.missing and not setup.settings.context_length:
        context_tokens = plan.max_context_tokens // 1024 * 1024
        if context_tokens < program.min_context:
            raise DoesNotFit(
                f"{need}; with {name} there is memory for {plan.max_context_tokens:,}",
                hint=f"localchat fit {name} lists what makes room",
            )
    setup.terminal.notify(
        f"{program.title} gets {name} with a context of {context_tokens:,} tokens (--ctx changes it)"
    )
    return context_tokens


def _start(
    program: Program,
    command_line: Sequence[str],
    served: ServedModel,
    folder: Path,
    environ: Mapping[str, str],
) -> "subprocess.Popen[bytes]":
    """Start the program in the foreground.

    `command_line`: path of the program, and the arguments of the user. `folder` gets the program's files.
    """
    start = program.start(served, folder)
    for name, text in start.files.items():
        (folder / name).write_text(text, encoding="utf-8")
    environment = {name: value for name, value in environ.items() if name not in program.removed}
    environment |= start.environment
    environment[KEY_VARIABLE] = served.key
    executable, *arguments = command_line
    return subprocess.Popen([executable, *start.arguments, *arguments], env=environment)


def _wait(
    process: "subprocess.Popen[bytes]", program: Program, server: "ServerProcess | None"
) -> int:
    """Wait for the program, and return its exit code. End it if its server exits.

    `server`: the server that runs for this program. Raises EngineDied if it has exited.
    """
    try:
        with left_to_program():
            if server is None:
                return _exit_code(process.wait())
            # The program may own the whole terminal, so it ends before anything is printed.
            with server.watched(lambda: _end(process)):
                code = process.wait()
    except KeyboardInterrupt:  # this process is asked to end
        _end(process)
        raise
    failure = server.failure()
    if failure is not None:
        raise EngineDied(
            f"{failure.message}; {program.title} was ended, because it cannot go on without it",
            hint=failure.hint,
        )
    return _exit_code(code)


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(_EXIT_S)
    except subprocess.TimeoutExpired:
        process.kill()


def _exit_code(status: int) -> int:
    if status < 0:
        return _SIGNAL_EXIT - status
    return status
