"""Command `localchat pull`: download a model, or resume a download."""

import sys
from typing import TYPE_CHECKING, Literal, TypeAlias

import click

from localchat.cli.streams import Terminal
from localchat.config.paths import expand_home
from localchat.errors import DoesNotFit, LocalchatError, ModelInvalid, ModelMissing, UsageError
from localchat.units import size

if TYPE_CHECKING:
    from localchat.cli.models.pull_progress import PullView
    from localchat.cli.resolve import Inputs
    from localchat.config.paths import Paths
    from localchat.models.hub.client import HubClient
    from localchat.models.hub.events import PullEvent
    from localchat.models.hub.pull import SelectedFiles
    from localchat.models.names import Reference

Ask: TypeAlias = Literal["never", "misfit", "always"]
"""Ask before a download never, if the model will not fit, or always."""


@click.command("pull")
@click.argument("name")
@click.option("-y", "--yes", is_flag=True, help="Do not ask, even if the model will not fit.")
@click.option("--json", "as_json", is_flag=True, help="Print progress as lines of JSON.")
@click.option("--offline/--no-offline", default=None, help="Never use the network. Default: off.")
@click.option("-q", "--quiet/--no-quiet", default=None, help="Print only errors. Default: off.")
@click.option("--color/--no-color", default=None, help="Use colors on a terminal. Default: on.")
@click.pass_context
def command(ctx: click.Context, /, name: str, yes: bool, as_json: bool, **_: object) -> int:
    """Download a model, or resume a download.

    \b
    localchat pull qwen2.5:7b-q4_k_m       a name of the catalogue
    localchat pull qwen2.5:7b              the same: Q4_K_M is the default
    localchat pull hf.co/user/repo:Q8_0    a repository of the Hugging Face hub

    Before the download, the command reports whether the model fits in memory. If it does not, the command asks
    on a terminal, and continues with a warning elsewhere.
    """
    from localchat.cli.resolve import Inputs

    inputs = Inputs.of(ctx)
    settings = inputs.settings().settings
    terminal = Terminal(inputs.app.environ, quiet=settings.quiet, color=settings.color)
    ask: Ask = "never"
    if terminal.stderr_is_terminal and not (yes or as_json or settings.quiet):
        ask = "misfit"
    if not pull(name, inputs, terminal, ask=ask, as_json=as_json):
        raise DoesNotFit(
            f"{name} was not downloaded",
            hint="--yes downloads it without asking; see localchat fit",
        )
    return 0


def pull(
    name: str, inputs: "Inputs", terminal: Terminal, *, ask: Ask, as_json: bool = False
) -> bool:
    """Download a model. Return False if the user declines. Raises LocalchatError, KeyboardInterrupt."""
    from localchat.cli.models.pull_progress import JsonView, ProgressView
    from localchat.config.settings import offline_reason

    view: PullView = JsonView(terminal) if as_json else ProgressView(terminal)
    with view:
        try:
            reference = _reference(name, inputs)
            if by := offline_reason(inputs.settings(), inputs.app.environ):
                _show_installed(reference, inputs.paths, by, view)
                return True
            return _pull(reference, inputs, view, ask)
        except LocalchatError as problem:
            view.failed(problem)
            raise
        except KeyboardInterrupt:
            view.stopped(name)
            raise


def _reference(name: str, inputs: "Inputs") -> "Reference":
    """Parse a name. Raises UsageError, ModelMissing.

    The error for a local model that is not on the hub names the command that runs it.
    """
    from localchat.model_files.gguf import has_gguf_magic
    from localchat.models.catalog import read_catalog
    from localchat.models.names import parse
    from localchat.models.resolve import locate

    catalog = read_catalog(inputs.paths)
    try:
        return parse(name, catalog)
    except (ModelMissing, UsageError) as missing:
        if isinstance(missing, UsageError) and not expand_home(name).exists():
            raise
        try:
            local_model = locate(name, inputs.paths, "", inputs.app.environ)
        except LocalchatError:
            raise missing from None
        if local_model.path.is_file() and not has_gguf_magic(local_model.path):
            raise
        raise ModelMissing(
            f"{missing.message}; a model with this name is already on this machine",
            hint=f"run it: localchat run {local_model.word}",
        ) from missing


def _pull(reference: "Reference", inputs: "Inputs", view: "PullView", ask: Ask) -> bool:
    """Download the files. Return False if the user declines."""
    from localchat.models.hub.client import hub_from_environment
    from localchat.models.hub.events import PullFinished
    from localchat.models.hub.pull import bytes_present, fetch, select_files

    hub = hub_from_environment(inputs.app.environ)
    choice = select_files(reference, hub, view.show)
    # A resumed download showed its verdict when it began.
    is_resumed = bytes_present(choice, inputs.paths.models_dir) > 0
    fits = is_resumed or _show_verdict(choice, hub, inputs, view)
    if not _agreed(choice, ask, fits=fits):
        return False

    def show(event: "PullEvent") -> None:
        view.show(event)
        if isinstance(event, PullFinished) and event.trouble:
            raise ModelInvalid(
                f"{event.name} cannot be run: {event.trouble}",
                hint=f"localchat rm {event.name} removes it; the same model is often in several "
                "repositories",
            )

    fetch(choice, hub, inputs.paths.models_dir, show)
    return True


def _agreed(choice: "SelectedFiles", ask: Ask, *, fits: bool) -> bool:
    if ask == "never" or (fits and ask == "misfit") or not sys.stdin.isatty():
        return True
    question = "Download it anyway?"
    if fits:
        question = f"Download it ({size(choice.total_bytes)})?"
    return click.confirm(question, default=fits, err=True)


def _show_verdict(
    choice: "SelectedFiles",
    hub: "HubClient",
    inputs: "Inputs",
    view: "PullView",
) -> bool:
    """Show whether the model fits, and return it.

    Also return True if the header cannot be read, which may be the fault of the server.
    """
    from localchat.backend_api.registry import usable_machine
    from localchat.cli.resolve import chat_slots
    from localchat.fit.speed import SpeedHistory
    from localchat.models.assess import Subject, assess
    from localchat.models.hub.events import Note
    from localchat.models.hub.remote_header import read_remote_header
    from localchat.models.resolve import planned_load

    settings = inputs.settings((choice.name,)).settings
    try:
        options = planned_load(settings, inputs.paths, max_slots=chat_slots(settings))
        subject = Subject(
            choice.name,
            read_remote_header(choice, hub, view.show),
            None,
            settings.backend,
        )
        verdict = assess(subject, options, usable_machine(), SpeedHistory(inputs.paths.state_dir))
    except LocalchatError as problem:
        view.show(Note(f"unknown whether the model will run here: {problem.message}"))
        return True
    view.show_verdict(verdict)
    return verdict.plan.fits


def _show_installed(
    reference: "Reference", paths: "Paths", offline_by: str, view: "PullView"
) -> None:
    """Show the model if it is complete on this machine. Raises NetworkError otherwise."""
    from localchat.models.hub.client import offline_error
    from localchat.models.hub.events import PullFinished
    from localchat.models.hub.manifest import installed
    from localchat.models.names import find_pulled

    model = find_pulled(reference, installed(paths.models_dir))
    if model is None or not model.complete:
        raise offline_error(reference.name, offline_by)
    view.show(PullFinished(model.manifest.name, str(model.path), model.size_bytes, 0))
