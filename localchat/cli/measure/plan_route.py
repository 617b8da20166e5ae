"""Plan of a route: copies of its small model and of its large one, beside the large one for all requests."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from localchat.config.prices import Prices
    from localchat.config.routes import Route
    from localchat.measure.service_plan import CostSource, ServiceDemand, ServicePlan

LARGE_SHARE: Final = 0.25
"""Of the answers, where nobody says how many the large model gives."""


class RoutePlan(msgspec.Struct, frozen=True, kw_only=True):
    """Both parts of a route, and what it is compared with."""

    route: str
    large_share: float
    """Of the answers, those that the large model gives."""
    waits: bool
    """The small model answers first, and what it answers may be discarded."""
    small: "ServicePlan"
    large: "ServicePlan"
    large_alone: "ServicePlan"
    """The large model for all requests."""


def plan_route(
    route: "Route",
    source_of: "Callable[[str], CostSource]",
    demand: "ServiceDemand",
    prices: "Prices",
    large_share: float,
) -> RoutePlan:
    """Plan both models of a route for a demand; without one, for what a copy of each answers together."""
    from localchat.measure.service_plan import make_plan

    shares = (1.0 if route.waits else 1 - large_share, large_share)
    sources = [source_of(word) for word in (route.small, route.large)]
    rate = demand.requests_per_s
    if rate is None:
        most = [make_plan(one, demand, prices).requests_per_s for one in sources]
        rate = min(one / share for one, share in zip(most, shares, strict=True) if share)

    def planned(source: "CostSource", share: float) -> "ServicePlan":
        part = msgspec.structs.replace(demand, requests_per_s=rate * share)
        return make_plan(source, part, prices)

    small, large = (planned(one, share) for one, share in zip(sources, shares, strict=True))
    return RoutePlan(
        route=route.word,
        large_share=large_share,
        waits=route.waits,
        small=small,
        large=large,
        large_alone=planned(sources[1], 1.0),
    )


def route_lines(
    found: RoutePlan, plan_lines: "Callable[[ServicePlan], Iterator[str]]", *, assumed: bool
) -> Iterator[str]:
    """The plan of a route in words. assumed: nobody said the share of the large model."""
    small = found.small
    large = found.large
    alone = found.large_alone
    guess = " (assumed: --large-share, which --stats of the route shows)" if assumed else ""
    yield f"{found.route}: the large model gives {found.large_share:.0%} of the answers{guess}."
    if found.waits:
        yield "The small model answers everything first; what it doubts, the large one answers again."
    for name, part in (("Small", small), ("Large", large)):
        yield ""
        yield f"{name}: {next(lines := plan_lines(part))}"
        yield from lines
    yield ""
    yield (
        f"The route takes {small.copies:,} + {large.copies:,} copies, the large model alone "
        f"{alone.copies:,}."
    )
    if (cost := _thousand(found)) is not None and (whole := _money(alone)):
        yield f"A thousand answers cost {cost:,.2f}, of the large model alone {whole:,.2f}."


def _thousand(found: RoutePlan) -> float | None:
    """Money for a thousand answers of the route; None where prices are missing."""
    small = _money(found.small)
    large = _money(found.large)
    if small is None or large is None:
        return None
    return small * (1.0 if found.waits else 1 - found.large_share) + large * found.large_share


def _money(part: "ServicePlan") -> float | None:
    known = [
        value for value in (part.price.energy_money, part.price.machine_money) if value is not None
    ]
    return sum(known) if known else None
