"""Command `localchat plan`: how many people a model serves, with how many copies, and what it costs."""

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import click

from localchat.cli.context import AppContext
from localchat.cli.options import FiniteRange, complete_model, load_flags
from localchat.cli.output import print_json, print_report, report_width, table
from localchat.errors import ExitCode, LocalchatError, UsageError
from localchat.units import duration, size

if TYPE_CHECKING:
    from localchat.config.prices import Prices
    from localchat.measure.bench_record import BenchStore
    from localchat.measure.service_plan import CostSource, ServiceDemand, ServicePlan

_SLOTS = 16
_LEAST_COUNT = 0.1
_LONG_MS = 10_000


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
    "--in",
    "prompt_tokens",
    type=click.IntRange(1),
    metavar="N",
    help="Tokens in a prompt. Default: 200.",
)
@click.option(
    "--out",
    "output_tokens",
    type=click.IntRange(1),
    metavar="N",
    help="Tokens in an answer. Default: 200.",
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
    help="Price of kwh, machine_hour, hosted_in or hosted_out. Repeatable.",
)
@click.option(
    "--parallel",
    type=click.IntRange(1, 255),
    metavar="N",
    help="Requests that one copy computes at once. Default: 16.",
)
@click.option(
    "--large-share",
    type=FiniteRange(0, 1),
    metavar="X",
    help="Share of a route's answers that its large model gives. Default: 0.25.",
)
@load_flags
@click.option("--offline/--no-offline", default=None, help="Never use the network. Default: off.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def command(
    ctx: click.Context,
    /,
    word: str | None,
    users: float | None,
    every: str,
    rate: float | None,
    prompt_tokens: int | None,
    output_tokens: int | None,
    number: str | None,
    as_json: bool,
    **_: object,
) -> int:
    """Estimate how many users a model can serve, and at what cost.

    From a benchmark of this model (localchat bench MODEL) or, without one, from an estimate, which it says;
    so MODEL may be one that is not here yet, as for fit.
    With --users or --rate it finds the copies that are needed; otherwise what one copy can do. Times are those
    of requests that arrive at random. Prices are flags, or stand in the settings file under [prices].
    route:NAME plans both models of a route, beside the large one alone.
    """
    from localchat.cli.measure.bench import milliseconds
    from localchat.config.paths import find_paths
    from localchat.config.routes import PREFIX
    from localchat.measure.bench_record import BenchStore
    from localchat.measure.service_plan import ServiceDemand, make_plan
    from localchat.measure.statistics import LatencyTarget

    app = ctx.find_object(AppContext)
    assert app is not None
    if users is not None and rate is not None:
        raise UsageError("--users and --rate say the same", hint="give one of them")
    asked = ctx.params
    every_s = (milliseconds(every, "--every") or 0.0) / 1e3
    if users is not None:
        rate = users / every_s
    demand = ServiceDemand(
        requests_per_s=rate,
        every_s=every_s,
        prompt_tokens=prompt_tokens or 200,
        output_tokens=output_tokens or 200,
        target=LatencyTarget(
            milliseconds(asked["ttft"], "--ttft"), milliseconds(asked["tpot"], "--tpot")
        ),
    )
    prices = _prices(app, asked["prices"])
    store = BenchStore(find_paths(app.environ).data_dir)
    if word is not None and word.startswith(PREFIX):
        return _plan_route(ctx, store, word, demand, prices)
    found = make_plan(_source(ctx, store, word, number), demand, prices)
    if as_json:
        print_json(app.environ, found)
    else:
        lines = list(plan_lines(found, report_width(app.environ)))
        if prices.kwh is not None and found.price.joules is None:
            lines.append("Energy is not in the cost: no benchmark of this model measured it.")
        print_report(app.environ, lines)
    return ExitCode.OK if found.copies else ExitCode.ERROR


def _plan_route(
    ctx: click.Context, store: "BenchStore", word: str, demand: "ServiceDemand", prices: "Prices"
) -> int:
    """Plan a route and print that. Raises LocalchatError."""
    from localchat.cli.measure.plan_route import LARGE_SHARE, plan_route, route_lines
    from localchat.cli.resolve import Inputs
    from localchat.config.routes import find_route

    inputs = Inputs.of(ctx, word)
    asked = ctx.params
    if asked["number"] is not None:
        raise UsageError("--from names one benchmark, and a route has two models")
    share = LARGE_SHARE if asked["large_share"] is None else asked["large_share"]
    route = find_route(word, inputs.routes)
    found = plan_route(route, lambda one: _source(ctx, store, one, None), demand, prices, share)
    if asked["as_json"]:
        print_json(inputs.app.environ, found)
    else:
        environ = inputs.app.environ
        told = partial(plan_lines, width=report_width(environ))
        lines = route_lines(found, told, assumed=asked["large_share"] is None)
        print_report(environ, lines)
    if found.small.copies and found.large.copies:
        return ExitCode.OK
    return ExitCode.ERROR


def _prices(app: AppContext, words: tuple[str, ...]) -> "Prices":
    """Prices of the settings file, and those of flags over them. Raises UsageError."""
    import msgspec

    from localchat.config.paths import find_paths
    from localchat.config.settings_file import read_settings
    from localchat.measure.service_plan import parse_price

    held = read_settings(find_paths(app.environ).settings_file).prices
    known = msgspec.structs.asdict(held)
    return msgspec.structs.replace(held, **dict(parse_price(word, known) for word in words))


def _source(
    ctx: click.Context, store: "BenchStore", word: str | None, number: str | None
) -> "CostSource":
    """What is known of the model: the named benchmark, its newest, or an estimate. Raises LocalchatError."""
    from localchat.measure.service_plan import measured_source

    if number is not None:
        return measured_source(store.find(number), word)
    for record in reversed(list(store.records())):
        if word is None or word in record.models:
            try:
                return measured_source(record, word)
            except UsageError:
                continue  # it has nothing to plan from; an older one may have
    return _estimate(ctx, word)


def _estimate(ctx: click.Context, word: str | None) -> "CostSource":
    """An estimate from the planner of a load, of a model that can be pulled too. Raises LocalchatError."""
    from msgspec import structs

    from localchat.backend_api.registry import usable_machine
    from localchat.cli.models.fit import NO_SPEED, estimated, find_model
    from localchat.cli.work_model import work_model
    from localchat.fit.memory_plan import demand
    from localchat.measure.service_plan import predicted_source
    from localchat.measure.variants import is_running
    from localchat.models.resolve import planned_load

    if word is not None and is_running(word):
        raise UsageError(
            f"nothing was measured of {word}, and a server elsewhere cannot be estimated",
            hint=f"localchat bench {word}",
        )
    seen = find_model(ctx, word if word is not None else work_model(ctx).local_word)
    slots = ctx.params["parallel"] or _SLOTS
    options = planned_load(seen.settings, seen.paths, max_slots=slots)
    options = structs.replace(options, room_for_slots=True)
    report = estimated(seen, options, usable_machine())
    name = seen.subject.name
    plan = demand(report.plan, name)
    if report.expected_speed is None:
        raise LocalchatError(
            f"nothing was measured of {name}, and it cannot be planned from an estimate",
            hint=f"{NO_SPEED}\nlocalchat bench {name} measures it, once it is here",
        )
    speed = report.expected_speed
    return predicted_source(name, speed.tokens_per_s, plan, slots, speed.basis)


def plan_lines(found: "ServicePlan", width: int | None) -> Iterator[str]:
    """The plan in words. width: of the terminal."""
    demand = found.demand
    lengths = f"{demand.prompt_tokens:,.0f} tokens in and {demand.output_tokens:,.0f} out"
    yield f"{found.model}: requests of {lengths} ({found.basis})"
    yield (
        f"One copy answers {_rate(found.capacity_per_s)} at most, with "
        f"{found.running_at_capacity} running at once."
    )
    if not found.copies or found.queue is None:
        yield (
            "No number of copies meets the target: a single request takes longer. A smaller model, a faster "
            "machine or a looser target would."
        )
        return
    users = found.requests_per_s * demand.every_s
    copies = f"{found.copies:,} cop{'y' if found.copies == 1 else 'ies'}"
    serves = "need" if demand.requests_per_s is not None else "are served by"
    yield (
        f"{users:,.0f} people who ask every {demand.every_s:g} s ({_rate(found.requests_per_s)}) {serves} "
        f"{copies}, {found.queue.load:.0%} loaded; {found.headroom:.0%} is headroom."
    )
    yield from _waiting(found, width)
    yield from _memory(found)
    yield from _money(found)


def _waiting(found: "ServicePlan", width: int | None) -> Iterator[str]:
    queue = found.queue
    assert queue is not None
    rows = [
        (name, *map(_time, values))
        for name, values in (
            ("to the first token", (queue.ttft_ms.p50, queue.ttft_p95_ms, queue.ttft_ms.p99)),
            ("per token", (queue.tpot_ms.p50, queue.tpot_p95_ms, queue.tpot_ms.p99)),
        )
    ]
    yield from table(("TIME", "P50", "P95", "P99"), rows, right=(1, 2, 3), width=width)
    yield f"A copy has {queue.running:.1f} requests in work on average."


def _memory(found: "ServicePlan") -> Iterator[str]:
    length = found.demand.prompt_tokens + found.demand.output_tokens
    if found.conversations is not None:
        room = f"{found.conversations:,} conversations of {length:,.0f} tokens"
        yield f"Its KV cache has room for {room} at once."
    if found.memory_bytes is not None:
        yield f"A copy takes {size(found.memory_bytes)} of memory."


def _money(found: "ServicePlan") -> Iterator[str]:
    price = found.price
    if price.joules is not None:
        paths = ", ".join(
            f"{name} {joules / 1e3:,.1f} kJ" for name, joules in price.joules_by_path.items()
        )
        yield f"A thousand answers take {price.joules / 1e3:,.1f} kJ: {paths}."
    money = [
        f"{name} {value:,.2f}"
        for name, value in (
            ("energy", price.energy_money),
            ("machines", price.machine_money),
            ("the hosted API instead", price.hosted_money),
        )
        if value is not None
    ]
    if money:
        yield f"A thousand answers cost: {', '.join(money)}."
    tokens = found.demand.prompt_tokens + found.demand.output_tokens
    per_million = [
        f"{name} {value * 1e3 / tokens:,.2f}"
        for name, value in (
            ("energy", price.energy_money),
            ("machines", price.machine_money),
            ("the hosted API instead", price.hosted_money),
        )
        if value is not None
    ]
    if per_million:
        yield f"A million tokens, in and out, cost: {', '.join(per_million)}."


def _time(ms: float) -> str:
    if ms >= _LONG_MS:
        return duration(ms / 1e3)
    return f"{ms:,.0f} ms" if ms >= 100 else f"{ms:.1f} ms"


def _rate(per_second: float) -> str:
    """In the shortest unit of time that has a tenth of a request."""
    units = {"a second": per_second, "a minute": 60 * per_second, "an hour": 3600 * per_second}
    unit = next((unit for unit, count in units.items() if count >= _LEAST_COUNT), "an hour")
    count = units[unit]
    digits = 2 if count < 10 else 1 if count < 100 else 0
    return f"{count:,.{digits}f} requests {unit}"
