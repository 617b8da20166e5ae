"""Command `localchat batch`: answer a file of prompts, and resume after an interruption."""

import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import click

from localchat.cli.context import app_context
from localchat.cli.options import FiniteRange, UserPath, complete_model, load_flags
from localchat.cli.output import print_json
from localchat.cli.streams import Terminal
from localchat.errors import (
    DoesNotFit,
    ExitCode,
    FileMissing,
    LocalchatError,
    ModelInvalid,
    ModelMissing,
    UsageError,
)
from localchat.units import counted, duration, rate

if TYPE_CHECKING:
    from localchat.batch.input_file import LineDefaults
    from localchat.batch.run import BatchProgress, BatchRun, BatchServer
    from localchat.cli.serving.batch_progress import BatchDisplay
    from localchat.cli.work_model import WorkModel

_STDIN = Path("-")
_SLOTS = 16
_GPU_SLOTS = 128
"""Slots of a checkpoint with CUDA, where throughput rises up to this number."""
_UNKNOWN_SLOTS = 16
"""Assumed slots of a server that does not report its own."""


@click.command("batch")
@click.argument("source", metavar="IN.jsonl", type=UserPath(path_type=Path))
@click.option(
    "-o",
    "--output",
    "target",
    type=UserPath(path_type=Path, dir_okay=False),
    metavar="OUT.jsonl",
    help="File for the answers (required). An existing file of the same input is continued.",
)
@click.option(
    "-m",
    "--model",
    "word",
    metavar="MODEL",
    shell_complete=complete_model,
    help=(
        "A model of this machine, remote:NAME, or the address of a server. Default: the "
        "running server's, or the one used last."
    ),
)
@click.option(
    "-s",
    "--system",
    "line_system",
    metavar="TEXT",
    help="System prompt of lines that are a single prompt. Default: none.",
)
@click.option(
    "--max-tokens",
    "line_max_tokens",
    type=click.IntRange(1),
    metavar="N",
    help="Stop an answer after N tokens, unless its line says otherwise.",
)
@click.option(
    "--temperature",
    "--temp",
    "line_temperature",
    type=FiniteRange(0, 10),
    metavar="X",
    help="Randomness, unless a line says otherwise. Default: the model maker's value, or 0.7.",
)
@click.option(
    "--limit",
    type=click.IntRange(1),
    metavar="N",
    help="Answer at most N lines in this run. Default: all.",
)
@click.option("--retry-errors", is_flag=True, help="Retry lines whose answer is an error.")
@click.option(
    "--parallel",
    type=click.IntRange(1, 255),
    metavar="N",
    help=f"Requests computed at once. Default: {_SLOTS}, with CUDA {_GPU_SLOTS}.",
)
@click.option(
    "--max-clients",
    type=click.IntRange(1, 4096),
    metavar="N",
    help="Requests in flight. Default: enough to keep the server busy.",
)
@load_flags
@click.option("--json", "as_json", is_flag=True, help="Print a summary as JSON.")
@click.option(
    "-q", "--quiet/--no-quiet", "quiet", default=None, help="Show no progress. Default: off."
)
@click.pass_context
def command(
    ctx: click.Context,
    /,
    source: Path,
    target: Path | None,
    limit: int | None,
    retry_errors: bool,
    as_json: bool,
    quiet: bool | None,
    **_: object,
) -> int:
    """Answer a file of prompts.

    A line of IN.jsonl (or of stdin, as -) is a prompt as plain text, a JSON object with "prompt" or "messages",
    or a request in OpenAI's batch format with custom_id, url and body. An object may also have "schema",
    "system", "max_tokens" and other fields of a request. Answers are lines in OpenAI's format, in the order in
    which they end. The same command resumes after an interruption and answers no line twice.
    """
    from localchat.batch.input_file import BatchInput
    from localchat.batch.output_file import BatchOutput
    from localchat.batch.run import BatchRun

    app = app_context(ctx)
    terminal = Terminal(app.environ, quiet=bool(quiet))
    if source != _STDIN:
        _check_input(source)
    if target is None:
        hint = f"localchat batch {source} -o {source.with_suffix('')}-answers.jsonl"
        raise UsageError("-o OUT.jsonl is missing, the file for the answers", hint=hint)
    _check_output(source, target)
    with _input_file(source) as path, BatchOutput(target) as output:
        name = "stdin" if source == _STDIN else str(source)
        lines = BatchInput(path, _defaults(ctx), name)
        batch = BatchRun(lines, output, retry_errors=retry_errors, limit=limit)
        problem, interrupted = _answer(ctx, terminal, batch)
    if as_json:
        print_json(app.environ, _summary(batch, target))
    for sentence in _sentences(batch, target):
        terminal.notify(sentence)
    stopped = problem is not None or interrupted or batch.ending
    # The same command would only be refused again.
    is_refused = isinstance(problem, UsageError | ModelMissing | ModelInvalid | DoesNotFit)
    if batch.left and (stopped or limit is not None) and not is_refused:
        terminal.print_line(
            f"localchat: {batch.left:,} of {batch.lines:,} lines are left; resume with: {_resume_command()}"
        )
    if problem is not None:
        raise problem
    if stopped and batch.left:
        return ExitCode.INTERRUPTED
    failed = batch.progress.failed + batch.progress.failed_before
    return ExitCode.ERROR if failed else ExitCode.OK


def _answer(
    ctx: click.Context, terminal: Terminal, batch: "BatchRun"
) -> tuple[LocalchatError | None, bool]:
    """Run the batch. Return the error that ended it, and True if it was interrupted at once."""
    from localchat.cli.serving.batch_progress import BatchDisplay
    from localchat.cli.signals import calling, terminate_gracefully

    if not batch.progress.total:
        return None, False
    with BatchDisplay(terminal) as view, terminate_gracefully():

        def end() -> None:
            batch.end()
            view.say(
                f"ending after {counted(batch.progress.in_flight, 'line')} in flight; "
                "Ctrl+C again ends at once"
            )

        notices: SimpleQueue[str] = SimpleQueue()

        def show(progress: "BatchProgress") -> None:
            while not notices.empty():
                view.say(notices.get())
            view.show(progress)

        try:
            with _server(ctx, terminal, view, batch, notices) as server, calling(end):
                batch.run(server, show)
        except LocalchatError as problem:
            return problem, False
        except KeyboardInterrupt:
            return None, True
    return None, False


@contextmanager
def _server(
    ctx: click.Context,
    terminal: Terminal,
    view: "BatchDisplay",
    batch: "BatchRun",
    notices: SimpleQueue[str],
) -> "Iterator[BatchServer]":
    """Yield the server that answers: a running one, or a new process. Raises LocalchatError.

    `notices`: receives what a new process says about its model.
    """
    from localchat.batch.run import BatchServer, clients_for
    from localchat.cli.measure.targets import BenchTargets
    from localchat.engine.remote.client import base_url
    from localchat.measure.endpoint import first_model
    from localchat.measure.server_process import server_properties
    from localchat.measure.variants import BenchVariant, is_running

    chosen = _chosen_model(ctx)
    word = chosen.word
    parallel = ctx.params["parallel"]
    runs_already = is_running(word)
    if runs_already and parallel is not None:
        raise UsageError(
            f"--parallel: {word} is already running",
            hint="--max-clients sets the requests in flight",
        )
    if not runs_already:
        view.status(f"loading {word}")
        parallel = parallel or _slots(ctx, word)
    servers = BenchTargets(ctx, terminal, loop_guard=True, notify=notices.put)
    with servers.open(BenchVariant(word, word, {}, parallel)) as endpoint:
        url = base_url(endpoint.url)
        model = endpoint.model or first_model(url, endpoint.key)
        name = word
        slots = parallel
        if runs_already:
            name = f"{model or 'its model'} at {url}"
            slots = server_properties(url, endpoint.key).get("total_slots")
        reason = f" ({chosen.why})" if chosen.why else ""
        view.say(f"the model is {name}{reason}")
        if not isinstance(slots, int) or slots <= 0:
            slots = _UNKNOWN_SLOTS
        yield BatchServer(
            url=url,
            model=model,
            key=endpoint.key,
            clients=ctx.params["max_clients"] or clients_for(slots),
            # A default answers the whole file. A server named by -m answers each line with the line's model.
            only_model=not runs_already or bool(chosen.why),
        )


def _slots(ctx: click.Context, name: str) -> int:
    """Return how many requests a new server computes at once. Raises ModelMissing, UsageError."""
    from localchat.cli.resolve import resolve_setup

    if resolve_setup(ctx, name).model.path.is_dir():
        return _GPU_SLOTS
    return _SLOTS


def _chosen_model(ctx: click.Context) -> "WorkModel":
    """Return the model of `-m`, else a default. Raises UsageError, ModelMissing."""
    from localchat.cli.work_model import WorkModel, work_model

    if name := ctx.params["word"]:
        return WorkModel(name, "")
    return work_model(ctx)


def _defaults(ctx: click.Context) -> "LineDefaults":
    """Return the defaults that flags set for every line."""
    from localchat.batch.input_file import LineDefaults

    flags = {
        "max_tokens": ctx.params["line_max_tokens"],
        "temperature": ctx.params["line_temperature"],
    }
    fields = {name: value for name, value in flags.items() if value is not None}
    return LineDefaults(ctx.params["line_system"] or "", fields)


@contextmanager
def _input_file(source: Path) -> Iterator[Path]:
    """Yield a file that can be read several times: the source, or a copy of stdin."""
    if source != _STDIN:
        yield source
        return
    with tempfile.NamedTemporaryFile(prefix="localchat-batch-", suffix=".jsonl") as copy:
        shutil.copyfileobj(sys.stdin.buffer, copy)
        copy.flush()
        yield Path(copy.name)


def _check_input(source: Path) -> None:
    """Raise FileMissing or UsageError if the input is not a file."""
    if not source.is_file():
        if not source.exists():
            raise FileMissing(
                f"there is no file {source}",
                hint="IN.jsonl is a file with a prompt or a request in each line",
            )
        raise UsageError(
            f"{source} is not a file",
            hint="the input is read more than once; use - to read a pipe",
        )


def _check_output(source: Path, target: Path) -> None:
    """Raise UsageError if the output cannot be created and read again."""
    if target.exists():
        if source != _STDIN and target.samefile(source):
            raise UsageError(f"-o {target} is the input", hint="name another file for the answers")
        # Resuming reads the output, and /dev/full has no end.
        if not target.is_file():
            raise UsageError(
                f"-o {target} is a pipe or a device", hint="name a file for the answers"
            )
    if not target.absolute().parent.is_dir():
        raise UsageError(f"-o: there is no folder {target.absolute().parent}")


def _summary(batch: "BatchRun", target: Path) -> dict[str, Any]:
    progress = batch.progress
    elapsed_s = progress.elapsed_s
    tokens_per_s = progress.completion_tokens / elapsed_s if elapsed_s > 0 else 0.0
    return {
        "output": str(target),
        "lines": batch.lines,
        "answered_before": progress.before - progress.failed_before,
        "errors_before": progress.failed_before,
        "answered": progress.answered,
        "errors": progress.failed,
        "cut_at_limit": progress.cut,
        "repeating": progress.looping,
        "left": batch.left,
        "prompt_tokens": progress.prompt_tokens,
        "cached_tokens": progress.cached_tokens,
        "completion_tokens": progress.completion_tokens,
        "seconds": round(elapsed_s, 3),
        "tokens_per_s": round(tokens_per_s, 2),
    }


def _sentences(batch: "BatchRun", target: Path) -> Iterator[str]:
    progress = batch.progress
    elapsed_s = progress.elapsed_s
    if not batch.lines:
        yield "the input has no lines"
    elif not progress.total:
        yield f"all {batch.lines:,} lines of the input are already in {target}"
    elif progress.answered:
        # Requests for embeddings generate nothing, so their prompts count.
        tokens = progress.completion_tokens or progress.prompt_tokens
        speed = rate(tokens / elapsed_s if elapsed_s else 0.0)
        yield f"{counted(progress.answered, 'line')} answered in {duration(elapsed_s)}, {speed}"
    if progress.cut:
        yield (
            f"{counted(progress.cut, 'answer')} cut at the limit (finish_reason length); allow more with "
            "--max-tokens"
        )
    if progress.looping:
        yield (
            f"{counted(progress.looping, 'answer')} ended in a loop (stop_reason repetition); try "
            "frequency_penalty 0.3 in these lines"
        )
    if progress.ignored_fields:
        yield f"the server ignored unknown fields: {progress.ignored_fields}"
    if failed := progress.failed + progress.failed_before:
        yield (
            f"{counted(failed, 'error')} in {counted(batch.lines, 'line')}, explained in {target}; "
            "--retry-errors retries them"
        )


def _resume_command() -> str:
    return shlex.join(["localchat", *(arg for arg in sys.argv[1:] if arg != "--retry-errors")])
