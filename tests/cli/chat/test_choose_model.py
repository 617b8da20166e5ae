"""The list from which `localchat run` without a model lets the user pick."""

import os
import shutil

import pytest

from localchat.cli.chat import choose_model
from localchat.config.paths import find_paths
from localchat.models.recommended_models import recommended_models
from localchat.models.resolve import GUIDE, locate
from tests.support.cli_program import SCENARIOS
from tests.support.ram_bandwidth import put_bandwidth
from tests.support.terminal_screen import Call


def test_run_without_a_terminal_and_a_model_names_both_lists(call: Call) -> None:
    outcome = call(SCENARIOS["hello"], "run")
    assert outcome.code == 2
    assert "localchat list shows your models" in outcome.err
    assert "on a terminal, localchat run recommends others" in outcome.err


@pytest.mark.parametrize("has_model", [False, True])
def test_recommendations_are_listed_below_the_own_models(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], has_model: bool
) -> None:
    put_bandwidth(monkeypatch, 20e9)
    paths = find_paths(os.environ)
    first = recommended_models(paths)[0]
    own = [GUIDE]
    if has_model:
        paths.models_dir.mkdir(parents=True, exist_ok=True)
        guide = locate(GUIDE, paths, "").path
        shutil.copyfile(guide, paths.models_dir / "mine.gguf")
        own.append("mine")
    names = choose_model._print_choices(paths, os.environ)
    assert set(own) <= set(names[: len(names) - 1])
    assert names.index(first.name) > max(names.index(name) for name in own)
    lines = capfd.readouterr().err.splitlines()
    assert any(first.name in line and first.summary in line for line in lines)


def test_a_recommended_model_that_is_here_is_listed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    put_bandwidth(monkeypatch, 20e9)
    paths = find_paths(os.environ)
    first = recommended_models(paths)[0]
    paths.models_dir.mkdir(parents=True, exist_ok=True)
    guide = locate(GUIDE, paths, "").path
    shutil.copyfile(guide, paths.models_dir / f"{first.name}-q4_k_m.gguf")
    names = choose_model._print_choices(paths, os.environ)
    assert first.name not in names and f"{first.name}-q4_k_m" in names
