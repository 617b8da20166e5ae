"""Command `localchat fit`: plans the load of a model, with the planner of the load itself."""

import sys
from collections.abc import Iterator
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Final, NamedTuple

import click

from localchat.cli.context import AppContext
from localchat.cli.options import complete_model, load_flags
from localchat.cli.output import print_json, print_lines
from localchat.cli.streams import Terminal
from localchat.errors import ExitCode, ModelMissing, NetworkError, UsageError
from localchat.fit.report import bar, parts
from localchat.fit.report import verdict as sentences
from localchat.sanitize import sanitize_line
from localchat.units import rate, size

if TYPE_CHECKING:
    from localchat.cli.resolve import Inputs
    from localchat.config.paths import Paths
    from localchat.config.settings import Settings
    from localchat.errors import ModelMissing, NetworkError
    from localchat.fit.hardware import Machine
    from localchat.fit.load_options import LoadOptions
    from localchat.models.assess import FitReport, Subject
    from localchat.models.names import Reference

NO_SPEED: Final = "Speed unknown: it cannot be estimated on this machine"
_LEAST_CELLS = 16
_MOST_CELLS = 60
"""Width of the memory bar."""


@click.command("fit")
@click.argument("word", metavar="MODEL", shell_complete=complete_model)
@load_flags
@click.option(
    "--parallel",
    type=click.IntRange(1, 255),
    metavar="N",
    help="Requests computed at once. Default: 2.",
)
@click.option("--offline/--no-offline", default=None, help="Never use the network. Default: off.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def command(
    ctx: click.Context, /, word: str, parallel: int | None, as_json: bool, **_: object
) -> int:
    """Check whether a model fits in memory, and how to make it fit.

    MODEL is here, or a name that `pull` knows: then only its headers are read over the network, a few
    megabytes. No weights are loaded. The speed is that of earlier runs here. Before the first run, it is a
    range that follows from the memory bandwidth.
    Exits with 0 if the model fits and with 4 if it does not.
    """
    from msgspec import structs

    from localchat.backend_api.registry import usable_machine
    from localchat.cli.resolve import CHAT_SLOTS
    from localchat.config.routes import PREFIX
    from localchat.fit.steps import IN_ORDER, MemoryStep, SlotLimit, step_lines
    from localchat.models.recommended_models import with_models_that_fit
    from localchat.models.resolve import planned_load
    from localchat.models.substitutes import memory_steps

    if word.startswith(PREFIX):
        return _fit_route(ctx, word, parallel, as_json=as_json)
    seen = find_model(ctx, word)
    slots = parallel or max(CHAT_SLOTS, seen.settings.n)
    subject = seen.subject
    machine = usable_machine()
    environ = seen.app.environ
    options = planned_load(seen.settings, seen.paths, max_slots=slots)
    # --parallel plans a server, whose KV cache has room for all requests.
    options = structs.replace(options, room_for_slots=parallel is not None)
    verdict = estimated(seen, options, machine)
    steps: tuple[MemoryStep, ...] = ()
    if not verdict.plan.fits and not verdict.plan.missing:
        limits = SlotLimit("--parallel", "", 1)
        steps = memory_steps(subject, options, machine, seen.paths, environ, limits)
    if as_json:
        path = str(subject.path) if subject.path is not None else None
        record = {"model": subject.name, "path": path, "parallel": slots}
        listed = {"steps": [step.as_json() for step in steps]}
        print_json(environ, record | verdict.record() | listed)
    else:
        print_lines(environ, report_lines(verdict))
        if steps:
            print_lines(environ, with_models_that_fit("", seen.paths, machine).splitlines())
            print_lines(environ, ("", IN_ORDER, *step_lines(steps)))
    if verdict.plan.fits:
        return ExitCode.OK
    return ExitCode.DOES_NOT_FIT


def estimated(seen: "FoundModel", options: "LoadOptions", machine: "Machine") -> "FitReport":
    """Return the report of a load with its speed."""
    from localchat.fit.speed import SpeedHistory
    from localchat.models.assess import assess

    return assess(seen.subject, options, machine, SpeedHistory(seen.paths.state_dir))


def _fit_route(ctx: click.Context, route_name: str, parallel: int | None, *, as_json: bool) -> int:
    """Plan the small model of a route, and the large one beside it."""
    from localchat.backend_api.registry import usable_machine
    from localchat.cli.resolve import CHAT_SLOTS, Inputs
    from localchat.config.routes import find_route
    from localchat.fit.memory_plan import machine_beside
    from localchat.fit.speed import SpeedHistory
    from localchat.models.assess import assess
    from localchat.models.resolve import planned_load

    inputs = Inputs.of(ctx, route_name)
    route = find_route(route_name, inputs.routes)
    machine = usable_machine()
    reports = []
    for name in (route.small, route.large):
        seen = find_model(ctx, name)
        slots = parallel or max(CHAT_SLOTS, seen.settings.n)
        options = planned_load(seen.settings, seen.paths, max_slots=slots)
        history = SpeedHistory(seen.paths.state_dir)
        reports.append(assess(seen.subject, options, machine, history))
        machine = machine_beside(machine, reports[-1].plan)
    small, large = reports
    fits = small.plan.fits and large.plan.fits
    if as_json:
        both = {"small": small.record(), "large": large.record()}
        print_json(inputs.app.environ, {"model": route_name, "fits": fits, **both})
    else:
        beside = f"Beside {small.name}:"
        lines = (*report_lines(small), "", beside, *report_lines(large))
        total = small.plan.total_bytes + large.plan.total_bytes
        both_fit = f"Both fit: {size(total)} together." if fits else "They do not fit together."
        print_lines(inputs.app.environ, (*lines, "", both_fit))
    return ExitCode.OK if fits else ExitCode.DOES_NOT_FIT


class FoundModel(NamedTuple):
    """A model to plan, and the settings for it."""

    subject: "Subject"
    settings: "Settings"
    paths: "Paths"
    app: AppContext


def find_model(ctx: click.Context, name: str) -> FoundModel:
    """Return the model here with this name, else the one that can be pulled. Raises LocalchatError."""
    from localchat.cli.resolve import Inputs, resolve_setup
    from localchat.model_files.checkpoint import read_summary
    from localchat.models.assess import Subject

    try:
        setup = resolve_setup(ctx, name)
    except ModelMissing as missing:
        inputs = Inputs.of(ctx, name)
        settings = inputs.settings((name,)).settings
        subject = _elsewhere(name, inputs, settings, missing)
        return FoundModel(subject, settings, inputs.paths, inputs.app)
    model = setup.model
    unloaded = read_summary(model.path, dummy_weights=setup.settings.dummy_weights)
    subject = Subject(model.name, unloaded, model.path, setup.settings.backend)
    return FoundModel(subject, setup.settings, setup.paths, setup.app)


def _elsewhere(
    name: str, inputs: "Inputs", settings: "Settings", missing: "ModelMissing"
) -> "Subject":
    """Return the model on the hub from its headers. Raises `missing` if the hub has none of this name."""
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
            f"{published.name} is not here and offline is set: using its published shape"
        )
        return Subject(published.name, published, None, settings.backend)
    hub = hub_from_environment(inputs.app.environ)
    patience = RetryPolicy()
    try:
        choice = select_files(reference, hub, show, patience)
    except NetworkError as problem:
        published = published_model(reference)
        if published is None or not problem.details.get("unreachable"):
            raise
        terminal.notify(f"{problem.message}; using the published shape of {published.name}")
        return Subject(published.name, published, None, settings.backend)
    terminal.notify(
        f"{choice.name} is not here; its headers are read from {choice.listing.repository}"
    )
    return Subject(
        choice.name, read_remote_header(choice, hub, show, patience), None, settings.backend
    )


def _unknown_shape(reference: "Reference", by: str) -> "NetworkError":
    """Return the error for a model whose shape is unknown. by: the setting or flag that set offline."""
    from localchat.models.published_shapes import published_names

    others = ", ".join(published_names(reference))
    return NetworkError(
        f"the memory of {reference.name} cannot be planned: it is not here, offline is set ({by}), "
        "and its published shape is not known",
        hint="turn offline off: then only its headers are read over the network, a few megabytes"
        + (f"\noffline, these can be planned: {others}" if others else ""),
    )


def report_lines(verdict: "FitReport") -> Iterator[str]:
    """Format the verdict, and the speed of a model that fits."""
    yield from verdict_lines(verdict)
    if verdict.plan.fits:
        yield from speed_lines(verdict)


def verdict_lines(verdict: "FitReport") -> Iterator[str]:
    """Format the report with a memory bar."""

    first, _, *others = sentences(verdict.plan)
    yield f"{sanitize_line(verdict.name)}: {first[0].lower()}{first[1:]}"
    if verdict.plan.missing:
        # The bar of a missing GPU would be empty.
        yield parts(verdict.plan)
        yield from (*others, *verdict.alternatives)
        return
    yield from bar(verdict.plan, verdict.memory_bytes, verdict.others_bytes, _bar_cells())
    yield f"{verdict.why} KV cache {verdict.plan.kv_type}."
    yield from others
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
    """Return the width of the bar: what the terminal leaves next to brackets and size."""
    if sys.stdout is None or not sys.stdout.isatty():
        return _MOST_CELLS
    return min(max(get_terminal_size().columns - 12, _LEAST_CELLS), _MOST_CELLS)
