"""A probe of llama.cpp that answers at once."""

from collections.abc import Callable, Iterable, Mapping

import pytest

from localchat.fit.speed_history import MeasurementCache
from localchat_llamacpp.speed import estimate
from localchat_llamacpp.speed.benchmark import Costs, Layer


def put_probe(
    patch: pytest.MonkeyPatch,
    rate_of: Callable[[int], float | None],
    layer_s: float = 0.0,
    *,
    quiet: bool = True,
) -> None:
    """Make the probe find these bytes a second by format (None: it fails), and layers that take so long.

    `quiet`: whether nothing else runs."""

    def costs(
        threads: int, codes: Iterable[int], layers: Iterable[Layer], measures: MeasurementCache
    ) -> Costs:
        found = {code: rate for code in codes if (rate := rate_of(code)) is not None}
        return Costs(found, dict.fromkeys(layers, layer_s), 0.0, quiet)

    patch.setattr(estimate, "costs", costs)


def put_rates(patch: pytest.MonkeyPatch, rates: Mapping[int, float]) -> None:
    """The same from a table, which may change later."""
    put_probe(patch, lambda code: rates.get(code))
