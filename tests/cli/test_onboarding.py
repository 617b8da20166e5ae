"""The first run on a terminal, and what `show` adds about this machine."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.cli_program import SCENARIOS
from tests.support.cuda_configs import QWEN25
from tests.support.gguf_files import write_model
from tests.support.shards import SHARDS
from tests.support.terminal_screen import Call, Screen


@pytest.fixture
def nobody(screen: Callable[..., Screen], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Screen]:
    """A terminal of somebody who has no model."""
    monkeypatch.delenv("LOCALCHAT_MODEL")
    return screen


def test_who_has_no_model_sees_what_would_run_here(nobody: Callable[..., Screen]) -> None:
    shown = nobody("hello", "-i")
    assert "localchat run lists models" in shown.wait_for("/help lists the commands")
    shown.wait_for("> ")
    shown.press("\x04")
    assert shown.finish()[0] == 0


def test_who_names_a_model_or_wants_quiet_sees_none_of_it(
    nobody: Callable[..., Screen], model: Path
) -> None:
    for args in (("-i", "-m", str(model)), ("-i", "-q")):
        shown = nobody("hello", *args)
        before = shown.wait_for("> ")
        shown.press("\x04")
        assert shown.finish()[0] == 0
        assert "localchat run lists" not in before


def test_a_pipe_is_told_nothing(call: Call) -> None:
    code, out, err = call(SCENARIOS["hello"], "hi", named=False)
    assert (code, out) == (0, "Hello.\n")
    assert "localchat run" not in err


def test_show_says_what_would_run_it_and_how_it_is_sampled(call: Call, tmp_path: Path) -> None:
    path = write_model(tmp_path / "Qwen2.5-7B-Instruct-Q4_K_M.gguf")
    code, out, _ = call(SCENARIOS["hello"], "show", path, named=False)
    assert code == 0
    assert "A GGUF file runs on llama.cpp, on the CPU." in out
    assert "temperature 0.7, top_k 20, top_p 0.8" in out and "qwen2.5:7b in models.toml" in out
    told = json.loads(call(SCENARIOS["hello"], "show", path, "--json", named=False).out)
    assert told["why"] == "A GGUF file runs on llama.cpp, on the CPU."
    assert told["sampling"]["top_k"] == 20


def test_show_of_a_checkpoint_that_nothing_here_runs(call: Call, tmp_path: Path) -> None:
    for name, body in {"config.json": json.dumps(QWEN25).encode(), **SHARDS}.items():
        (tmp_path / name).write_bytes(body)
    code, out, _ = call(SCENARIOS["hello"], "show", tmp_path, "--json", named=False)
    assert code == 0
    assert json.loads(out)["why"] is None
