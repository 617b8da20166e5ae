"""The catalogue's sampling reaches an engine, under everything that was said."""

from pathlib import Path

import pytest

from tests.support.catalog_samples import SEVEN_B
from tests.support.cli_program import SCENARIOS, ScriptedApp
from tests.support.terminal_screen import Call


def test_the_advice_lies_under_everything_that_was_said(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "Qwen2.5-7B-Instruct-Q4_K_M.gguf"
    path.write_bytes(b"GGUF")
    app = ScriptedApp(SCENARIOS["hello"])
    monkeypatch.setenv("LOCALCHAT_TOP_P", "0.5")
    call(app, "run", path, "--temperature", "0.1", "hi")
    assert app.options[0].sampling == SEVEN_B
    asked = app.engines[0].requests[0].sampling
    assert (asked.temperature, asked.top_p, asked.top_k) == (0.1, 0.5, None)


def test_settings_show_the_advice_as_it_is_written(call: Call, tmp_path: Path) -> None:
    path = tmp_path / "Qwen2.5-7B-Instruct-Q4_K_M.gguf"
    path.write_bytes(b"GGUF")
    lines = call(SCENARIOS["hello"], "config", "show", "--for", path).out.splitlines()
    top_k = next(line for line in lines if line.startswith("top_k "))
    assert top_k.split() == ["top_k", "=", str(SEVEN_B["top_k"]).removesuffix(".0")]
