"""tune: from a model to settings that are faster, on servers of its own."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from localchat.measure.statistics import Difference
from localchat.measure.tuner import Trial, Tuner, Tuning
from tests.support.cli_program import SCENARIOS
from tests.support.gguf_files import Q4_0, Size, llama
from tests.support.terminal_screen import Call, Outcome

Tune = Callable[..., Outcome]
GAIN = Difference(0.25, 0.02)
FOUND = Tuning(
    model="tiny",
    trials=(
        Trial("threads", "4", "2", GAIN, taken=True),
        Trial("kv_cache_type", "q8_0", "f16", None, taken=False, problem="it does not fit"),
    ),
    settings={"threads": "4"},
    gain=GAIN,
)


@pytest.fixture
def tune(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tune:
    """`localchat tune` of a small model whose trials are made up, with a settings file of its own."""
    model = llama(Size(2, 64, 2, 2, 32, 128, 256, 512, Q4_0)).sparse(tmp_path / "tiny.gguf")
    monkeypatch.setenv("LOCALCHAT_CONFIG", str(tmp_path / "settings.toml"))
    monkeypatch.setattr(Tuner, "run", lambda self: FOUND)
    return lambda *args: call(SCENARIOS["hello"], "tune", model, *args, named=False)


def test_settings_are_written_and_taken_back(tune: Tune, tmp_path: Path) -> None:
    outcome = tune("--yes")
    assert outcome.code == 0, outcome.err
    assert "Faster by 25.0% ±2.0%: threads 4." in outcome.out
    assert "it does not fit" in outcome.out
    assert "--undo takes it back" in outcome.err
    assert "threads = 4" in (tmp_path / "settings.toml").read_text()
    assert "threads is unset again" in tune("--undo").err
    assert "threads" not in (tmp_path / "settings.toml").read_text()
    assert "no tuning of tiny is stored" in tune("--undo").err


def test_without_a_terminal_nothing_is_written_unasked(tune: Tune, tmp_path: Path) -> None:
    outcome = tune()
    assert outcome.code == 0
    assert "localchat config set threads 4 --for tiny" in outcome.err
    assert not (tmp_path / "settings.toml").exists()
    assert json.loads(tune("--json").out)["settings"] == {"threads": "4"}


def test_an_interruption_changes_no_setting_and_says_so(
    tune: Tune, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: Tuner) -> Tuning:
        raise KeyboardInterrupt

    monkeypatch.setattr(Tuner, "run", interrupted)
    outcome = tune("--yes")
    assert outcome.code == 130 and outcome.out == ""
    assert "no setting was changed" in outcome.err
    assert not (tmp_path / "settings.toml").exists()


def test_a_remote_cannot_be_tuned(call: Call) -> None:
    outcome = call(SCENARIOS["hello"], "tune", "http://127.0.0.1:1", named=False)
    assert outcome.code == 2
    assert "tune the model on that machine" in outcome.err
