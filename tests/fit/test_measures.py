"""Results of hardware probes are kept for a limited time."""

from pathlib import Path

from localchat.fit.speed_history import MEASURES_FILE, NO_MEASUREMENTS, MeasurementCache


def test_numbers_are_kept_by_name_and_replaced(tmp_path: Path) -> None:
    MeasurementCache(tmp_path / "state").keep({"a": 1.5, "b": 2.0})
    MeasurementCache(tmp_path / "state").keep({"b": 3.0})
    assert MeasurementCache(tmp_path / "state").known() == {"a": 1.5, "b": 3.0}


def test_a_day_later_nothing_is_known(tmp_path: Path) -> None:
    measures = MeasurementCache(tmp_path)
    measures.keep({"a": 1.0})
    at_s = (tmp_path / MEASURES_FILE).stat().st_mtime
    assert measures.known(at_s + 23 * 3600) == {"a": 1.0}
    assert measures.known(at_s + 25 * 3600) == {}
    assert measures.known(at_s - 3600) == {}  # the clock was put back since


def test_a_spoilt_file_is_as_none(tmp_path: Path) -> None:
    for text in ("", "[]", '{"version":2}', '{"version":1,"measures":{"a":{"value":-1,"at_s":0}}}'):
        (tmp_path / MEASURES_FILE).write_text(text)
        assert MeasurementCache(tmp_path).known() == {}
    MeasurementCache(tmp_path).keep({"a": 1.0})
    assert MeasurementCache(tmp_path).known() == {"a": 1.0}


def test_a_folder_that_cannot_be_written_forgets(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    measures = MeasurementCache(tmp_path / "file")
    measures.keep({"a": 1.0})
    assert measures.known() == {}
    NO_MEASUREMENTS.keep({"a": 1.0})
    assert NO_MEASUREMENTS.known() == {}
