"""Command `localchat bench`: measures models and servers under load."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from localchat.cli.context import app_context
from localchat.cli.measure.options import (
    default_model,
    json_option,
    models_argument,
    own_prompts,
    parse_counts,
    parse_milliseconds,
    parse_rates,
    quiet_option,
    vary_option,
)
from localchat.cli.measure.records import MeasuredResult, measure_command, run_to_end
from localchat.cli.options import FiniteRange, UserPath, load_flags
from localchat.cli.output import table
from localchat.errors import UsageError

if TYPE_CHECKING:
    from localchat.measure.bench_report import ReportTable
    from localchat.measure.records import BenchRecord
    from localchat.measure.sweep import Point, SweepSpec

_ALL: Final = "all"
_MAX_CLIENTS: Final = 4096


@click.command("bench")
@models_argument
@click.option(
    "--shape",
    "shape_words",
    multiple=True,
    metavar="NAME",
    help=(
        "Shape of the requests: chat, prompt, writing, prefix, edit, disruption, all, or tokens such "
        "as 512+128. Repeatable. Default: chat."
    ),
)
@click.option(
    "--prompts",
    "prompts_file",
    type=UserPath(path_type=Path, exists=True, dir_okay=False),
    metavar="FILE",
    help="Your own prompts instead of a shape: JSONL, as for batch.",
)
@click.option(
    "--history", is_flag=True, help="Prompts of your own conversations instead of a shape."
)
@click.option(
    "--clients", metavar="LIST", help="Numbers of clients, for example 1,4,16. Default: a sweep."
)
@click.option(
    "--rate",
    "rates",
    metavar="LIST",
    help="Requests per second that arrive at random, for example 0.5,2. Default: clients.",
)
@click.option(
    "--max-clients",
    type=click.IntRange(1, _MAX_CLIENTS),
    default=64,
    metavar="N",
    help="End of the sweep. Default: 64.",
)
@click.option(
    "--requests",
    type=click.IntRange(1),
    metavar="N",
    help="Requests of each client, or at each rate. Default: as many as fit in --seconds.",
)
@click.option(
    "--seconds",
    type=FiniteRange(0, min_open=True),
    default=10.0,
    metavar="S",
    help="Seconds in which clients send new requests at each point. Default: 10.",
)
@click.option(
    "--rounds",
    type=click.IntRange(1, 99),
    metavar="N",
    help="Repetitions. Default: 1, or 3 with variants.",
)
@vary_option
@click.option(
    "--ttft",
    metavar="TIME",
    help="Goodput target: longest time to first token, for example 500ms. Default: none.",
)
@click.option(
    "--tpot",
    metavar="TIME",
    help="Goodput target: longest time per token, for example 50ms. Default: none.",
)
@click.option(
    "--parallel",
    type=click.IntRange(1, 255),
    metavar="N",
    help="Requests that the server computes at once. Default: 16, with CUDA up to 128.",
)
@click.option(
    "--temperature",
    type=FiniteRange(0, 10),
    default=0.0,
    metavar="X",
    help="Randomness. Default: 0.",
)
@load_flags
@click.option(
    "--machine-hour",
    type=FiniteRange(0),
    metavar="PRICE",
    help="Price of the machine for an hour, for the cost of a million tokens.",
)
@json_option
@quiet_option
@click.pass_context
def command(ctx: click.Context, /, **_: object) -> int:
    """Measure a model or a server under load.

    MODEL is a model of this machine, for which bench starts a server; the address of a running server, such as
    http://127.0.0.1:8114; or remote:NAME of the settings. Several models are measured in turns. Clients send
    request after request over HTTP. Their number rises until more clients add no throughput. With --rate,
    requests arrive at random, whether or not earlier ones were answered. The shape disruption measures how a
    burst of long prompts slows running streams. A line below the table estimates how many people can use the
    model within --ttft and --tpot. Ctrl+C stops the benchmark and prints the results so far.
    """
    return measure_command(ctx, lambda: _measure(ctx), record_lines)


def _measure(ctx: click.Context) -> "MeasuredResult[BenchRecord]":
    from localchat.backend_api.registry import usable_machine
    from localchat.cli.measure.progress import MeasureProgress
    from localchat.cli.measure.targets import BenchTargets
    from localchat.cli.streams import Terminal
    from localchat.fit.contention import CpuWatch
    from localchat.measure.bench_report import missed_targets
    from localchat.measure.records import BenchRecord, MachineRecord, now
    from localchat.measure.sweep import Sweep, without_prompts
    from localchat.measure.variants import is_running

    spec = sweep_spec(ctx)
    terminal = Terminal(app_context(ctx).environ, quiet=bool(ctx.params["quiet"]))
    targets = BenchTargets(ctx, terminal)
    targets.check(spec.variants)
    began_at = now()
    watch = CpuWatch()
    with MeasureProgress(terminal) as progress:
        sweep = Sweep(spec, targets.open, progress.show_sweep)
        end = run_to_end(sweep.run)
    others_share = watch.others_share()
    if any(is_running(variant.model) for variant in spec.variants):
        # A running server counts as another program, so the share says nothing.
        others_share = 0.0
    if not sweep.points:
        return MeasuredResult(None, end)
    record = BenchRecord(
        at=began_at,
        machine=MachineRecord.of(usable_machine()),
        spec=without_prompts(spec),
        served=tuple(sweep.served.values()),
        points=tuple(sweep.points),
        complete=end.complete,
        others_share=others_share,
    )
    return MeasuredResult(record, end, missed_targets(record))


def sweep_spec(ctx: click.Context) -> "SweepSpec":
    """Build the sweep of the command line. Raises UsageError."""
    from localchat.measure.statistics import LatencyTarget
    from localchat.measure.sweep import SweepSpec
    from localchat.measure.variants import parse_vary, variants
    from localchat.measure.workload import (
        SHAPES,
        conversations_shape,
        parse_shape,
        prompt_shape,
    )

    options = ctx.params
    models = options["words"] or (default_model(ctx),)
    names = options["shape_words"] or ("chat",)
    if _ALL in names:
        names = tuple(name for name in SHAPES if name != "disruption" or not options["rates"])
    shapes = tuple(parse_shape(name) for name in dict.fromkeys(names))
    own = [flag for flag in ("prompts_file", "history", "shape_words") if options[flag]]
    if len(own) > 1:
        raise UsageError(
            "--prompts, --history and --shape exclude each other", hint="give one of them"
        )
    if options["prompts_file"] is not None:
        shapes = (prompt_shape(options["prompts_file"]),)
    if options["history"]:
        shapes = (conversations_shape("own conversations", own_prompts(app_context(ctx))),)
    rates = parse_rates(options["rates"])
    if rates and options["clients"]:
        raise UsageError("--rate and --clients exclude each other", hint="give one of them")
    if rates and any(shape.kind == "disruption" for shape in shapes):
        raise UsageError("the shape disruption has clients", hint="leave --rate out")
    combinations = variants(models, parse_vary(options["vary"]), options["parallel"])
    return SweepSpec(
        variants=combinations,
        shapes=shapes,
        clients=parse_counts(options["clients"], "--clients", maximum=_MAX_CLIENTS),
        max_clients=options["max_clients"],
        rounds=options["rounds"] or (3 if len(combinations) > 1 else 1),
        requests=options["requests"],
        seconds=options["seconds"],
        target=LatencyTarget(
            parse_milliseconds(options["ttft"], "--ttft"),
            parse_milliseconds(options["tpot"], "--tpot"),
        ),
        temperature=options["temperature"],
        rates=rates,
        machine_hour=options["machine_hour"],
    )


def record_lines(record: "BenchRecord", width: int | None) -> Iterator[str]:
    """Format a result."""
    from localchat.measure.bench_report import differences_table
    from localchat.measure.sweep import point_series

    for series in point_series(record.points):
        yield from _series_lines(record, series, width)
        yield ""
    if (differences := differences_table(record)) is not None:
        yield from _table_lines(differences, width)
        yield ""
    if record.disturbed:
        yield (
            f"Other programs used {record.others_share:.0%} of the CPU: expect better figures without "
            "them."
        )
    if not record.complete:
        yield "The benchmark was interrupted."
    yield "Times are p50/p95/p99, p50/p95/max below 100 values, median [minimum-maximum] below 20."


def _series_lines(record: "BenchRecord", series: "list[Point]", width: int | None) -> Iterator[str]:
    from localchat.measure import bench_report

    yield bench_report.heading(record, series)
    yield from _table_lines(bench_report.times_table(series), width)
    if (server := bench_report.server_table(series)) is not None:
        yield from _table_lines(server, width)
    yield from bench_report.sentences(record, series)


def _table_lines(data: "ReportTable", width: int | None) -> list[str]:
    return table(data.head, data.rows, right=range(data.left, len(data.head)), width=width)
