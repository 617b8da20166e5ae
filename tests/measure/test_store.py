"""Store: numbers, damaged files, errors, and records of earlier versions."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from localchat.errors import UsageError
from localchat.measure.store import BenchStore
from tests.support.bench_samples import point, record

STORED = Path(__file__).parent / "records"
"""Records that version 0.1 stored, with all fields."""


@pytest.fixture
def store(tmp_path: Path) -> BenchStore:
    return BenchStore(tmp_path)


def test_records_are_numbered_and_loaded_again(store: BenchStore, tmp_path: Path) -> None:
    first = store.add(record(point(10)))
    second = store.add(record(point(20)))
    assert (first.id, second.id) == (1, 2)
    assert store.find("1") == first
    assert store.find("last") == second
    assert list(store) == [first, second]
    file = tmp_path / "copy.json"
    file.write_bytes(msgspec.json.encode(second))
    assert store.find(str(file)) == second


def test_a_damaged_record_is_named_and_hides_no_other(store: BenchStore, tmp_path: Path) -> None:
    store.add(record(point(10)))
    (tmp_path / "benchmarks" / "0002.json").write_text("{")
    assert [entry.id for entry in store] == [1]
    with pytest.raises(UsageError, match="is not a benchmark"):
        store.find("2")


@pytest.mark.parametrize(
    ("count", "hint"),
    [
        (0, "none is stored yet, localchat bench MODEL makes one"),
        (2, "choose one of 1 to 2"),
    ],
)
def test_an_unknown_number_is_refused_with_the_stored_ones(
    store: BenchStore, count: int, hint: str
) -> None:
    for _ in range(count):
        store.add(record(point(10)))
    with pytest.raises(UsageError, match="no benchmark '7'") as caught:
        store.find("7")
    assert hint in caught.value.hint


REMOVED = {
    "context_tokens",
    "contexts",
    "energy",
    "greedy",
    "joules",
    "preemptions",
    "roof",
    "roof_share",
    "step_ms",
}
"""Fields that are no longer measured."""


def contains(record: Any, earlier: Any) -> bool:
    """Return whether a record has all values of an earlier version. Later versions add fields."""
    if isinstance(earlier, dict):
        names = earlier.keys() - REMOVED
        return all(name in record and contains(record[name], earlier[name]) for name in names)
    if isinstance(earlier, list):
        return len(record) == len(earlier) and all(map(contains, record, earlier))
    return bool(record == earlier)


def test_records_of_earlier_versions_load_and_keep_their_values(tmp_path: Path) -> None:
    path = STORED / "benchmark.json"
    stored = BenchStore(tmp_path).find(str(path))
    assert contains(json.loads(msgspec.json.encode(stored)), json.loads(path.read_text()))
