"""The command line with a real model: one answer, pipes, files, conversations, JSON and line mode."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.support.terminal_screen import Screen

Run = Callable[..., "subprocess.CompletedProcess[str]"]

_PATIENCE_S = 120
_ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def environment(smollm2: Path, tmp_path: Path) -> dict[str, str]:
    """Environment of a program in an empty home: SmolLM2, 12 tokens at most, temperature 0."""
    variables = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("XDG_", "LOCALCHAT_"))
    }
    variables |= {"HOME": str(tmp_path), "LOCALCHAT_MODEL": str(smollm2)}
    variables |= {"LOCALCHAT_TEMPERATURE": "0", "LOCALCHAT_MAX_TOKENS": "12"}
    variables |= {"LOCALCHAT_CONTEXT_LENGTH": "1024", "LOCALCHAT_ATTACH": "false"}
    variables["LOCALCHAT_THREADS"] = "1"
    paths = (_ROOT, _ROOT / "backends", os.environ.get("PYTHONPATH", ""))
    variables["PYTHONPATH"] = os.pathsep.join(str(path) for path in paths if str(path))
    return variables


@pytest.fixture
def run(environment: dict[str, str], tmp_path: Path) -> Run:
    """Run the program with these arguments."""

    def run(
        *args: str, stdin: str = "", variables: Mapping[str, str] | None = None
    ) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-m", "localchat", *args],
            input=stdin,
            capture_output=True,
            text=True,
            env={**environment, **(variables or {})},
            timeout=_PATIENCE_S,
            cwd=tmp_path,
        )

    return run


def test_an_answer_ends_with_one_newline_and_no_escape_codes(run: Run) -> None:
    answer = run("What is the capital of France?")
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.strip()
    assert answer.stdout.endswith("\n") and not answer.stdout.endswith("\n\n")
    assert "\x1b" not in answer.stdout + answer.stderr
    assert "Traceback" not in answer.stderr


def test_piped_text_and_files_come_before_the_prompt(run: Run, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("The secret word is heron.")
    prompt = ("-f", "~/notes.txt", "--json", "What is the secret word?")
    answer = json.loads(run(*prompt, stdin="A second text.").stdout)
    alone = json.loads(run("--json", "What is the secret word?").stdout)
    assert answer["usage"]["prompt_tokens"] >= alone["usage"]["prompt_tokens"] + 10
    assert answer["text"].strip()


def test_continue_sends_what_was_said_before(run: Run) -> None:
    run("My name is Ada. Answer with one word: hello.")
    answer = run("-c", "--json", "What is my name?")
    assert answer.returncode == 0, answer.stderr
    assert json.loads(answer.stdout)["usage"]["prompt_tokens"] > 50
    listed = json.loads(run("history", "list", "--json").stdout)
    assert [conversation["messages"] for conversation in listed] == [4]


def test_a_schema_gives_valid_json(run: Run) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}, "big": {"type": "boolean"}},
        "required": ["city", "big"],
        "additionalProperties": False,
    }
    answer = run("--schema", json.dumps(schema), "--max-tokens", "40", "Name a big city as JSON.")
    assert answer.returncode == 0, answer.stderr
    city = json.loads(answer.stdout)
    assert city["city"] in ("Paris", "Rome")
    assert isinstance(city["big"], bool)


def test_a_pattern_in_another_locale_is_kept(run: Run) -> None:
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    answer = run("--regex", "é🦄 ok", "Write.", variables={**locale, "PYTHONIOENCODING": "utf-8"})
    assert (answer.returncode, answer.stdout) == (0, "é🦄 ok\n"), answer.stderr


def test_line_mode_keeps_the_conversation(
    run: Run, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("XDG_")]:
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    screen = Screen(("-m", "localchat", "-i", "Say hi."), term="dumb")
    try:
        screen.wait_for("> ")
        screen.press("And again.\n")
        screen.wait_for("> ")
        screen.press("\x04")
        assert screen.finish()[0] == 0
    finally:
        screen.close()
    listed = json.loads(run("history", "list", "--json").stdout)
    assert [conversation["messages"] for conversation in listed] == [4]


def test_a_refused_prompt_leaves_a_small_history(run: Run, tmp_path: Path) -> None:
    refused = run("sum up", stdin="a long text " * 500_000)
    assert refused.returncode == 6
    assert "no help" not in refused.stderr
    sizes = [path.stat().st_size for path in tmp_path.rglob("history.sqlite3*")]
    assert sum(sizes) < 1_000_000


def test_a_pipe_is_told_what_a_coarse_kv_type_costs(run: Run) -> None:
    done = run("--kv-type", "q4_0", "--max-tokens", "2", "Hi.")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("lost one of three facts") == 1
