"""Command `localchat fit`: plan the load of a model, with the planner of the load itself."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple

import click

from localchat.cli.context import AppContext
from localchat.cli.options import complete_model, load_flags
from localchat.cli.output import print_json, print_lines
from localchat.cli.streams import Terminal
from localchat.errors import ExitCode, ModelMissing, NetworkError, UsageError
from localchat.units import size, tokens

if TYPE_CHECKING:
    from localchat.cli.resolve import Inputs
    from localchat.config.paths import Paths
    from localchat.config.settings import Settings
    from localchat.fit.hardware import Machine
    from localchat.fit.load_options import LoadOptions
    from localchat.model_files.checkpoint import ModelSummary
    from localchat.models.assess import FitReport, Subject
    from localchat.models.names import Reference
    from localchat.models.quantization_table import QuantizationRow

_USUAL_PROGRAMS_BYTES: Final = 3_000_000_000


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
    callback=lambda _, __, text: parse_gigabytes(text),
    metavar="GB",
    help="Plan for a computer with this much memory and no GPU, for example 16. Default: this machine.",
)
@click.option("--offline/--no-offline", default=None, help="Never use the network. Default: off.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def command(
    ctx: click.Context,
    /,
    model_name: str,
    parallel: int | None,
    memory: int | None,
    as_json: bool,
    **_: object,
) -> int:
    """Show which quantization of a model to take, and if it fits.

    MODEL is on this machine, or a name that `pull` accepts. In that case the command reads only its headers
    over the network, a few megabytes. It loads no weights. A table compares the quantizations of a GGUF model
    and marks the one to take. A name without a quantization means that one. The speed is that of earlier runs.
    Before the first run, it is an estimate with its range, from the memory bandwidth. If the model does not
    fit, the command lists what makes room. The exit code is 0 if the model fits, and 4 if it does not.
    """
    from msgspec import structs

    from localchat.cli.models import fit_page
    from localchat.cli.resolve import chat_slots
    from localchat.fit.speed import SpeedHistory
    from localchat.fit.steps import MemoryStep, SlotLimit
    from localchat.models.assess import assess
    from localchat.models.catalog import read_catalog
    from localchat.models.quantization_table import quantization_rows
    from localchat.models.resolve import planned_load
    from localchat.models.substitutes import memory_steps

    seen = find_model(ctx, model_name)
    slots = parallel or chat_slots(seen.settings)
    machine = _machine(memory)
    environ = seen.app.environ
    options = planned_load(seen.settings, seen.paths, max_slots=slots)
    # Parallel requests are those of a server, whose KV cache has room for all of them.
    options = structs.replace(options, room_for_slots=parallel is not None)
    history = SpeedHistory(seen.paths.state_dir)
    catalog = read_catalog(seen.paths)
    rows = quantization_rows(seen.subject, options, machine, history, catalog, seen.offered)
    subject = seen.subject
    best = next((row for row in rows if row.recommended), None)
    shorter: QuantizationRow | None = None
    if best is None and options.context_tokens is not None:
        free = structs.replace(options, context_tokens=None)
        others = quantization_rows(seen.subject, free, machine, history, catalog, seen.offered)
        shorter = next((row for row in others if row.recommended), None)
    if best is not None and not seen.is_exact:
        subject = best.subject
        verdict = best.report
    else:
        verdict = assess(subject, options, machine, history)
    steps: tuple[MemoryStep, ...] = ()
    if not verdict.plan.fits and not verdict.plan.missing:
        limits = SlotLimit("--parallel", "", 1)
        steps = memory_steps(subject, options, machine, seen.paths, environ, limits)
    if as_json:
        path = str(subject.path) if subject.path is not None else None
        head = {"model": subject.name, "path": path, "parallel": slots}
        tail = {
            "steps": [step.as_json() for step in steps],
            "quantizations": [row.record() for row in rows],
        }
        print_json(environ, head | verdict.record() | tail)
    else:
        page = fit_page.FitPage(
            verdict,
            rows,
            steps,
            _context_lines(subject, options, verdict, machine),
            is_exact=seen.is_exact,
            memory_bytes=memory or 0,
            shorter=shorter,
        )
        print_lines(environ, fit_page.page_lines(page, seen.paths, machine))
    if verdict.plan.fits:
        return ExitCode.OK
    return ExitCode.DOES_NOT_FIT


def parse_gigabytes(text: str | None) -> int | None:
    """Parse `16`, `16GB` or `1.5 gb` as bytes. Raises UsageError."""
    if text is None:
        return None
    number = text.strip().lower().removesuffix("b").removesuffix("g").strip()
    try:
        gigabytes = float(number)
    except ValueError:
        gigabytes = 0.0
    if not 0.1 <= gigabytes <= 1e6:
        raise UsageError(f"--memory {text}: expected gigabytes", hint="as in --memory 16")
    return round(gigabytes * 1e9)


def _context_lines(
    subject: "Subject", options: "LoadOptions", verdict: "FitReport", machine: "Machine"
) -> tuple[str, ...]:
    """Return the memory with a usual and with the longest context.

    Empty if the user chose a context.
    """
    from msgspec import structs

    from localchat.fit.report import USUAL_LENGTH
    from localchat.models.assess import assess

    plan = verdict.plan
    if options.context_tokens is not None or not plan.fits:
        return ()
    lines = []
    for context in (USUAL_LENGTH, plan.max_context_tokens):
        if context == plan.context_tokens or context > plan.max_context_tokens:
            continue
        chosen = structs.replace(options, context_tokens=context)
        other = assess(subject, chosen, machine, None, speed=False).plan
        line = (
            f"A context of {tokens(context)} needs {size(other.total_bytes)}, "
            f"of which KV {size(other.kv_bytes)}: --ctx {context}"
        )
        if other.window_only and not plan.window_only:
            # Otherwise a longer context would seem to need less memory than a shorter one.
            line += " (sliding windows are cut, as with --window-only)"
        lines.append(line)
    return tuple(lines)


def _machine(memory: int | None) -> "Machine":
    """Return this machine, or one like it with this much memory in bytes and no GPU."""
    from dataclasses import replace

    from localchat.backend_api.registry import usable_machine

    machine = usable_machine()
    if memory is None:
        return machine
    # A machine in everyday use has a desktop and a browser open, which take about a quarter, at most 3 GB.
    free_bytes = memory - min(memory // 4, _USUAL_PROGRAMS_BYTES)
    return replace(machine, ram_total_bytes=memory, ram_free_bytes=free_bytes, gpus=())


class FoundModel(NamedTuple):
    """Model and its settings."""

    subject: "Subject"
    settings: "Settings"
    paths: "Paths"
    app: AppContext
    is_exact: bool = True
    """Whether the user named the quantization, or the model is on this machine."""
    offered: "Mapping[str, str]" = MappingProxyType({})
    """Names for `pull` by quantization, as the repository lists them. Empty without a listing."""


def find_model(ctx: click.Context, model_name: str) -> FoundModel:
    """Return the local model with this name, or else the one to pull. Raises LocalchatError."""
    from localchat.cli.resolve import Inputs, resolve_setup, subject_of

    try:
        setup = resolve_setup(ctx, model_name)
    except ModelMissing as missing:
        inputs = Inputs.of(ctx, model_name)
        settings = inputs.settings((model_name,)).settings
        return _hub_model(model_name, inputs, settings, missing)
    return FoundModel(
        subject_of(setup.model, setup.settings), setup.settings, setup.paths, setup.app
    )


def _hub_model(
    name: str, inputs: "Inputs", settings: "Settings", missing: "ModelMissing"
) -> FoundModel:
    """Read the headers of a model on the hub. Raises `missing` if the hub has no such model."""
    from localchat.config.settings import offline_reason
    from localchat.models.assess import Subject
    from localchat.models.catalog import read_catalog
    from localchat.models.hub.client import hub_from_environment
    from localchat.models.hub.events import Note, PullEvent
    from localchat.models.hub.pull import select_files
    from localchat.models.hub.remote_header import read_remote_header
    from localchat.models.names import parse
    from localchat.models.published_shapes import published_model
    from localchat.models.quantization_table import offered_names
    from localchat.models.quantizations import canonical, gguf_variants

    catalog = read_catalog(inputs.paths)
    try:
        reference = parse(name, catalog)
    except (ModelMissing, UsageError):
        raise missing from None

    def found(
        name: str, model: "ModelSummary", offered: "Mapping[str, str]" = MappingProxyType({})
    ) -> FoundModel:
        subject = Subject(name, model, None, settings.backend)
        return FoundModel(subject, settings, inputs.paths, inputs.app, reference.exact, offered)

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
        return found(published.name, published)
    hub = hub_from_environment(inputs.app.environ)
    try:
        choice = select_files(reference, hub, show)
    except NetworkError as problem:
        published = published_model(reference)
        if published is None or not problem.details.get("unreachable"):
            raise
        terminal.notify(f"{problem.message}; using the published shape of {published.name}")
        return found(published.name, published)
    terminal.notify(
        f"{choice.name} is not on this machine; reading its headers from {choice.listing.repository}"
    )
    header = read_remote_header(choice, hub, show)
    listed = {
        canonical(variant.quantization): reference.stored_name(variant.quantization)
        for variant in gguf_variants(file.path for file in choice.listing.files)
        if variant.quantization and not variant.trouble
    }
    return found(choice.name, header, offered_names(name, catalog) | listed)


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
