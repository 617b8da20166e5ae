"""Command `localchat batch`: answers a file of prompts into a file of answers, and goes on where it stopped."""

import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from localchat.cli.context import AppContext
from localchat.cli.options import FiniteRange, UserPath, complete_model, load_flags
from localchat.cli.output import print_json
from localchat.cli.streams import Terminal
from localchat.errors import ExitCode, FileMissing, LocalchatError, UsageError
from localchat.units import counted, duration, rate

if TYPE_CHECKING:
    from localchat.batch.input_file import LineDefaults
    from localchat.batch.run import BatchRun, BatchServer
    from localchat.cli.serving.batch_progress import BatchLines
    from localchat.cli.work_model import WorkModel

_STDIN = Path("-")
_SLOTS = 16
_GPU_SLOTS = 128
"""Of a checkpoint on the CUDA backend: throughput still rises there."""
_UNKNOWN_SLOTS = 16
"""Of a server that does not say how many requests it computes at once."""


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
    "-s", "--system", "told", metavar="TEXT", help="System prompt for each line. Default: none."
)
@click.option(
    "--max-tokens",
    "longest",
    type=click.IntRange(1),
    metavar="N",
    help="Stop an answer after N tokens, unless its line says otherwise.",
)
@click.option(
    "--temperature",
    "--temp",
    "randomness",
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

    A line of IN.jsonl (or of stdin, as -) is a prompt as plain text; a JSON object with "prompt" or
    "messages", and perhaps "schema", "system", "max_tokens" and other fields of a request; or a request in
    OpenAI's batch format, with custom_id, url and body. Answers are lines in OpenAI's format, in the order in
    which they end. The same command continues after an interruption and answers no line twice.
    """
    from localchat.batch.input_file import BatchInput
    from localchat.batch.output_file import BatchOutput
    from localchat.batch.run import BatchRun

    app = ctx.find_object(AppContext)
    assert app is not None
    terminal = Terminal(app.environ, quiet=bool(quiet))
    if source != _STDIN:
        _check_input(source)
    if target is None:
        hint = f"localchat batch {source} -o {source.with_suffix('')}-answers.jsonl"
        raise UsageError("-o OUT.jsonl is missing: where the answers go", hint=hint)
    _check_output(source, target)
    with _input_file(source) as path, BatchOutput(target) as output:
        batch = BatchRun(
            BatchInput(path, _defaults(ctx)), output, retry_errors=retry_errors, limit=limit
        )
        problem, interrupted = _answer(ctx, terminal, batch)
    if as_json:
        print_json(app.environ, _summary(batch, target))
    for sentence in _sentences(batch, target):
        terminal.notify(sentence)
    stopped = problem is not None or interrupted or batch.ending
    if batch.left and (stopped or limit is not None):
        terminal.print_line(
            f"localchat: {batch.left:,} of {batch.lines:,} lines are left; go on with: {_again()}"
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
    """Run the batch. The error that ended it, and whether it was interrupted at once."""
    from localchat.cli.serving.batch_progress import batch_progress_for
    from localchat.cli.signals import calling, terminate_gracefully

    if not batch.progress.total:
        return None, False
    with batch_progress_for(terminal) as shown, terminate_gracefully():

        def end() -> None:
            batch.end()
            shown.say(
                f"ending after {counted(batch.progress.in_flight, 'line')} under way; "
                "Ctrl+C again ends at once"
            )

        try:
            with _server(ctx, terminal, shown, batch) as server, calling(end):
                batch.run(server, shown.show)
        except LocalchatError as problem:
            return problem, False
        except KeyboardInterrupt:
            return None, True
    return None, False


@contextmanager
def _server(
    ctx: click.Context, terminal: Terminal, shown: "BatchLines", batch: "BatchRun"
) -> "Iterator[BatchServer]":
    """The server that answers: a process of our own, or one that runs. Raises LocalchatError."""
    from localchat.batch.run import BatchServer, clients_for
    from localchat.cli.measure.targets import BenchTargets
    from localchat.engine.remote.client import base_url
    from localchat.measure.endpoint import first_model
    from localchat.measure.server_process import server_properties
    from localchat.measure.variants import BenchVariant, is_running

    asked = ctx.params
    chosen = _chosen_model(ctx, batch)
    word = chosen.word
    parallel = asked["parallel"]
    running = is_running(word)
    if running and parallel is not None:
        raise UsageError(
            f"--parallel: {word} runs already", hint="--max-clients sets the requests in flight"
        )
    if not running:
        shown.status(f"loading {word}")
        parallel = parallel or _slots(ctx, word)
    servers = BenchTargets(ctx, terminal, loop_guard=True)
    with servers.open(BenchVariant(word, word, {}, parallel)) as (endpoint, _):
        url = base_url(endpoint.url)
        model = endpoint.model or first_model(url, endpoint.key)
        found = server_properties(url, endpoint.key).get("total_slots") if running else parallel
        name = word if not running else f"{model or 'its model'} at {url}"
        shown.say(f"{name} answers{f' ({chosen.why})' if chosen.why else ''}")
        slots = found if isinstance(found, int) and found > 0 else _UNKNOWN_SLOTS
        yield BatchServer(
            url=url,
            model=model,
            key=endpoint.key,
            clients=asked["max_clients"] or clients_for(slots),
            # A default was chosen for the whole file. A server named by -m takes the models of the lines.
            only_model=not running or bool(chosen.why),
        )


def _slots(ctx: click.Context, word: str) -> int:
    """Requests that the server of a model computes at once. Raises ModelMissing, UsageError."""
    from localchat.cli.resolve import resolve_setup

    if resolve_setup(ctx, word).model.path.is_dir():
        return _GPU_SLOTS
    return _SLOTS


def _chosen_model(ctx: click.Context, batch: "BatchRun") -> "WorkModel":
    """Return the model of `-m`, else a default. Raises UsageError, ModelMissing."""
    from localchat.cli.work_model import WorkModel, work_model

    if word := ctx.params["word"]:
        return WorkModel(word, "")
    return work_model(ctx, batch.source.named_models())


def _defaults(ctx: click.Context) -> "LineDefaults":
    """What the command line says for every line."""
    from localchat.batch.input_file import LineDefaults

    given = {
        "max_tokens": ctx.params["longest"],
        "temperature": ctx.params["randomness"],
    }
    fields = {name: value for name, value in given.items() if value is not None}
    return LineDefaults(ctx.params["told"] or "", fields)


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
    """Raises FileMissing, and UsageError for an input that is none."""
    if not source.is_file():
        if not source.exists():
            raise FileMissing(
                f"there is no file {source}",
                hint="IN.jsonl is a file with a prompt or a request a line",
            )
        raise UsageError(
            f"{source} is not a file",
            hint="the input is read more than once; for a pipe, use - as its name",
        )


def _check_output(source: Path, target: Path) -> None:
    """Raises UsageError for an output in the place of the input, or nowhere."""
    if source != _STDIN and target.exists() and target.samefile(source):
        raise UsageError(f"-o {target} is the input", hint="name another file for the answers")
    if not target.absolute().parent.is_dir():
        raise UsageError(f"-o: there is no folder {target.absolute().parent}")


# ---------------------------------------------------------------------------- what is said at the end


def _summary(batch: "BatchRun", target: Path) -> dict[str, Any]:
    progress = batch.progress
    spent_s = progress.elapsed_s
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
        "seconds": round(spent_s, 3),
        "tokens_per_s": round(progress.completion_tokens / spent_s, 2) if spent_s > 0 else 0.0,
    }


def _sentences(batch: "BatchRun", target: Path) -> Iterator[str]:
    progress = batch.progress
    spent_s = progress.elapsed_s
    if not batch.lines:
        yield "the input has no lines"
    elif not progress.total:
        yield f"all {batch.lines:,} lines of the input are in {target} already"
    elif progress.answered:
        made = progress.completion_tokens or progress.prompt_tokens
        yield (
            f"{counted(progress.answered, 'line')} answered in {duration(spent_s)}, "
            f"{rate(made / spent_s if spent_s else 0.0)}"
        )
    if progress.cut:
        yield (
            f"{counted(progress.cut, 'answer')} cut at the limit (finish_reason length); allow more with "
            "--max-tokens"
        )
    if progress.looping:
        yield (
            f"{counted(progress.looping, 'answer')} ended in a loop (stop_reason repetition); try "
            "repetition_penalty 1.1 in these lines"
        )
    if failed := progress.failed + progress.failed_before:
        yield (
            f"{counted(failed, 'error')} in {counted(batch.lines, 'line')}, explained in {target}; "
            "--retry-errors asks them again"
        )


def _again() -> str:
    """The command line that goes on."""
    return shlex.join(["localchat", *(arg for arg in sys.argv[1:] if arg != "--retry-errors")])
