"""quality: what it prints, keeps and refuses. Its figures: tests/measure."""

import json
import os
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.cli_program import SCENARIOS
from tests.support.terminal_screen import Call, Outcome

Quality = Callable[..., Outcome]
SCRIPTED = "tests.support.scripted_backend:ScriptedBackend"
SHORT = ("--only", "questions", "--backend", SCRIPTED)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A model of the scripted backend."""
    path = tmp_path / "tiny.script"
    path.write_text(json.dumps({"reply": "localchat pull"}))
    return path


@pytest.fixture
def quality(call: Call) -> Quality:
    """`localchat quality`, in this process."""
    return lambda *args: call(SCENARIOS["hello"], "quality", *args, named=False)


def test_settings_are_compared(quality: Quality, script: Path, tmp_path: Path) -> None:
    questions, chart = tmp_path / "set.jsonl", tmp_path / "chart.svg"
    questions.write_text(
        '{"question": "How do I pull a model?", "answer": "hello", "match": "contains"}\n'
    )
    outcome = quality(
        script, *SHORT, "--vary", "kv-type=f16,q8_0", "--set", questions, "--svg", chart
    )
    assert outcome.code == 0, outcome.err
    assert "RIGHT" in outcome.out
    rows = [line.split() for line in outcome.out.splitlines() if line.startswith("kv-type=")]
    assert rows[0][-1] == rows[1][-1] == "1/1"
    assert "kv-type=q8_0: questions 1 of 1" in outcome.out
    ElementTree.fromstring(chart.read_text())


def test_without_a_model_the_last_one_is_named_and_not_measured(
    quality: Quality, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("localchat.cli.measure.quality.default_model", lambda ctx: str(script))
    outcome = quality(*SHORT)
    assert (outcome.code, outcome.out) == (2, "")
    assert f"localchat quality {script}" in outcome.err
    assert quality(*SHORT, "--vary", "kv-type=f16,q8_0", "--only", "json").code == 0


def test_a_result_that_cannot_be_drawn_is_shown_all_the_same(
    quality: Quality, script: Path, tmp_path: Path
) -> None:
    questions = tmp_path / "set.jsonl"
    questions.write_text('{"question": "How?", "answer": "hello", "match": "contains"}\n')
    (tmp_path / "folder").mkdir()
    outcome = quality(script, *SHORT, "--set", questions, "--svg", tmp_path / "folder", "--json")
    assert outcome.code == 2
    folder = tmp_path / "closed"
    folder.mkdir(mode=0o500)
    outcome = quality(script, *SHORT, "--set", questions, "--svg", folder / "chart.svg", "--json")
    if os.access(folder, os.W_OK):
        return  # the superuser writes everywhere
    assert outcome.code == 1
    assert json.loads(outcome.out)["measured"][0]["questions"][0]["passed"]
    assert "cannot be written" in outcome.err


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("guide", "--only", "text"), "does not report log probabilities"),
        (("guide", "--only", "poems"), "poems"),
        (("guide", "--set", "nowhere.jsonl"), "nowhere.jsonl"),
        (("guide", "--text", "nowhere.txt"), "nowhere.txt"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    quality: Quality, args: tuple[str, ...], said: str
) -> None:
    outcome = quality(*args)
    assert outcome.code != 0
    assert outcome.out == ""
    assert said in outcome.err


def test_a_model_that_is_missing_is_told_before_another_is_measured(
    quality: Quality, script: Path, tmp_path: Path
) -> None:
    questions = tmp_path / "set.jsonl"
    questions.write_text('{"question": "How?", "answer": "hello"}\n')
    outcome = quality(script, "nosuch", *SHORT, "--set", questions)
    assert outcome.code != 0 and "nosuch" in outcome.err
    assert outcome.out == ""
