"""Command `localchat bench`: measures models and servers under load, and compares what was measured."""

import re
from pathlib import Path
from typing import TYPE_CHECKING

import click

from localchat.cli.context import AppContext
from localchat.cli.options import FiniteRange, UserPath, complete_model, load_flags
from localchat.cli.streams import Terminal, tell
from localchat.errors import ExitCode, LocalchatError, UsageError

if TYPE_CHECKING:
    from localchat.measure.bench_record import BenchStore
    from localchat.measure.statistics import LatencyTarget
    from localchat.measure.sweep import SweepSpec

_ALL = "all"
_MOST_CLIENTS = 4096
_DURATION = re.compile(r"([\d.]+)\s*(ms|s|min|h|)")
_UNITS_MS = {"ms": 1.0, "": 1.0, "s": 1e3, "min": 60e3, "h": 3600e3}


@click.command("bench")
@click.argument("words", metavar="[MODEL...]", nargs=-1, shell_complete=complete_model)
@click.option(
    "--shape",
    "shape_words",
    multiple=True,
    metavar="NAME",
    help=(
        "Shape of the requests: chat, prompt, writing, prefix, edit, all, or tokens such "
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
    "--context",
    metavar="LIST",
    help="Tokens of conversation before each request, for example 0,2k,8k. Default: 0.",
)
@click.option(
    "--clients", metavar="LIST", help="Numbers of clients, for example 1,4,16. Default: a sweep."
)
@click.option(
    "--max-clients",
    type=click.IntRange(1, _MOST_CLIENTS),
    default=64,
    metavar="N",
    help="End of the sweep. Default: 64.",
)
@click.option(
    "--requests",
    type=click.IntRange(1),
    metavar="N",
    help="Requests of each client. Default: as many as fit in --seconds.",
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
@click.option(
    "--vary",
    multiple=True,
    metavar="KEY=A,B",
    help="Compare values of a setting, for example kv-type=f16,q8_0. Repeatable.",
)
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
    "--svg", type=UserPath(path_type=Path, dir_okay=False), metavar="FILE", help="Draw charts."
)
@click.option("--keep/--no-keep", default=True, help="Store the result. Default: on.")
@click.option("--list", "as_list", is_flag=True, help="List the stored results.")
@click.option("--show", metavar="N", help="Show a stored result: its number, last, or a file.")
@click.option("--compare", nargs=2, metavar="A B", help="Compare two results.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "-q", "--quiet/--no-quiet", "quiet", default=None, help="Show no progress. Default: off."
)
@click.pass_context
def command(
    ctx: click.Context,
    /,
    words: tuple[str, ...],
    svg: Path | None,
    keep: bool,
    as_list: bool,
    show: str | None,
    compare: tuple[str, str] | None,
    as_json: bool,
    **_: object,
) -> int:
    """Measure a model or a server under load.

    MODEL is a model of this machine, which gets a server of its own for as long as it is measured; the address
    of a running server, as http://127.0.0.1:8114; or remote:NAME of the settings. Several models are measured
    in turns. Clients send request after request over HTTP, more and more of them, until more bring no more
    tokens a second. Ctrl+C ends it and keeps what was measured.
    """
    from localchat.cli.measure.bench_results import compare_records, list_records, present
    from localchat.config.paths import find_paths
    from localchat.measure.bench_record import BenchStore

    app = ctx.find_object(AppContext)
    assert app is not None
    store = BenchStore(find_paths(app.environ).data_dir)
    chosen = [as_list, show is not None, compare is not None, bool(words)]
    if sum(chosen) > 1:
        raise UsageError("--list, --show, --compare and a model exclude each other")
    if as_list:
        list_records(app, store, as_json=as_json)
    elif compare is not None:
        compare_records(app, store, compare, as_json=as_json)
    elif show is not None:
        present(app, store.find(show), svg, as_json=as_json)
    else:
        return _measure(ctx, app, store if keep else None, svg, as_json=as_json)
    return ExitCode.OK


# ---------------------------------------------------------------------------- measuring


def _measure(
    ctx: click.Context,
    app: AppContext,
    store: "BenchStore | None",
    svg: Path | None,
    *,
    as_json: bool,
) -> int:
    """Run the sweep; an interrupted one is kept and shown as far as it came."""
    from localchat.backend_api.registry import usable_machine
    from localchat.cli.measure.bench_progress import progress_for
    from localchat.cli.measure.bench_results import present
    from localchat.cli.measure.bench_servers import BenchServers
    from localchat.cli.signals import terminate_gracefully
    from localchat.fit.contention import CpuWatch
    from localchat.measure.bench_record import BenchRecord, MachineRecord, now
    from localchat.measure.limits import missed_targets
    from localchat.measure.sweep import Sweep
    from localchat.measure.variants import is_running

    spec = sweep_spec(ctx)
    terminal = Terminal(app.environ, quiet=bool(ctx.params.get("quiet")))
    servers = BenchServers(ctx, terminal)
    if svg is not None and not svg.absolute().parent.is_dir():
        raise UsageError(f"--svg: there is no folder {svg.absolute().parent}")
    servers.check(spec.variants)
    at = now()
    problem = None
    interrupted = False
    watch = CpuWatch()
    with progress_for(terminal) as progress, terminate_gracefully():
        sweep = Sweep(spec, servers.open, progress.show)
        try:
            sweep.run()
        except LocalchatError as trouble:
            problem = trouble
        except KeyboardInterrupt:
            interrupted = True
    others_share = watch.others_share()
    if not sweep.points:
        if problem is not None:
            raise problem
        return ExitCode.INTERRUPTED if interrupted else ExitCode.ERROR
    record = BenchRecord(
        at=at,
        machine=MachineRecord.of(usable_machine()),
        spec=spec,
        served=tuple(sweep.served.values()),
        points=tuple(sweep.points),
        energy=sweep.meter.sources,
        complete=problem is None and not interrupted,
        # A server that runs already is a program of its own.
        others_share=0.0 if any(is_running(one.model) for one in spec.variants) else others_share,
    )
    try:
        record = store.keep(record) if store is not None else record
    except LocalchatError as trouble:  # what was measured is shown all the same
        problem = problem or trouble
    present(app, record, svg, as_json=as_json)
    if problem is not None:
        raise problem
    if interrupted:
        return ExitCode.INTERRUPTED
    missed = missed_targets(record)
    for sentence in missed:
        tell(sentence)
    return ExitCode.ERROR if missed else ExitCode.OK


# ---------------------------------------------------------------------------- what was asked


def sweep_spec(ctx: click.Context) -> "SweepSpec":
    """The sweep that the command line asks for. Raises UsageError."""
    from localchat.measure.prompt_file import prompt_shape
    from localchat.measure.sweep import SweepSpec
    from localchat.measure.variants import parse_vary, variants
    from localchat.measure.workload import SHAPES, parse_shape

    asked = ctx.params
    words = asked["words"] or (default_model(ctx),)
    names = asked["shape_words"] or ("chat",)
    if _ALL in names:
        names = tuple(SHAPES)
    shapes = tuple(parse_shape(name) for name in dict.fromkeys(names))
    if asked["prompts_file"] is not None:
        if asked["shape_words"]:
            raise UsageError("--prompts and --shape exclude each other")
        shapes = (prompt_shape(asked["prompts_file"]),)
    found = variants(words, parse_vary(asked["vary"]), asked["parallel"])
    return SweepSpec(
        variants=found,
        shapes=shapes,
        contexts=counts(asked["context"], "--context", least=0) or (0,),
        clients=counts(asked["clients"], "--clients", least=1, most=_MOST_CLIENTS),
        max_clients=asked["max_clients"],
        rounds=asked["rounds"] or (3 if len(found) > 1 else 1),
        requests=asked["requests"],
        seconds=asked["seconds"],
        target=_target(asked["ttft"], asked["tpot"]),
        temperature=asked["temperature"],
    )


def default_model(ctx: click.Context) -> str:
    """Return the model to measure where the command names none. Raises UsageError, ModelMissing."""
    from localchat.cli.work_model import work_model

    return work_model(ctx).local_word


def counts(
    text: str | None, flag: str, *, least: int, most: int = 1_000_000_000
) -> tuple[int, ...]:
    """`1,4,16` or `0,2k` as numbers. Raises UsageError."""
    found = []
    for word in (text or "").split(",") if text is not None else ():
        digits = word.strip().lower()
        thousands = digits.endswith("k")
        digits = digits.removesuffix("k")
        if not (digits.isascii() and digits.isdecimal()) or int(digits) < least:
            raise UsageError(
                f"{flag} {text}: {word.strip()!r} is not a number of at least {least}",
                hint=f"as in {flag} {'0,2k,8k' if least == 0 else '1,4,16'}",
            )
        found.append(int(digits) * (1024 if thousands else 1))
        if found[-1] > most:
            raise UsageError(
                f"{flag} {text}: {word.strip()!r} is too large; it is at most {most:,}"
            )
    return tuple(dict.fromkeys(found))


def _target(ttft: str | None, tpot: str | None) -> "LatencyTarget":
    from localchat.measure.statistics import LatencyTarget

    return LatencyTarget(milliseconds(ttft, "--ttft"), milliseconds(tpot, "--tpot"))


def milliseconds(text: str | None, flag: str) -> float | None:
    """`500ms`, `0.5s`, `2min` or `500` in milliseconds. Raises UsageError."""
    if text is None:
        return None
    found = _DURATION.fullmatch(text.strip().lower())
    try:
        value = float(found[1]) if found else 0.0
    except ValueError:
        value = 0.0
    if found is None or value <= 0:
        raise UsageError(
            f"{flag} is {text!r}, which is not a time", hint=f"as in {flag} 500ms or {flag} 0.5s"
        )
    return value * _UNITS_MS[found[2]]
