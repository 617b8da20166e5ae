"""Command `localchat fit`: plan the load of a model, with the planner of the load itself."""

import sys
from collections.abc import Iterator, Sequence
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Final, NamedTuple

import click

from localchat.cli.context import AppContext
from localchat.cli.options import complete_model, load_flags
from localchat.cli.output import print_json, print_lines, table
from localchat.cli.streams import Terminal
from localchat.errors import ExitCode, ModelMissing, NetworkError, UsageError
from localchat.fit.report import bar, parts
from localchat.fit.report import verdict as sentences
from localchat.sanitize import sanitize_line
from localchat.units import rate, size, tokens

if TYPE_CHECKING:
    from localchat.cli.resolve import Inputs
    from localchat.config.paths import Paths
    from localchat.config.settings import Settings
    from localchat.errors import ModelMissing, NetworkError
    from localchat.fit.hardware import Machine
    from localchat.fit.load_options import LoadOptions
    from localchat.models.assess import FitReport, Subject
    from localchat.models.names import Reference
    from localchat.models.quantization_table import QuantizationRow

NO_SPEED: Final = "Speed unknown: it cannot be estimated on this machine"
_QUANTIZATION_HEAD: Final = ("QUANTIZATION", "SIZE", "LONGEST CONTEXT", "SPEED", "LOSS")
_USUAL_PROGRAMS_BYTES: Final = 3_000_000_000
_MIN_CELLS = 16
_MAX_CELLS = 60
"""Widest memory bar."""


@click.command("fit")
@click.argument("model_name", metavar="MODEL", shell_complete=complete_model)
@load_flags
@click.option(
    "--parallel",
    type=click.IntRange(1, 255),
    metavar="N",
    help="Requests computed at once. Default: 2.",
)
@click.option(
    "--memory",
    "memory_gb",
    type=click.FloatRange(0.1, 1e6),
    metavar="GB",
    help="Plan for a computer with this much memory and no GPU. Default: this machine.",
)
@click.option("--offline/--no-offline", default=None, help="Never use the network. Default: off.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def command(
    ctx: click.Context,
    /,
    model_name: str,
    parallel: int | None,
    memory_gb: float | None,
    as_json: bool,
    **_: object,
) -> int:
    """Check whether a model fits in memory, and how to make it fit.

    MODEL is on this machine, or a name that `pull` accepts. In that case the command reads only its headers
    over the network, a few megabytes. It loads no weights. The speed is that of earlier runs. Before the first
    run, it is an estimate with its range, from the memory bandwidth. A table compares the quantizations of a
    GGUF model and marks the one to take here. The exit code is 0 if the model fits, and 4 if it does not.
    """
    from msgspec import structs

    from localchat.cli.resolve import chat_slots
    from localchat.fit.speed import SpeedHistory
    from localchat.fit.steps import IN_ORDER, MemoryStep, SlotLimit, step_lines
    from localchat.models.assess import assess
    from localchat.models.catalog import read_catalog
    from localchat.models.quantization_table import quantization_rows
    from localchat.models.recommended_models import with_models_that_fit
    from localchat.models.resolve import planned_load
    from localchat.models.substitutes import memory_steps

    seen = find_model(ctx, model_name)
    slots = parallel or chat_slots(seen.settings)
    subject = seen.subject
    machine = _machine(memory_gb)
    environ = seen.app.environ
    options = planned_load(seen.settings, seen.paths, max_slots=slots)
    # Parallel requests are those of a server, whose KV cache has room for all of them.
    options = structs.replace(options, room_for_slots=parallel is not None)
    history = SpeedHistory(seen.paths.state_dir)
    verdict = assess(subject, options, machine, history)
    quantizations = quantization_rows(subject, options, machine, history, read_catalog(seen.paths))
    steps: tuple[MemoryStep, ...] = ()
    if not verdict.plan.fits and not verdict.plan.missing:
        limits = SlotLimit("--parallel", "", 1)
        steps = memory_steps(subject, options, machine, seen.paths, environ, limits)
    if as_json:
        path = str(subject.path) if subject.path is not None else None
        head = {"model": subject.name, "path": path, "parallel": slots}
        tail = {
            "steps": [step.as_json() for step in steps],
            "quantizations": [row.record() for row in quantizations],
        }
        print_json(environ, head | verdict.record() | tail)
    else:
        print_lines(environ, report_lines(verdict))
        print_lines(environ, _usual_lines(seen, options, verdict, machine))
        print_lines(environ, _quantization_lines(quantizations))
        if steps:
            print_lines(environ, with_models_that_fit("", seen.paths, machine).splitlines())
            print_lines(environ, ("", IN_ORDER, *step_lines(steps)))
    if verdict.plan.fits:
        return ExitCode.OK
    return ExitCode.DOES_NOT_FIT


def _usual_lines(
    seen: "FoundModel", options: "LoadOptions", verdict: "FitReport", machine: "Machine"
) -> Iterator[str]:
    """Yield the memory with a usual context, which the model screen shows, if the planned one is longer."""
    from msgspec import structs

    from localchat.fit.report import USUAL_LENGTH
    from localchat.models.assess import assess

    context = verdict.plan.context_tokens
    if options.context_tokens is not None or not verdict.plan.fits or context <= USUAL_LENGTH:
        return
    usual = structs.replace(options, context_tokens=USUAL_LENGTH)
    plan = assess(seen.subject, usual, machine, None, speed=False).plan
    yield (
        f"A context of {tokens(USUAL_LENGTH)} needs {size(plan.total_bytes)}, "
        f"of which KV {size(plan.kv_bytes)}: --ctx {USUAL_LENGTH}"
    )


def estimated(seen: "FoundModel", options: "LoadOptions", machine: "Machine") -> "FitReport":
    """Return the report of a load with its speed."""
    from localchat.fit.speed import SpeedHistory
    from localchat.models.assess import assess

    return assess(seen.subject, options, machine, SpeedHistory(seen.paths.state_dir))


def _machine(memory_gb: float | None) -> "Machine":
    """Return this machine, or one like it with this much memory and no GPU."""
    from dataclasses import replace

    from localchat.backend_api.registry import usable_machine

    machine = usable_machine()
    if memory_gb is None:
        return machine
    total_bytes = round(memory_gb * 1e9)
    # A machine in everyday use has a desktop and a browser open, which take about a quarter, at most 3 GB.
    free_bytes = total_bytes - min(total_bytes // 4, _USUAL_PROGRAMS_BYTES)
    return replace(machine, ram_total_bytes=total_bytes, ram_free_bytes=free_bytes, gpus=())


def _quantization_lines(rows: "Sequence[QuantizationRow]") -> Iterator[str]:
    """Format the table of quantizations and the advice that follows from it."""
    if not rows:
        return
    cells = []
    for row in rows:
        plan = row.report.plan
        speed = "-"
        if row.speed is not None:
            speed = rate(row.speed.tokens_per_s)
        context = "does not fit"
        if plan.fits:
            context = f"{plan.max_context_tokens:,}"
        name = row.quantization + (" *" if row.recommended else "")
        cells.append((name, size(row.size_bytes), context, speed, f"{row.loss_percent:g} %"))
    yield ""
    yield from table(_QUANTIZATION_HEAD, cells, right=(1, 2, 3, 4))
    best = next((row for row in rows if row.recommended), None)
    if best is None:
        yield "Only quantizations with a large loss fit: a smaller model in Q4_K_M answers better."
    elif best.model:
        yield f"* Take this one here: localchat pull {best.model}"
    else:
        yield "* Take this one here."
    yield (
        "LOSS is the usual increase of the perplexity over the unquantized model (8B; small models lose more)."
    )


class FoundModel(NamedTuple):
    """Model and its settings."""

    subject: "Subject"
    settings: "Settings"
    paths: "Paths"
    app: AppContext


def find_model(ctx: click.Context, model_name: str) -> FoundModel:
    """Return the local model with this name, or else the one to pull. Raises LocalchatError."""
    from localchat.cli.resolve import Inputs, resolve_setup, subject_of

    try:
        setup = resolve_setup(ctx, model_name)
    except ModelMissing as missing:
        inputs = Inputs.of(ctx, model_name)
        settings = inputs.settings((model_name,)).settings
        subject = _hub_model(model_name, inputs, settings, missing)
        return FoundModel(subject, settings, inputs.paths, inputs.app)
    return FoundModel(
        subject_of(setup.model, setup.settings), setup.settings, setup.paths, setup.app
    )


def _hub_model(
    name: str, inputs: "Inputs", settings: "Settings", missing: "ModelMissing"
) -> "Subject":
    """Read the headers of a model on the hub. Raises `missing` if the hub has no such model."""
    from localchat.config.settings import offline_reason
    from localchat.models.assess import Subject
    from localchat.models.catalog import read_catalog
    from localchat.models.hub.client import hub_from_environment
    from localchat.models.hub.events import Note, PullEvent
    from localchat.models.hub.pull import select_files
    from localchat.models.hub.remote_header import read_remote_header
    from localchat.models.hub.retry import RetryPolicy
    from localchat.models.names import parse
    from localchat.models.published_shapes import published_model

    try:
        reference = parse(name, read_catalog(inputs.paths))
    except (ModelMissing, UsageError):
        raise missing from None
    terminal = Terminal(inputs.app.environ, quiet=settings.quiet, color=settings.color)

    def show(event: PullEvent) -> None:
        if isinstance(event, Note):
            terminal.notify(event.text)

    if by := offline_reason(inputs.settings(), inputs.app.environ):
        published = published_model(reference)
        if published is None:
            raise _unknown_shape(reference, by)
        terminal.notify(
            f"{published.name} is not on this machine and offline is set: using its published shape"
        )
        return Subject(published.name, published, None, settings.backend)
    hub = hub_from_environment(inputs.app.environ)
    retry = RetryPolicy()
    try:
        choice = select_files(reference, hub, show, retry)
    except NetworkError as problem:
        published = published_model(reference)
        if published is None or not problem.details.get("unreachable"):
            raise
        terminal.notify(f"{problem.message}; using the published shape of {published.name}")
        return Subject(published.name, published, None, settings.backend)
    terminal.notify(
        f"{choice.name} is not on this machine; reading its headers from {choice.listing.repository}"
    )
    header = read_remote_header(choice, hub, show, retry)
    return Subject(choice.name, header, None, settings.backend)


def _unknown_shape(reference: "Reference", by: str) -> "NetworkError":
    """Return the error for a model whose shape is unknown. `by`: source of the offline setting."""
    from localchat.models.published_shapes import published_names

    hint = "turn offline off; only its headers are read over the network, a few megabytes"
    if rest := ", ".join(published_names(reference)):
        hint += f"\noffline, these can be planned: {rest}"
    return NetworkError(
        f"the memory of {reference.name} cannot be planned: it is not on this machine, offline is set "
        f"({by}), and its published shape is unknown",
        hint=hint,
    )


def report_lines(verdict: "FitReport") -> Iterator[str]:
    """Format the verdict, and the speed of a model that fits."""
    yield from verdict_lines(verdict)
    if verdict.plan.fits:
        yield from speed_lines(verdict)


def verdict_lines(verdict: "FitReport") -> Iterator[str]:
    """Format the report with a memory bar."""
    first, _, *remarks = sentences(verdict.plan)
    yield f"{sanitize_line(verdict.name)}: {first[0].lower()}{first[1:]}"
    if verdict.plan.missing:
        # The machine lacks what the model needs, such as a GPU, so a bar would be empty.
        yield parts(verdict.plan)
        yield from (*remarks, *verdict.alternatives)
        return
    yield from bar(verdict.plan, verdict.memory_bytes, verdict.others_bytes, _bar_cells())
    yield f"{verdict.why} KV cache {verdict.plan.kv_type}."
    yield from remarks
    yield from verdict.alternatives


def speed_lines(verdict: "FitReport") -> Iterator[str]:
    """Format the expected speed and its source."""
    speed = verdict.expected_speed
    if speed is not None:
        yield f"{speed.words[0].upper()}{speed.words[1:]}, {speed.basis}."
    else:
        yield f"{NO_SPEED}."
    if verdict.layers_tokens_per_s is not None:
        yield (
            f"With whole layers in RAM instead of experts, about {rate(verdict.layers_tokens_per_s)}."
        )


def _bar_cells() -> int:
    """Return the width of the bar that fits on the terminal beside brackets and size."""
    if sys.stdout is None or not sys.stdout.isatty():
        return _MAX_CELLS
    return min(max(get_terminal_size().columns - 12, _MIN_CELLS), _MAX_CELLS)
