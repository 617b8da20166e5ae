"""Command `localchat plan`: how many users a model serves, with how many copies, and at what cost."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final

import click

from localchat.cli.context import app_context
from localchat.cli.measure.options import json_option, parse_milliseconds
from localchat.cli.options import FiniteRange, complete_model
from localchat.cli.output import print_json, print_lines, report_width, table
from localchat.errors import ExitCode, UsageError
from localchat.units import counted, duration

if TYPE_CHECKING:
    from localchat.config.prices import Prices
    from localchat.measure.service_plan import AnswerCosts, ServiceDemand, ServicePlan
    from localchat.measure.store import BenchStore

_MIN_RATE: Final = 0.1
"""Rate below which a longer unit of time is clearer."""
_LONG_MS: Final = 10_000


@click.command("plan")
@click.argument("word", metavar="[MODEL]", required=False, shell_complete=complete_model)
@click.option(
    "--users",
    type=FiniteRange(0, min_open=True),
    metavar="N",
    help="Number of people who use the model.",
)
@click.option(
    "--every",
    metavar="TIME",
    default="60s",
    help="Time between two requests of one person. Default: 60s.",
)
@click.option(
    "--rate",
    type=FiniteRange(0, min_open=True),
    metavar="R",
    help="Requests per second of all people together.",
)
@click.option(
    "--ttft",
    metavar="TIME",
    help="Longest time to first token for 95 of 100 requests, for example 2s. Default: none.",
)
@click.option(
    "--tpot",
    metavar="TIME",
    help="Longest time per token for 95 of 100 requests, for example 100ms. Default: none.",
)
@click.option(
    "--from",
    "number",
    metavar="N",
    help="Number of the benchmark to plan from. Default: the newest of the model.",
)
@click.option(
    "--price",
    "prices",
    multiple=True,
    metavar="NAME=X",
    help="Price of machine_hour, hosted_in or hosted_out. Repeatable.",
)
@json_option
@click.pass_context
def command(ctx: click.Context, /, word: str | None, **_: object) -> int:
    """Estimate how many users a model can serve, and at what cost.

    The plan is based on a benchmark of this model: run localchat bench MODEL first, with --shape for prompts
    and answers of your lengths, or --rate for requests that arrive at random. With --users or --rate, plan
    computes the copies that are needed, otherwise the load that one copy takes. Prices are flags, or entries
    of [prices] in the settings file.
    """
    from localchat.config.paths import find_paths
    from localchat.measure.store import BenchStore

    environ = app_context(ctx).environ
    demand = _demand(ctx)
    prices = _prices(environ, ctx.params["prices"])
    store = BenchStore(find_paths(environ).data_dir)
    plan = _plan(store, word, ctx.params["number"], demand, prices)
    if ctx.params["as_json"]:
        print_json(environ, plan)
    else:
        print_lines(environ, _plan_lines(plan, report_width(environ)))
    return ExitCode.OK if plan.copies else ExitCode.ERROR


def _demand(ctx: click.Context) -> "ServiceDemand":
    """Build the demand of the command line. Raises UsageError."""
    from localchat.measure.service_plan import ServiceDemand
    from localchat.measure.statistics import LatencyTarget

    options = ctx.params
    users = options["users"]
    rate = options["rate"]
    if users is not None and rate is not None:
        raise UsageError("--users and --rate mean the same", hint="give one of them")
    every_s = (parse_milliseconds(options["every"], "--every") or 0.0) / 1e3
    if users is not None:
        rate = users / every_s
    return ServiceDemand(
        requests_per_s=rate,
        every_s=every_s,
        target=LatencyTarget(
            parse_milliseconds(options["ttft"], "--ttft"),
            parse_milliseconds(options["tpot"], "--tpot"),
        ),
    )


def _prices(environ: Mapping[str, str], arguments: tuple[str, ...]) -> "Prices":
    """Return the prices of the settings file, overridden by flags. Raises UsageError."""
    import msgspec

    from localchat.config.paths import find_paths
    from localchat.config.settings_file import read_settings
    from localchat.measure.service_plan import parse_price

    stored = read_settings(find_paths(environ).settings_file).prices
    names = msgspec.structs.asdict(stored)
    flags = dict(parse_price(argument, names) for argument in arguments)
    return msgspec.structs.replace(stored, **flags)


def _plan(
    store: "BenchStore",
    model: str | None,
    number: str | None,
    demand: "ServiceDemand",
    prices: "Prices",
) -> "ServicePlan":
    """Plan from a benchmark, by default the newest of the model. Raises UsageError."""
    from localchat.measure.service_plan import make_plan

    if number is not None:
        return make_plan(store.find(number), model, demand, prices)
    for record in reversed(list(store)):
        if model is None or model in record.models:
            try:
                return make_plan(record, model, demand, prices)
            except UsageError:
                continue  # without a usable series; an older one may have it
    name = model or "MODEL"
    raise UsageError(
        f"there is no benchmark of {model or 'a model'} to plan from",
        hint=f"localchat bench {name} makes one",
    )


def _plan_lines(plan: "ServicePlan", width: int | None) -> Iterator[str]:
    """Format the plan of a model."""
    from localchat.measure.service_plan import p95_ms

    demand = plan.demand
    lengths = f"{plan.prompt_tokens:,.0f} tokens in and {plan.output_tokens:,.0f} out"
    yield f"{plan.model}: requests of {lengths} ({plan.basis})"
    measured = plan.measured
    if measured is None:
        yield (
            "No number of copies meets the target: every measured load was slower. Try a smaller model, a "
            "faster machine, a looser target, or a benchmark with fewer --clients."
        )
        return
    note = "the most that was measured"
    if demand.target:
        note = "the most within the target"
    yield f"One copy answered {_rate(measured.requests_per_s)} with {measured.load}, {note}."
    users = plan.requests_per_s * demand.every_s
    copies = f"{plan.copies:,} cop{'y' if plan.copies == 1 else 'ies'}"
    serves = "need" if demand.requests_per_s is not None else "are served by"
    yield (
        f"{users:,.0f} people who ask every {demand.every_s:g} s ({_rate(plan.requests_per_s)}) {serves} "
        f"{copies}, {plan.share:.0%} loaded; {1 - plan.share:.0%} is headroom."
    )
    rows = [
        (name, *map(_time, (times.p50, p95_ms(times), times.p99)))
        for name, times in (
            ("to the first token", measured.ttft_ms),
            ("per token", measured.tpot_ms),
        )
        if times is not None
    ]
    yield f"Times with {measured.load}:"
    yield from table(("TIME", "P50", "P95", "P99"), rows, right=(1, 2, 3), width=width)
    length = plan.prompt_tokens + plan.output_tokens
    if plan.conversations is not None:
        room = f"{counted(plan.conversations, 'conversation')} of {length:,.0f} tokens"
        yield f"Its KV cache has room for {room}."
    yield from _cost_lines(plan.price, length)


def _cost_lines(price: "AnswerCosts", length: float) -> Iterator[str]:
    costs = [
        (name, cost)
        for name, cost in (
            ("machines", price.machine_money),
            ("the hosted API instead", price.hosted_money),
        )
        if cost is not None
    ]
    if costs:
        per_thousand = ", ".join(f"{name} {cost:,.2f}" for name, cost in costs)
        per_million = ", ".join(f"{name} {cost * 1e3 / length:,.2f}" for name, cost in costs)
        yield f"A thousand answers cost: {per_thousand}."
        yield f"A million tokens, in and out, cost: {per_million}."


def _time(ms: float) -> str:
    if ms >= _LONG_MS:
        return duration(ms / 1e3)
    if ms >= 100:
        return f"{ms:,.0f} ms"
    return f"{ms:.1f} ms"


def _rate(per_second: float) -> str:
    """Format a rate in a unit of time with a tenth of a request or more."""
    rates = {"a second": per_second, "a minute": 60 * per_second, "an hour": 3600 * per_second}
    unit = next((unit for unit, count in rates.items() if count >= _MIN_RATE), "an hour")
    count = rates[unit]
    if count >= 100:
        return f"{count:,.0f} requests {unit}"
    if count >= 10:
        return f"{count:.1f} requests {unit}"
    return f"{count:.2f} requests {unit}"
