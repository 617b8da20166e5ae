"""batch: every line is answered once, over kills, interrupts, errors and servers."""

import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from localchat.models.resolve import GUIDE
from localchat.pool.entry import ModelStatus
from tests.support.cli_program import SCENARIOS
from tests.support.http_server import NAME, Stage, serving
from tests.support.scripted_engine import ScriptedAnswer
from tests.support.terminal_screen import Call, Outcome, Screen

SCRIPTED = "tests.support.scripted_backend:ScriptedBackend"
Batch = Callable[..., Outcome]
_PATIENCE_S = 90.0


@pytest.fixture
def batch(call: Call, tmp_path: Path) -> Batch:
    """`localchat batch` of in.jsonl, in this process."""
    target = tmp_path / "out.jsonl"
    return lambda *args: call(
        SCENARIOS["hello"], "batch", tmp_path / "in.jsonl", "-o", target, *args, named=False
    )


@pytest.fixture
def source(tmp_path: Path) -> Callable[..., list[str]]:
    """Write in.jsonl."""

    def write(*lines: object) -> list[str]:
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        (tmp_path / "in.jsonl").write_text("".join(f"{text}\n" for text in texts))
        return texts

    return write


def answers(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]


def said(answer: dict[str, Any]) -> str:
    body = answer["response"]["body"]
    if "output" in body:
        return str(body["output"][0]["content"][0]["text"])
    found = body["choices"][0]
    return str(found["message"]["content"] if "message" in found else found["text"])


def ids(tmp_path: Path) -> list[str]:
    return sorted(answer["custom_id"] for answer in answers(tmp_path))


# ---------------------------------------------------------------------------- what is answered


def test_a_model_of_this_machine_answers_every_kind_of_line(
    batch: Batch, source: Callable[..., list[str]], tmp_path: Path
) -> None:
    script = tmp_path / "tiny.script"
    script.write_text(json.dumps({"reply": "one two three"}))
    chat = {"model": "gpt-4o", "messages": [{"role": "user", "content": "hi"}]}
    source(
        "a plain prompt",
        {"prompt": "hello", "max_tokens": 3},
        {"custom_id": "mine", "method": "POST", "url": "/v1/chat/completions", "body": chat},
        {"custom_id": "old", "url": "/v1/completions", "body": {"prompt": "x", "max_tokens": 7}},
        {
            "custom_id": "new",
            "url": "/v1/responses",
            "body": {"input": "hi", "max_output_tokens": 3},
        },
    )
    outcome = batch("-m", script, "--backend", SCRIPTED, "--json")
    assert outcome.code == 0, outcome.err
    found = {answer["custom_id"]: answer for answer in answers(tmp_path)}
    assert {name: said(answer) for name, answer in found.items()} == {
        "line-1": "one two three",
        "line-2": "one",
        "mine": "one two three",
        "old": "one two",
        "new": "one",
    }
    assert all(answer["error"] is None for answer in found.values())
    assert all(answer["response"]["request_id"] for answer in found.values())
    summary = json.loads(outcome.out)
    assert (summary["lines"], summary["answered"], summary["errors"], summary["left"]) == (
        5,
        5,
        0,
        0,
    )
    assert summary["completion_tokens"] >= 3 + 7 + 3 + 2 * 13
    assert summary["cut_at_limit"] == 3


def test_a_model_without_a_chat_template_is_noticed_once(
    batch: Batch, source: Callable[..., list[str]], tmp_path: Path
) -> None:
    script = tmp_path / "base.script"
    script.write_text(json.dumps({"reply": "one", "template": None}))
    source("a question", "another question")
    outcome = batch("-m", script, "--backend", SCRIPTED)
    assert outcome.code == 0, outcome.err
    assert outcome.err.count("has no chat template") == 1


def test_a_schema_holds_for_its_line_alone(
    batch: Batch, source: Callable[..., list[str]], tmp_path: Path
) -> None:
    schema = {"type": "object", "properties": {"name": {"type": "string"}}}
    with serving() as stage:
        source({"prompt": "bound", "schema": schema}, "free")
        assert batch("-m", stage.base).code == 0
        grammars = {_last_text(request): request.grammar for request in stage.engine.requests}
    assert grammars["free"] is None
    assert grammars["bound"] is not None and json.loads(grammars["bound"].source) == schema


def test_fields_that_the_server_ignores_are_named_once(
    batch: Batch, source: Callable[..., list[str]]
) -> None:
    with serving() as stage:
        source({"prompt": "one", "max_token": 5}, {"prompt": "two", "max_token": 5})
        outcome = batch("-m", stage.base)
    assert outcome.code == 0
    assert outcome.err.count("the server ignored unknown fields: max_token") == 1


def test_errors_stand_beside_their_lines_and_are_asked_again(
    batch: Batch, source: Callable[..., list[str]], tmp_path: Path
) -> None:
    with serving() as stage:
        source("good", {"prompt": "hot", "temperature": -3}, '{"half": ')
        first = batch("-m", stage.base)
        assert first.code == 1
        assert "2 errors in 3 lines" in first.err
        found = {answer["custom_id"]: answer for answer in answers(tmp_path)}
        assert found["line-2"]["response"]["status_code"] == 400
        assert "temperature" in found["line-2"]["response"]["body"]["error"]["message"]
        assert found["line-3"]["response"] is None
        assert found["line-3"]["error"]["code"] == "invalid_line"
        asked = len(stage.engine.requests)
        again = batch("-m", stage.base)
        assert again.code == 1 and "all 3 lines" in again.err
        retried = batch("-m", stage.base, "--retry-errors", "--json")
        assert retried.code == 1
        assert json.loads(retried.out)["errors"] == 2
        assert len(stage.engine.requests) == asked
    assert ids(tmp_path) == ["line-1", "line-2", "line-3"]


def test_a_limit_takes_the_next_lines_each_time(
    batch: Batch, source: Callable[..., list[str]], tmp_path: Path
) -> None:
    source(*(f"prompt {number}" for number in range(5)))
    with serving() as stage:
        first = batch("-m", stage.base, "--limit", "2")
        assert first.code == 0
        assert "3 of 5 lines are left; resume with: " in first.err
        assert ids(tmp_path) == ["line-1", "line-2"]
        assert batch("-m", stage.base, "--limit", "2", "--json").code == 0
        assert len(answers(tmp_path)) == 4
        assert batch("-m", stage.base).code == 0
        asked = Counter(_last_text(request) for request in stage.engine.requests)
    assert asked == Counter(f"prompt {number}" for number in range(5))


def test_so_many_requests_are_in_flight_and_no_more(
    batch: Batch, source: Callable[..., list[str]]
) -> None:
    lock, now, most = threading.Lock(), [0], [0]
    full = threading.Event()

    def script(request: object) -> ScriptedAnswer:
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
            if now[0] == 3:
                full.set()
        assert full.wait(_PATIENCE_S)
        with lock:
            now[0] -= 1
        return ScriptedAnswer(("x",))

    source(*(f"prompt {number}" for number in range(9)))
    with serving() as stage:
        stage.engine.script = script
        assert batch("-m", stage.base, "--max-clients", "3").code == 0
    assert most[0] == 3


# ---------------------------------------------------------------------------- kills and interrupts


def program(stage: Stage, tmp_path: Path, *args: str) -> "subprocess.Popen[str]":
    """`localchat batch` as a process of its own."""
    command = ["batch", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl")]
    return subprocess.Popen(
        [sys.executable, "-m", "localchat", *command, "-m", stage.base, *args],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def wait_for_lines(tmp_path: Path, count: int, process: "subprocess.Popen[str]") -> None:
    target, end = tmp_path / "out.jsonl", time.monotonic() + _PATIENCE_S
    while not target.exists() or target.read_bytes().count(b"\n") < count:
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.005)


def test_a_batch_that_is_killed_five_times_answers_each_line_once(
    source: Callable[..., list[str]], tmp_path: Path
) -> None:
    chance, lines = random.Random(7), 300
    source(*(f"prompt {number}" for number in range(1, lines + 1)))
    target = tmp_path / "out.jsonl"
    with serving() as stage:
        stage.engine.script = lambda request: ScriptedAnswer(
            (_last_text(request), "."), gap_s=chance.random() / 50
        )
        done = 0
        for _ in range(5):
            process = program(stage, tmp_path, "--max-clients", "7")
            wait_for_lines(tmp_path, done + chance.randint(5, 30), process)
            process.kill()
            process.communicate()
            done = target.read_bytes().count(b"\n")
            assert done < lines
            with target.open("ab") as file:  # as a kill within a write leaves it
                file.write(b'{"id":"batch_req_3_'[: chance.randint(0, 19)])
        process = program(stage, tmp_path, "--json")
        out, err = process.communicate(timeout=_PATIENCE_S)
        assert process.returncode == 0, err
        summary = json.loads(out)
        assert (summary["answered_before"], summary["answered"]) == (done, lines - done)
        asked = Counter(_last_text(request) for request in stage.engine.requests)
    found = {answer["custom_id"]: said(answer) for answer in answers(tmp_path)}
    assert len(answers(tmp_path)) == lines
    assert found == {f"line-{number}": f"prompt {number}." for number in range(1, lines + 1)}
    # Only what was in flight at a kill was computed in vain.
    assert sum(asked.values()) <= lines + 5 * 7


def test_the_first_interrupt_waits_for_the_lines_in_flight(
    source: Callable[..., list[str]], tmp_path: Path
) -> None:
    source(*(f"prompt {number}" for number in range(50)))
    hold = threading.Event()

    def script(request: Any) -> ScriptedAnswer:
        if len(stage.engine.requests) > 10:
            assert hold.wait(_PATIENCE_S)
        return ScriptedAnswer(("x",))

    with serving() as stage:
        stage.engine.script = script
        process = program(stage, tmp_path, "--max-clients", "4")
        wait_for_lines(tmp_path, 10, process)
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        assert "the model is" in process.stderr.readline()
        assert "Ctrl+C again ends at once" in process.stderr.readline()
        hold.set()
        _, err = process.communicate(timeout=_PATIENCE_S)
        asked = len(stage.engine.requests)
    assert process.returncode == 130
    assert len(answers(tmp_path)) == asked < 50
    assert f"{50 - asked} of 50 lines are left; resume with: localchat batch" in err


def test_the_second_interrupt_ends_at_once(
    source: Callable[..., list[str]], tmp_path: Path
) -> None:
    source(*(f"prompt {number}" for number in range(8)))
    with serving() as stage:
        stage.engine.script = lambda request: ScriptedAnswer(("x", "y"), gap_s=_PATIENCE_S)
        process = program(stage, tmp_path)
        end = time.monotonic() + _PATIENCE_S
        while not stage.engine.requests:
            assert time.monotonic() < end
            time.sleep(0.005)
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        assert "the model is" in process.stderr.readline()
        assert "Ctrl+C again ends at once" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=_PATIENCE_S)
    assert process.returncode == 130
    assert "8 of 8 lines are left" in err
    assert "Traceback" not in err


def test_a_server_that_goes_away_leaves_the_lines_for_later(
    batch: Batch, source: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("localchat.batch.client._FIRST_PAUSE_S", 0.001)
    source("one", "two")
    with serving() as stage:
        assert batch("-m", stage.base, "--limit", "1").code == 0
        base = stage.base
    outcome = batch("-m", base)
    assert outcome.code == 5
    assert "1 of 2 lines are left" in outcome.err
    assert ids(tmp_path) == ["line-1"]


def test_the_bar_shows_lines_and_time_left(
    source: Callable[..., list[str]],
    tmp_path: Path,
    on_terminal: Callable[..., Screen],
) -> None:
    source(*(f"prompt {number}" for number in range(12)))
    target = tmp_path / "out.jsonl"
    with serving() as stage:
        stage.engine.script = lambda request: ScriptedAnswer(("x", "y"), gap_s=0.3)
        screen = on_terminal(
            *("-m", "localchat", "batch", str(tmp_path / "in.jsonl"), "-o", str(target)),
            *("-m", stage.base, "--max-clients", "2"),
        )
        shown = screen.wait_for("left")
        shown += screen.wait_for("12 lines answered")
    assert "of 12 lines" in shown


# ---------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (("-m", "nothing-here"), 3, "no model 'nothing-here'"),
        (("-m", "remote:box"), 2, "there is no remote 'box'"),
        (("-m", "http://127.0.0.1:9", "--parallel", "4"), 2, "--max-clients sets"),
    ],
)
def test_wrong_words_are_refused_with_what_to_do(
    batch: Batch, source: Callable[..., list[str]], args: tuple[str, ...], code: int, words: str
) -> None:
    source("one")
    outcome = batch(*args)
    assert outcome.code == code
    assert words in outcome.err


def test_an_input_without_lines_is_done_and_says_so(
    batch: Batch, source: Callable[..., list[str]]
) -> None:
    source()
    outcome = batch("-m", "http://127.0.0.1:9")
    assert (outcome.code, "the input has no lines" in outcome.err) == (0, True)


def test_files_that_do_not_match_are_refused(
    batch: Batch, source: Callable[..., list[str]], tmp_path: Path, call: Call
) -> None:
    missing = batch("-m", "http://127.0.0.1:9")
    assert missing.code == 3 and "there is no file" in missing.err
    assert "pipe" not in missing.err
    nowhere = call(SCENARIOS["hello"], "batch", tmp_path / "in.jsonl", named=False)
    assert nowhere.code == 3 and "there is no file" in nowhere.err
    source("one", "two")
    nowhere = call(SCENARIOS["hello"], "batch", tmp_path / "in.jsonl", named=False)
    assert nowhere.code == 2 and "-o OUT.jsonl is missing" in nowhere.err
    assert f"-o {tmp_path / 'in'}-answers.jsonl" in nowhere.err
    with serving() as stage:
        assert batch("-m", stage.base).code == 0
        source("one", "another")
        outcome = batch("-m", stage.base)
        assert len(stage.engine.requests) == 2
    assert outcome.code == 2
    assert "is the output of another input" in outcome.err
    own = tmp_path / "in.jsonl"
    refused = call(SCENARIOS["hello"], "batch", own, "-o", own, named=False)
    assert refused.code == 2 and "is the input" in refused.err
    assert own.read_text() == "one\nanother\n"
    device = call(SCENARIOS["hello"], "batch", own, "-o", "/dev/full", named=False)
    assert device.code == 2 and "-o /dev/full is a pipe or a device" in device.err


def _last_text(request: Any) -> str:
    return str(request.prompt.messages[-1].content)


# ---------------------------------------------------------------------------- the model without -m


def test_stdin_is_an_input(call: Call, tmp_path: Path) -> None:
    script = tmp_path / "tiny.script"
    script.write_text(json.dumps({"reply": "one two three"}))
    flags = ("-o", tmp_path / "out.jsonl", "-m", script, "--backend", SCRIPTED)
    for _ in range(2):  # the second time all lines are answered
        outcome = call((), "batch", "-", *flags, stdin=b'hello\n{"prompt": "hi"}\n', named=False)
        assert outcome.code == 0, outcome.err
        assert ids(tmp_path) == ["line-1", "line-2"]


def test_the_guide_never_answers_a_batch_by_default(
    batch: Batch, source: Callable[..., list[str]], tmp_path: Path
) -> None:
    source({"prompt": "hello"}, {"model": "gpt-4o", "prompt": "hello"})
    outcome = batch()
    assert outcome.code == 2
    assert "localchat batch needs a model" in outcome.err
    assert "the only model here is the built-in guide" in outcome.err
    # The same command would be refused again.
    assert "resume with" not in outcome.err
    assert (tmp_path / "out.jsonl").read_bytes() == b""


def test_batch_uses_the_model_of_the_running_server(
    batch: Batch, source: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving() as stage:
        url = f"http://127.0.0.1:{stage.port}"
        models = (ModelStatus(GUIDE, "g", "ready"), ModelStatus(NAME, "n", "ready"))
        monkeypatch.setattr(
            "localchat.cli.attach.running_servers",
            lambda paths: [(SimpleNamespace(url=url), models)],
        )
        source({"model": "gpt-4o", "prompt": "hello"})
        outcome = batch()
    assert outcome.code == 0, outcome.err
    assert f"the model is {NAME} at {url} (the running server has it loaded)" in outcome.err
    assert [said(answer) for answer in answers(tmp_path)] == ["Hello."]
