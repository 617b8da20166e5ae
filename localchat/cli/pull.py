"""`localchat pull NAME`: fetch a model, and go on where an earlier try stopped."""

import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from localchat.cli.pull_progress import View
    from localchat.cli.resolve import Inputs
    from localchat.config.paths import Paths
    from localchat.models.hub.client import HubClient
    from localchat.models.hub.events import PullEvent
    from localchat.models.hub.pull import SelectedFiles
    from localchat.models.hub.retry import RetryPolicy
    from localchat.models.names import Reference


@click.command("pull")
@click.argument("name")
@click.option("-y", "--yes", is_flag=True, help="Do not ask, also where it will not fit.")
@click.option("--json", "as_json", is_flag=True, help="Print progress as lines of JSON.")
@click.option("--offline/--no-offline", default=None, help="Never use the network.")
@click.option("-q", "--quiet/--no-quiet", default=None, help="Only errors.")
@click.option("--color/--no-color", default=None, help="Colours on a terminal; on.")
@click.pass_context
def command(ctx: click.Context, /, name: str, yes: bool, as_json: bool, **_: object) -> int:
    """Fetch a model, or the rest of it.

    \b
    localchat pull qwen2.5:7b-q4_k_m       a name of the catalogue
    localchat pull qwen2.5:7b              the same: Q4_K_M where nothing is said
    localchat pull hf.co/user/repo:Q8_0    a repository of the Hugging Face hub

    Says first whether the model will fit into memory here; where it will not, asks on a terminal, and warns
    and goes on elsewhere.
    """
    from localchat.cli.pull_progress import view_for
    from localchat.cli.resolve import Inputs
    from localchat.cli.streams import Terminal
    from localchat.config.settings import offline_reason
    from localchat.errors import LocalchatError

    inputs = Inputs.of(ctx)
    settings = inputs.settings().settings
    terminal = Terminal(inputs.app.environ, quiet=settings.quiet, color=settings.color)
    asks = not (yes or as_json or settings.quiet) and terminal.stderr_is_terminal
    with view_for(terminal, as_json=as_json) as view:
        try:
            reference = _reference(name, inputs)
            if by := offline_reason(inputs.settings(), inputs.app.environ):
                _show_what_is_here(reference, inputs.paths, by, view)
            else:
                _pull(reference, inputs, view, asks=asks)
        except LocalchatError as problem:
            view.failed(problem)
            raise
        except KeyboardInterrupt:
            view.stopped(name)
            raise
    return 0


def _reference(name: str, inputs: "Inputs") -> "Reference":
    """What a name means. Raises UsageError, ModelMissing; of a model that is no matter of the hub and here
    already, with the command that runs it."""
    from localchat.errors import LocalchatError, ModelMissing, UsageError
    from localchat.models.catalog import read_catalog
    from localchat.models.names import parse
    from localchat.models.resolve import locate

    catalogue = read_catalog(inputs.paths)
    try:
        return parse(name, catalogue)
    except (ModelMissing, UsageError) as missing:
        if isinstance(missing, UsageError) and not Path(name).expanduser().exists():
            raise
        try:
            here = locate(name, inputs.paths, "", inputs.app.environ)
        except LocalchatError:
            raise missing from None
        raise ModelMissing(
            f"{missing.message}; a model of this name is here already",
            hint=f"run it: localchat run {here.word}",
        ) from missing


def _pull(reference: "Reference", inputs: "Inputs", view: "View", *, asks: bool) -> None:
    from localchat.models.hub.client import hub_from_environment
    from localchat.models.hub.download import remember_rate
    from localchat.models.hub.events import PullFinished
    from localchat.models.hub.pull import bytes_present, fetch, select_files
    from localchat.models.hub.retry import RetryPolicy

    patience = RetryPolicy()
    hub = hub_from_environment(inputs.app.environ)
    choice = select_files(reference, hub, view.show, patience)
    # What was begun was judged then.
    if not bytes_present(choice, inputs.paths.models_dir):
        _judge(choice, hub, inputs, view, patience, asks=asks)
    began_s, fetched = time.monotonic(), 0

    def show(event: "PullEvent") -> None:
        nonlocal fetched
        fetched = event.fetched_bytes if isinstance(event, PullFinished) else fetched
        view.show(event)

    fetch(choice, hub, inputs.paths.models_dir, show, patience)
    with suppress(OSError):  # the next download time is an assumption then
        remember_rate(inputs.paths.state_dir, fetched, time.monotonic() - began_s)


def _judge(
    choice: "SelectedFiles",
    hub: "HubClient",
    inputs: "Inputs",
    view: "View",
    patience: "RetryPolicy",
    *,
    asks: bool,
) -> None:
    """Show the verdict. A model whose header cannot be read beforehand is fetched all the same: that may be
    the server's fault. Raises DoesNotFit where the user would rather not."""
    import sys

    from localchat.cli.fit import LEAST_SLOTS
    from localchat.engine.options import load_options
    from localchat.errors import DoesNotFit, LocalchatError
    from localchat.fit.speed_history import SpeedHistory
    from localchat.models.assess import Subject, assess, usable_machine
    from localchat.models.hub.events import FitAssessed, Note
    from localchat.models.hub.remote_header import read_remote_header

    settings = inputs.settings((choice.name,)).settings
    options = load_options(settings, max_slots=max(LEAST_SLOTS, settings.n))
    try:
        subject = Subject(
            choice.name,
            read_remote_header(choice, hub, view.show, patience),
            None,
            settings.backend,
        )
        verdict = assess(subject, options, usable_machine(), SpeedHistory(inputs.paths.state_dir))
    except LocalchatError as problem:
        view.show(Note(f"whether it will run here is not known: {problem.message}"))
        return
    view.show(FitAssessed(choice.name, **verdict.record()))
    if verdict.plan.fits or not asks or not sys.stdin.isatty():
        return
    if not click.confirm("Fetch it all the same?", err=True):
        raise DoesNotFit(
            f"{choice.name} is not fetched",
            hint="--yes fetches it without asking; localchat fit tells more",
        )


def _show_what_is_here(
    reference: "Reference", paths: "Paths", forbidden_by: str, view: "View"
) -> None:
    """Without the network a model that is here whole is enough. Raises NetworkError."""
    from localchat.models.hub.client import offline_error
    from localchat.models.hub.events import PullFinished
    from localchat.models.hub.manifest import installed
    from localchat.models.names import among

    found = among(reference, installed(paths.models_dir))
    if found is None or not found.complete:
        raise offline_error(reference.name, forbidden_by)
    view.show(PullFinished(found.manifest.name, str(found.path), found.size_bytes, 0))
