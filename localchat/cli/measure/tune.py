"""Command `localchat tune`: finds the fastest settings of a model on this machine."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from localchat.cli.context import AppContext
from localchat.cli.options import complete_model, given_flags, load_flags
from localchat.cli.output import confirm, print_json, print_report, report_width, table
from localchat.cli.streams import Terminal
from localchat.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from localchat.cli.resolve import Setup
    from localchat.measure.sweep import SweepEvent
    from localchat.measure.tuned_settings import TunedSettings
    from localchat.measure.tuner import Trial, Tuner, Tuning

_WORTH = 0.05
_HEAD = ("SETTING", "INSTEAD OF", "SPEED", "")


@click.command("tune")
@click.argument("word", metavar="MODEL", shell_complete=complete_model)
@click.option(
    "--clients",
    type=click.IntRange(1, 255),
    default=1,
    metavar="N",
    help="Requests at once. Default: 1.",
)
@click.option(
    "--rounds",
    type=click.IntRange(2, 99),
    default=3,
    metavar="N",
    help="Repetitions. More of them find smaller differences. Default: 3.",
)
@click.option("--undo", is_flag=True, help="Undo what an earlier tuning wrote.")
@click.option("-y", "--yes", is_flag=True, help="Write the settings without asking.")
@load_flags
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "-q", "--quiet/--no-quiet", "quiet", default=None, help="Show no progress. Default: off."
)
@click.pass_context
def command(
    ctx: click.Context,
    /,
    word: str,
    clients: int,
    rounds: int,
    undo: bool,
    yes: bool,
    as_json: bool,
    **_: object,
) -> int:
    """Find the fastest settings of a model on this machine.

    Measures threads, KV type, drafts and layers on the GPU beside the settings as they are, and shows what
    each brings. Settings that are measurably faster can be stored for this model. A flag
    such as --kv-type f16 keeps that setting as it is given.
    """
    from localchat.cli.resolve import resolve_setup
    from localchat.cli.signals import terminate_gracefully
    from localchat.measure.tuned_settings import TunedSettings
    from localchat.measure.variants import is_running

    if is_running(word):
        raise UsageError(
            f"the settings of {word} are those of its server", hint="tune the model on that machine"
        )
    setup = resolve_setup(ctx, word)
    if setup.model.route is not None:
        pair = setup.model.route
        raise UsageError(
            f"{word} has two models, each with settings of its own",
            hint=f"localchat tune {pair.small.word}; localchat tune {pair.large.word}",
        )
    kept = TunedSettings(setup.paths.settings_file, setup.paths.state_dir)
    if undo:
        _take_back(setup, kept)
        return ExitCode.OK
    tuner = _tuner(ctx, setup, clients, rounds)
    try:
        with terminate_gracefully():
            found = tuner.run()
    except KeyboardInterrupt:
        setup.terminal.notify("interrupted: no setting was changed")
        raise
    if as_json:
        print_json(setup.app.environ, found)
    else:
        environ = setup.app.environ
        print_report(environ, result_lines(found, report_width(environ)))
    if found.settings and _agreed(setup, found, yes=yes, as_json=as_json):
        kept.write(setup.model.name, found.settings)
        setup.terminal.print_line(
            f"localchat: wrote {setup.paths.settings_file}; localchat tune {word} --undo takes it back"
        )
    return ExitCode.OK


def _tuner(ctx: click.Context, setup: "Setup", clients: int, rounds: int) -> "Tuner":
    """The trials for this model on this machine. Raises LocalchatError where it does not fit as it is."""
    from localchat.backend_api.registry import usable_machine
    from localchat.cli.measure.bench_servers import BenchServers
    from localchat.fit.memory_plan import demand
    from localchat.measure.tuner import Tuner, knobs
    from localchat.model_files.checkpoint import read_summary
    from localchat.models.assess import Subject, assess
    from localchat.models.resolve import planned_load

    app = ctx.find_object(AppContext)
    assert app is not None
    machine = usable_machine()
    model = read_summary(setup.model.path, dummy_weights=setup.settings.dummy_weights)
    subject = Subject(setup.model.name, model, setup.model.path, setup.settings.backend)
    options = planned_load(setup.settings, setup.paths)
    plan = demand(assess(subject, options, machine, None, speed=False).plan, setup.model.name)
    present = {
        "gpu_layers": str(plan.gpu_layers),
        "threads": str(setup.settings.threads or machine.cores),
        "kv_cache_type": plan.kv_type,
        "speculation": str(setup.settings.speculation).lower(),
    }
    servers = BenchServers(ctx, setup.terminal)

    @contextmanager
    def watch(what: str) -> "Iterator[Callable[[SweepEvent], None]]":
        from localchat.cli.measure.bench_progress import progress_for

        setup.terminal.notify(f"measuring {what}")
        with progress_for(setup.terminal) as progress:
            yield progress.show

    return Tuner(
        setup.model.word,
        knobs(setup.settings, given_flags(ctx), plan, machine),
        present,
        servers.open,
        watch,
        clients,
        rounds,
    )


def result_lines(found: "Tuning", width: int | None) -> Iterator[str]:
    """What each setting brought, and what is worth to be kept. width: of the terminal."""
    from localchat.measure.variants import flag_word

    yield from table(_HEAD, [_cells(one) for one in found.trials], right=(2,), width=width)
    if any(_unclear(one) for one in found.trials):
        yield (
            "Within noise there may be a difference: a quiet machine or --rounds 6 shows smaller ones."
        )
    if found.gain is None:
        yield "The settings are the fastest that was found."
        return
    changes = ", ".join(f"{flag_word(key)} {value}" for key, value in found.settings.items())
    margin = f" ±{found.gain.margin:.1%}" if found.gain.margin is not None else ""
    yield f"Faster by {found.gain.share:.1%}{margin}: {changes}."


def _unclear(one: "Trial") -> bool:
    """Whether the noise hid what would be worth a setting."""
    return one.gain is not None and not one.gain.beyond_noise and one.gain.share > _WORTH


def _cells(one: "Trial") -> tuple[str, ...]:
    from localchat.measure.variants import flag_word

    name = f"{flag_word(one.key)} {one.value}"
    if one.gain is None:
        return name, one.against, "-", one.problem
    margin = f" ±{one.gain.margin:.1%}" if one.gain.margin is not None else ""
    words = "taken" if one.taken else "" if one.gain.beyond_noise else "within noise"
    return name, one.against, f"{one.gain.share:+.1%}{margin}", words


def _agreed(setup: "Setup", found: "Tuning", *, yes: bool, as_json: bool) -> bool:
    """Whether to write the settings. Without a terminal, the commands that do so are printed."""
    import sys

    if yes:
        return True
    if as_json or sys.stdin is None or not sys.stdin.isatty():
        for key, value in found.settings.items():
            setup.terminal.notify(f"localchat config set {key} {value} --for {setup.model.name}")
        return False
    return confirm(f"Write this for {setup.model.name}?", yes=False, verb="tune")


def _take_back(setup: "Setup", kept: "TunedSettings") -> None:
    back, left = kept.undo(setup.model.name)
    terminal: Terminal = setup.terminal
    if not back and not left:
        terminal.print_line(f"localchat: no tuning of {setup.model.name} is written")
    for one in back:
        now = "unset" if one.before is None else one.before
        terminal.print_line(f"localchat: {one.key} is {now} again")
    for one in left:
        terminal.print_line(
            f"localchat: {one.key} stays: it was changed since the tuning wrote {one.written}"
        )
