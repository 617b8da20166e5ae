"""Costs of a parameter's values; a backend's own KV types are offered."""

from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from localchat.engine.options import EngineOptions
from localchat.errors import UsageError
from localchat.fit.load_options import LoadOptions
from localchat.fit.memory_plan import MemoryPlan
from localchat.session.context import ModelSetup, SessionContext
from localchat.tui.parameter_costs import parameter_costs

PLAN = MemoryPlan(
    "cuda", 5 << 30, 2 << 30, 0, 0, 9 << 30, True, 4096, 8192, "bf16", True, 29, 0, 2048
)


class _Workplace:
    def __init__(self, kv_types: tuple[str, ...]) -> None:
        self.kv_types = kv_types

    def plan(self, setup: object, requested: LoadOptions) -> MemoryPlan:
        if (
            requested.kv_type is not None
            and self.kv_types
            and requested.kv_type not in self.kv_types
        ):
            raise UsageError(f"cannot be {requested.kv_type}")
        found = replace(PLAN, kv_types=self.kv_types)
        return replace(found, kv_type=requested.kv_type or "bf16", kv_bytes=1 << 30)


class _Settled:
    options = EngineOptions(Path("m"))


@pytest.mark.parametrize(
    ("kv_types", "offered"),
    [
        (("bf16", "fp8"), ["bf16", "fp8"]),
        (("f32", "f16", "bf16", "q8_0", "q5_1", "q4_0"), ["f16", "q8_0", "q4_0"]),
        ((), ["f16", "q8_0", "q4_0"]),
    ],
)
def test_the_usual_kv_types_of_a_backend_are_offered(
    kv_types: tuple[str, ...], offered: list[str]
) -> None:
    place, setup = cast("SessionContext", _Workplace(kv_types)), cast("ModelSetup", _Settled())
    costs = parameter_costs("kv_cache_type", place, setup)
    assert [cost.value for cost in costs] == offered
    assert all(cost.fits for cost in costs)


def test_what_a_choice_costs_is_counted_within_the_users_limits() -> None:
    asked: list[LoadOptions] = []

    class Limited(_Settled):
        options = EngineOptions(
            Path("m"), load=LoadOptions(gpu_limit_bytes=3, kv_limit_bytes=2, dummy_weights=True)
        )

    class Watched(_Workplace):
        def plan(self, setup: object, requested: LoadOptions) -> MemoryPlan:
            asked.append(requested)
            return super().plan(setup, requested)

    place, setup = cast("SessionContext", Watched(("bf16", "fp8"))), cast("ModelSetup", Limited())
    for key in ("context_length", "kv_cache_type", "gpu_layers"):
        assert parameter_costs(key, place, setup)
    assert {(one.gpu_limit_bytes, one.kv_limit_bytes, one.dummy_weights) for one in asked} == {
        (3, 2, True)
    }
