"""plan: from a benchmark that is kept to people, copies and money."""

import json
import os
from collections.abc import Callable

import pytest

from localchat.config.paths import find_paths
from localchat.fit.hardware import Machine
from localchat.measure.store import BenchStore
from tests.support.bench_samples import point, record
from tests.support.cli_program import SCENARIOS
from tests.support.memory_plans import GB
from tests.support.terminal_screen import Call, Outcome

Plan = Callable[..., Outcome]


@pytest.fixture
def plan(call: Call) -> Plan:
    return lambda *args: call(SCENARIOS["hello"], "plan", *args, named=False)


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with much memory, so that estimates do not depend on this one."""
    roomy = Machine("roomy", frozenset({"avx2"}), 4, 32 * GB, 28 * GB)
    monkeypatch.setattr("localchat.fit.hardware.read_machine", lambda: roomy)


@pytest.fixture
def kept() -> None:
    """A benchmark of the model m."""
    store = BenchStore(find_paths(os.environ).data_dir)
    store.add(record(point(80, 1), point(150, 2), point(160, 4)))


@pytest.mark.usefixtures("kept")
def test_people_need_copies(plan: Plan) -> None:
    outcome = plan("m", "--users", "100", "--every", "1min", "--ttft", "2s")
    assert outcome.code == 0, outcome.err
    assert "measured: benchmark 1" in outcome.out
    assert "100 people who ask every 60 s (1.67 requests a second) need" in outcome.out
    assert "P95" in outcome.out
    found = json.loads(plan("m", "--users", "100", "--json").out)
    assert found["copies"] == 3
    assert found["share"] <= 0.8


@pytest.mark.usefixtures("kept")
def test_rates_have_a_unit_of_time_that_one_can_read(plan: Plan) -> None:
    outcome = plan("m", "--users", "100", "--every", "1h")
    assert "(1.67 requests a minute)" in outcome.out


@pytest.mark.usefixtures("kept")
def test_one_copy_serves_so_many(plan: Plan) -> None:
    assert "are served by 1 copy" in plan("m").out
    priced = plan(
        "--from",
        "1",
        "--price",
        "machine_hour=2",
        "--price",
        "hosted_in=1",
        "--price",
        "hosted_out=2",
    )
    assert "machines " in priced.out and "the hosted API instead 0.60" in priced.out


@pytest.mark.usefixtures("kept")
def test_a_target_that_nothing_meets_is_said(plan: Plan) -> None:
    outcome = plan("m", "--ttft", "1ms")
    assert outcome.code == 1
    assert "No number of copies meets the target" in outcome.out


def test_without_a_benchmark_the_error_names_the_command_that_makes_one(plan: Plan) -> None:
    outcome = plan("m", "--users", "5")
    assert outcome.code == 2
    assert "no benchmark of m" in outcome.err and "localchat bench m" in outcome.err


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("m", "--users", "1", "--rate", "1"), "give one of them"),
        (("m", "--every", "often"), "which is not a time"),
        (("m", "--users", "nan"), "'--users': 'nan' is not a valid number"),
        (("m", "--rate", "inf"), "'--rate': 'inf' is not a valid number"),
        (("m", "--price", "gold=1"), "machine_hour, hosted_in"),
        (("m", "--from", "9"), "no benchmark '9'"),
        (("other", "--from", "1"), "no series of other"),
        (("http://127.0.0.1:1",), "localchat bench"),
    ],
)
def test_wrong_input_is_refused_with_what_to_do(
    plan: Plan, args: tuple[str, ...], words: str
) -> None:
    outcome = plan(*args)
    assert outcome.code in (2, 3)
    assert words in outcome.err
