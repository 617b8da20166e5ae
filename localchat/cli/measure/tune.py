"""Command `localchat tune`: finds the fastest settings of a model on this machine."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import click

from localchat.cli.measure.options import json_option, quiet_option
from localchat.cli.options import complete_model, given_flags, load_flags
from localchat.cli.output import confirm, print_json, print_report, report_width, table
from localchat.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from localchat.cli.resolve import Setup
    from localchat.measure.statistics import Difference
    from localchat.measure.sweep import SweepEvent
    from localchat.measure.tuner import Trial, TunedSettings, Tuner, Tuning

_NOTABLE_GAIN: Final = 0.05
"""Gain within noise that is worth more rounds."""
_HEAD: Final = ("SETTING", "INSTEAD OF", "SPEED", "")


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
@json_option
@quiet_option
@click.pass_context
def command(
    ctx: click.Context, /, word: str, undo: bool, yes: bool, as_json: bool, **_: object
) -> int:
    """Find the fastest settings of a model on this machine.

    Measures threads, KV type, drafts and layers on the GPU beside the present settings, and shows the gain of
    each. Settings that are measurably faster can be stored for this model. A flag such as --kv-type f16
    excludes that setting from the search.
    """
    from localchat.cli.resolve import resolve_setup
    from localchat.cli.signals import terminate_gracefully
    from localchat.measure.tuner import TunedSettings
    from localchat.measure.variants import is_running

    if is_running(word):
        raise UsageError(
            f"{word} is a server with settings of its own", hint="tune the model on that machine"
        )
    setup = resolve_setup(ctx, word)
    tuned = TunedSettings(setup.paths.settings_file, setup.paths.state_dir)
    if undo:
        _undo(setup, tuned)
        return ExitCode.OK
    tuner = _make_tuner(ctx, setup)
    try:
        with terminate_gracefully():
            tuning = tuner.run()
    except KeyboardInterrupt:
        setup.terminal.notify("interrupted: no setting was changed")
        raise
    environ = setup.app.environ
    if as_json:
        print_json(environ, tuning)
    else:
        print_report(environ, _tuning_lines(tuning, report_width(environ)))
    if tuning.settings and _may_write(setup, tuning, yes=yes, as_json=as_json):
        tuned.write(setup.model.name, tuning.settings)
        setup.terminal.print_line(
            f"localchat: wrote {setup.paths.settings_file}; localchat tune {word} --undo takes it back"
        )
    return ExitCode.OK


def _make_tuner(ctx: click.Context, setup: "Setup") -> "Tuner":
    """Choose the trials for this model. Raises LocalchatError if it does not fit in memory."""
    from localchat.backend_api.registry import usable_machine
    from localchat.cli.measure.progress import MeasureProgress
    from localchat.cli.measure.targets import BenchTargets
    from localchat.cli.resolve import subject_of
    from localchat.fit.memory_plan import demand
    from localchat.measure.tuner import Tuner, knobs
    from localchat.models.assess import assess
    from localchat.models.resolve import planned_load

    settings = setup.settings
    machine = usable_machine()
    subject = subject_of(setup.model, settings)
    options = planned_load(settings, setup.paths)
    plan = demand(assess(subject, options, machine, None, speed=False).plan, setup.model.name)
    present = {
        "gpu_layers": str(plan.gpu_layers),
        "threads": str(settings.threads or machine.cores),
        "kv_cache_type": plan.kv_type,
        "speculation": str(settings.speculation).lower(),
    }

    @contextmanager
    def watch(subject: str) -> "Iterator[Callable[[SweepEvent], None]]":
        setup.terminal.notify(f"measuring {subject}")
        with MeasureProgress(setup.terminal) as progress:
            yield progress.show_sweep

    return Tuner(
        setup.model.word,
        knobs(settings, given_flags(ctx), plan, machine),
        present,
        BenchTargets(ctx, setup.terminal).open,
        watch,
        clients=ctx.params["clients"],
        rounds=ctx.params["rounds"],
    )


def _tuning_lines(tuning: "Tuning", width: int | None) -> Iterator[str]:
    """Format the gain of each value, and the settings worth writing."""
    from localchat.measure.variants import flag_name

    yield from table(_HEAD, map(_trial_cells, tuning.trials), right=(2,), width=width)
    if any(_is_unclear(trial) for trial in tuning.trials):
        yield (
            "Within noise there may be a difference: a quiet machine or --rounds 6 shows smaller ones."
        )
    if tuning.gain is None:
        yield "The settings are the fastest that was found."
        return
    changes = ", ".join(f"{flag_name(key)} {value}" for key, value in tuning.settings.items())
    yield f"Faster by {tuning.gain.share:.1%}{_margin(tuning.gain)}: {changes}."


def _is_unclear(trial: "Trial") -> bool:
    """Return True if noise hides a gain that would be worth a setting."""
    gain = trial.gain
    return gain is not None and not gain.beyond_noise and gain.share > _NOTABLE_GAIN


def _trial_cells(trial: "Trial") -> tuple[str, ...]:
    from localchat.measure.variants import flag_name

    name = f"{flag_name(trial.key)} {trial.value}"
    if trial.gain is None:
        return name, trial.against, "-", trial.problem
    remark = ""
    if trial.taken:
        remark = "taken"
    elif not trial.gain.beyond_noise:
        remark = "within noise"
    return name, trial.against, f"{trial.gain.share:+.1%}{_margin(trial.gain)}", remark


def _margin(gain: "Difference") -> str:
    if gain.margin is None:
        return ""
    return f" ±{gain.margin:.1%}"


def _may_write(setup: "Setup", tuning: "Tuning", *, yes: bool, as_json: bool) -> bool:
    """Ask whether to write the settings. Without a terminal, print the commands that do so."""
    if yes:
        return True
    if as_json or sys.stdin is None or not sys.stdin.isatty():
        for key, value in tuning.settings.items():
            setup.terminal.notify(f"localchat config set {key} {value} --for {setup.model.name}")
        return False
    return confirm(f"Write this for {setup.model.name}?", yes=False, verb="tune")


def _undo(setup: "Setup", tuned: "TunedSettings") -> None:
    restored, skipped = tuned.undo(setup.model.name)
    terminal = setup.terminal
    if not restored and not skipped:
        terminal.print_line(f"localchat: no tuning of {setup.model.name} is stored")
    for entry in restored:
        value = "unset" if entry.before is None else entry.before
        terminal.print_line(f"localchat: {entry.key} is {value} again")
    for entry in skipped:
        terminal.print_line(
            f"localchat: {entry.key} was changed since the tuning wrote {entry.written}, so it stays"
        )
