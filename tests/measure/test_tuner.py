"""Tuning: what is taken, what is left, and that it can be taken back."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from localchat.config.settings import Settings
from localchat.config.settings_file import read_settings
from localchat.errors import DoesNotFit
from localchat.fit.hardware import Gpu, Machine
from localchat.measure.endpoint import BenchEndpoint
from localchat.measure.memory_roof import MemoryRoof
from localchat.measure.sweep import Point, PointKey, Sweep, SweepEvent
from localchat.measure.tuner import Knob, TunedSettings, Tuner, knobs
from localchat.measure.variants import BenchVariant
from tests.support.bench_samples import point
from tests.support.memory_plans import GB, PLAN

Speed = Callable[[Mapping[str, str], int], float]
"""Tokens a second under these settings in this round."""
THREADS, KV = Knob("threads", ("1", "4")), Knob("kv_cache_type", ("q8_0",))


@pytest.fixture
def tune(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Tuner]:
    """A tuner on a machine of our choice: no server is started."""

    def made(speed: Speed, *given: Knob) -> Tuner:
        @contextmanager
        def open_server(
            variant: BenchVariant,
        ) -> "Iterator[tuple[BenchEndpoint, MemoryRoof | None]]":
            if variant.settings.get("threads") == "broken":
                raise DoesNotFit("too many threads")
            yield BenchEndpoint("http://127.0.0.1:9"), None

        @contextmanager
        def watch(what: str) -> "Iterator[Callable[[SweepEvent], None]]":
            yield lambda event: None

        def measured(self: Sweep, variant: BenchVariant, *rest: object) -> None:
            number = rest[-1]
            assert isinstance(number, int)
            rate = speed(variant.settings, number)
            for shape in self.spec.shapes:
                key = PointKey(variant.name, shape.name, 0, 1)
                self.points.append(Point(key, number, point(rate).figures))

        monkeypatch.setattr(Sweep, "_run_variant", measured)
        monkeypatch.setattr("localchat.measure.sweep.prepared", lambda endpoint, *rest: endpoint)
        return Tuner("m", given, {"threads": "2"}, open_server, watch)

    return made


def steady(values: Mapping[str, float]) -> Speed:
    """100 tokens a second, times a factor for each setting; all rounds alike but for a hundredth."""

    def speed(settings: Mapping[str, str], number: int) -> float:
        factor = 1.0
        for key, value in settings.items():
            factor *= values.get(f"{key}={value}", 1.0)
        wobble = 1 + 0.002 * ((len(settings) + number) % 2)
        return 100 * factor * wobble * (1 + number / 10)

    return speed


def test_the_fastest_value_of_each_setting_is_taken(tune: Callable[..., Tuner]) -> None:
    speed = steady({"threads=1": 0.7, "threads=4": 1.5, "kv_cache_type=q8_0": 1.1})
    found = tune(speed, THREADS, KV).run()
    assert found.settings == {"threads": "4", "kv_cache_type": "q8_0"}
    assert found.gain is not None and found.gain.share == pytest.approx(0.65, abs=0.01)
    taken = {(one.key, one.value): one.taken for one in found.trials}
    assert taken == {
        ("threads", "1"): False,
        ("threads", "4"): True,
        ("kv_cache_type", "q8_0"): True,
    }
    assert found.trials[0].gain is not None and found.trials[0].gain.share < -0.25
    assert found.trials[0].against == "2"


def test_what_is_slower_or_within_noise_is_left(tune: Callable[..., Tuner]) -> None:
    def noisy(settings: Mapping[str, str], number: int) -> float:
        return 100 * (1.1 if settings and number == 0 else 1.0)

    assert tune(noisy, KV).run().settings == {}
    assert tune(steady({"kv_cache_type=q8_0": 0.9}), KV).run().settings == {}
    assert tune(steady({"kv_cache_type=q8_0": 1.01}), KV).run().settings == {}


def test_settings_that_are_slower_together_are_not_kept(tune: Callable[..., Tuner]) -> None:
    calls: list[Mapping[str, str]] = []

    def speed(settings: Mapping[str, str], number: int) -> float:
        calls.append(settings)
        at_the_end = [one for one in calls if one == {"kv_cache_type": "q8_0"}]
        faster = 1.5 if len(at_the_end) <= 3 else 0.8
        return (100 + number / 10) * (faster if settings else 1.0)

    found = tune(speed, KV).run()
    assert found.trials[0].taken
    assert (found.settings, found.gain) == ({}, None)


def test_a_value_that_cannot_be_loaded_hides_no_other(tune: Callable[..., Tuner]) -> None:
    found = tune(steady({"threads=4": 1.5}), Knob("threads", ("broken", "4"))).run()
    assert found.settings == {"threads": "4"}
    assert [one.problem for one in found.trials] == ["too many threads", ""]


MACHINE = Machine("small", frozenset(), 4, 8 * GB, 6 * GB)


def values(given: list[Knob]) -> dict[str, tuple[str, ...]]:
    return {knob.key: knob.values for knob in given}


def test_on_a_cpu_threads_kv_and_drafts_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    plan = replace(PLAN, gpu_layers=0, layers=20, kv_type="f16", kv_types=("f16", "q8_0", "q4_0"))
    found = values(knobs(Settings(), {}, plan, MACHINE))
    assert found == {
        "threads": ("1", "2", "3", "8"),
        "kv_cache_type": ("q8_0",),
        "speculation": ("false",),
    }
    assert "threads" not in values(knobs(Settings(), {"threads": 4}, plan, MACHINE))
    other = values(knobs(Settings(threads=8, speculation=False), {}, plan, MACHINE))
    assert (other["threads"], other["speculation"]) == (("1", "2", "3", "4"), ("true",))


def test_layers_are_tried_where_some_are_on_a_gpu() -> None:
    with_gpu = replace(MACHINE, gpus=(Gpu(0, "G", GB, GB),))
    some = replace(PLAN, gpu_layers=10, layers=20)
    assert values(knobs(Settings(), {}, some, with_gpu))["gpu_layers"] == ("5", "0")
    whole = values(knobs(Settings(), {}, replace(PLAN, gpu_layers=20, layers=20), with_gpu))
    assert not whole.keys() & {"gpu_layers", "threads"}


@pytest.fixture
def kept(tmp_path: Path) -> TunedSettings:
    return TunedSettings(tmp_path / "settings.toml", tmp_path / "state")


def section(tmp_path: Path) -> Mapping[str, object]:
    return read_settings(tmp_path / "settings.toml").models.get("m", {})


def test_a_tuning_is_written_and_taken_back(kept: TunedSettings, tmp_path: Path) -> None:
    (tmp_path / "settings.toml").write_text("[models.m]\nthreads = 2  # mine\ntemperature = 0.2\n")
    kept.write("m", {"threads": "4", "speculation": "false"})
    assert section(tmp_path) == {"threads": 4, "temperature": 0.2, "speculation": False}
    back, left = kept.undo("m")
    assert [one.key for one in back] == ["threads", "speculation"] and left == []
    assert section(tmp_path) == {"threads": 2, "temperature": 0.2}
    assert kept.undo("m") == ([], [])


def test_two_tunings_are_taken_back_to_before_the_first(
    kept: TunedSettings, tmp_path: Path
) -> None:
    kept.write("m", {"threads": "4"})
    kept.write("m", {"threads": "8"})
    kept.undo("m")
    assert section(tmp_path) == {}


def test_what_the_user_has_changed_since_stays(kept: TunedSettings, tmp_path: Path) -> None:
    kept.write("m", {"threads": "4", "kv_cache_type": "q8_0"})
    file = tmp_path / "settings.toml"
    file.write_text(file.read_text().replace("threads = 4", "threads = 6"))
    back, left = kept.undo("m")
    assert ([one.key for one in back], [one.key for one in left]) == (
        ["kv_cache_type"],
        ["threads"],
    )
    assert section(tmp_path) == {"threads": 6}
