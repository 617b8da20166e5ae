"""Engine counters by model, which never go back."""

from localchat.engine.events import EngineStats, MetricsSnapshot
from localchat.server.engine_totals import EngineTotals, failures

NOW = MetricsSnapshot("decode")


def stats(**counts: object) -> EngineStats:
    return EngineStats(NOW, **counts)  # type: ignore[arg-type]


def test_counts_stay_after_an_unload_and_go_on_with_the_next_engine() -> None:
    totals = EngineTotals()
    first, second = object(), object()
    totals.observe("m", first, stats(drafted=5))
    totals.end("m", first, stats(drafted=7, failed={"usage": 2}))
    assert totals.totals()["m"]["drafted", ""] == 7
    totals.observe("m", second, stats(drafted=1, failed={"usage": 1, "busy": 1}))
    assert totals.totals()["m"]["drafted", ""] == 8
    assert dict(failures(totals.totals()["m"])) == {"usage": 3, "busy": 1}


def test_engine_that_restarts_by_itself_does_not_set_counts_back() -> None:
    totals = EngineTotals()
    engine = object()
    totals.observe("m", engine, stats(steps=90, drafted=5))
    totals.observe("m", engine, stats(steps=3, drafted=2))
    assert totals.totals()["m"]["drafted", ""] == 7


def test_last_statistics_count_if_an_ended_engine_cannot_report() -> None:
    totals = EngineTotals()
    engine = object()
    totals.observe("m", engine, stats(accepted=4))
    totals.end("m", engine, None)
    totals.end("m", engine, None)
    assert totals.totals()["m"]["accepted", ""] == 4


def test_engines_of_one_name_are_added() -> None:
    totals = EngineTotals()
    first, second = object(), object()
    for drafted in (5, 6):
        totals.observe("m", first, stats(drafted=drafted))
        totals.observe("m", second, stats(drafted=1))
    assert totals.totals()["m"]["drafted", ""] == 7
