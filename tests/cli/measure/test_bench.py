"""bench: what it measures over a server process of its own, and which input it refuses."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from localchat.cli.measure.bench import record_lines
from localchat.measure.records import BenchRecord
from localchat.measure.server_process import ServerCommand, server_process
from tests.support.cli_program import SCENARIOS
from tests.support.http_server import running
from tests.support.terminal_screen import Call, Outcome, Screen

SCRIPTED = "tests.support.scripted_backend:ScriptedBackend"
Bench = Callable[..., Outcome]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A model of the scripted backend."""
    path = tmp_path / "tiny.script"
    path.write_text(json.dumps({"reply": "word " * 200, "step_s": 0.002}))
    return path


@pytest.fixture
def bench(call: Call) -> Bench:
    """`localchat bench`, in this process."""
    return lambda *args: call(SCENARIOS["hello"], "bench", *args, named=False)


SHORT = ("--shape", "300+20", "--requests", "2", "--backend", SCRIPTED)


def test_a_model_is_measured_by_a_server_of_its_own(
    bench: Bench, script: Path, tmp_path: Path
) -> None:
    outcome = bench(script, *SHORT, "--clients", "1,2", "--ttft", "1h")
    assert outcome.code == 0, outcome.err
    rows = [line.split() for line in outcome.out.splitlines() if re.match(r" +[12] ", line)]
    assert [row[0] for row in rows] == ["1", "2", "1", "2"]
    assert "GOOD" in outcome.out and "100%" in outcome.out
    assert "2 clients: " in outcome.err
    assert re.search(r"serves [\d,]+ people who ask once a minute within the target: ", outcome.out)
    record = json.loads(bench(script, *SHORT, "--clients", "1,2", "--json").out)
    figures = [point["figures"] for point in record["points"]]
    assert [(one["requests"], one["completion_tokens"]) for one in figures] == [(2, 20), (4, 20)]
    assert figures[0]["prompt_tokens"] == pytest.approx(300, rel=0.25)  # of random words
    assert record["machine"]["cores"] >= 1


def test_settings_beside_each_other_reach_their_servers(bench: Bench, script: Path) -> None:
    outcome = bench(
        script, *SHORT, "--clients", "1", "--rounds", "2", "--vary", "kv-type=f16,q8_0", "--json"
    )
    record = json.loads(outcome.out)
    types = {one["variant"]["name"]: one["properties"]["kv_type"] for one in record["served"]}
    assert types == {"kv-type=f16": "f16", "kv-type=q8_0": "q8_0"}
    assert [point["round"] for point in record["points"]] == [0, 0, 1, 1]
    stored = msgspec.json.decode(msgspec.json.encode(record), type=BenchRecord)
    shown = "\n".join(record_lines(stored, None))
    assert "AGAINST kv-type=f16" in shown
    assert "noise" in shown


def test_a_running_server_is_measured_by_its_address(bench: Bench) -> None:
    from tests.support.scripted_engine import ScriptedAnswer, ScriptedEngine

    engine = ScriptedEngine(script=lambda request: ScriptedAnswer(("a", "b", "c")))
    with running(engine) as (port, _):
        outcome = bench(f"http://127.0.0.1:{port}", "--clients", "2", "--requests", "1", "--json")
    record = json.loads(outcome.out)
    assert record["served"][0]["url"] == f"http://127.0.0.1:{port}"
    assert record["points"][0]["figures"]["completion_tokens"] == 3


def test_requests_arrive_at_a_rate(bench: Bench, script: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "mine.jsonl"
    prompts.write_text('{"prompt": "A secret question?", "max_tokens": 8}\n')
    load = ("--prompts", prompts, "--rate", "20,50", "--requests", "3", "--backend", SCRIPTED)
    outcome = bench(script, *load)
    assert outcome.code == 0, outcome.err
    assert "REQUESTS/S" in outcome.out and "requests/s" in outcome.err
    record = json.loads(bench(script, *load, "--json").out)
    assert [point["place"]["rate"] for point in record["points"]] == [20, 50]
    assert [point["figures"]["requests"] for point in record["points"]] == [3, 3]
    # Results hold no texts.
    assert "secret" not in json.dumps(record)


def test_a_burst_disrupts_running_streams(bench: Bench, script: Path) -> None:
    outcome = bench(script, "--shape", "disruption", "--clients", "2", "--backend", SCRIPTED)
    assert outcome.code == 0, outcome.err
    assert re.search(
        r"2 clients: while 2 prompts of [\d,]+ tokens are read, the median gap ", outcome.out
    )


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (("nothing-here",), 3, "no model 'nothing-here'"),
        (
            ("guide", "--clients", "1,99999999999"),
            2,
            "'99999999999' is too large; it is at most 4,096",
        ),
        (("guide", "--seconds", "nan"), 2, "'nan' is not a valid number"),
        (("http://127.0.0.1:9",), 5, "127.0.0.1:9"),
        (("guide", "--shape", "chta"), 2, "512+128"),
        (("guide", "--ttft", "soon"), 2, "--ttft 500ms"),
        (("guide", "--tpot", "0ms"), 2, "which is not a time"),
        (("guide", "--clients", "0"), 2, "--clients 1,4,16"),
        (("guide", "--rate", "0,1"), 2, "as in --rate 0.5,2"),
        (("guide", "--rate", "1", "--clients", "1"), 2, "--rate and --clients exclude each other"),
        (("guide", "--rate", "1", "--shape", "disruption"), 2, "leave --rate out"),
        (("guide", "--history"), 2, "there are no conversations yet"),
        (("guide", "--history", "--shape", "chat"), 2, "exclude each other"),
        (("guide", "--vary", "kv-typ=f16,q8_0"), 2, "did you mean kv-type"),
        (("remote:box",), 2, "there is no remote 'box'"),
    ],
)
def test_wrong_input_is_refused_with_what_to_do(
    bench: Bench, args: tuple[str, ...], code: int, words: str
) -> None:
    outcome = bench(*args)
    assert outcome.code == code
    assert words in outcome.err
    assert outcome.out == ""


def test_a_private_server_is_found_by_nobody_and_ends_with_its_program(
    call: Call, script: Path
) -> None:
    command = ServerCommand(str(script), {"backend": SCRIPTED})
    with server_process(command, os.environ) as server:
        assert server.url.startswith("http://127.0.0.1:")
        assert "no server is running" in call(SCENARIOS["hello"], "ps", named=False).err
    process = subprocess.Popen(
        [sys.executable, *command.arguments(), "--backend", SCRIPTED],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline().startswith(b"http://127.0.0.1:")
        process.communicate(
            timeout=60
        )  # closes stdin, as the end of the program that holds it does
        assert process.returncode == 0
    finally:
        process.kill()


def test_a_server_that_cannot_load_says_why(bench: Bench, tmp_path: Path) -> None:
    broken = tmp_path / "broken.script"
    broken.write_text("{")
    outcome = bench(broken, *SHORT)
    assert outcome.code == 1
    assert "is no script" in outcome.err


def test_an_interrupted_benchmark_keeps_what_it_measured(
    on_terminal: Callable[..., Screen], script: Path
) -> None:
    shown = on_terminal(
        *("-m", "localchat", "bench", str(script), "--shape", "100+100", "--backend", SCRIPTED),
        *("--clients", "1,2,4,8,16", "--seconds", "1"),
    )
    shown.wait_for("1 client: ")
    shown.press("\x03")
    code, rest = shown.finish()
    assert code == 130
    assert "The benchmark was interrupted." in rest


def test_a_benchmark_that_sigterm_ends_shows_what_it_measured(script: Path) -> None:
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "localchat", "bench", str(script), "--shape", "100+100"),
            *("--backend", SCRIPTED, "--clients", "1,2,4,8,16", "--seconds", "1"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "1 client: " in line:
            break
    process.terminate()
    out, _ = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGTERM
    assert "The benchmark was interrupted." in out


def test_a_model_that_is_missing_is_told_before_another_is_measured(
    bench: Bench, script: Path
) -> None:
    outcome = bench(script, "nosuch", *SHORT, "--clients", "1")
    assert outcome.code != 0 and "nosuch" in outcome.err
    assert outcome.out == "" and "client" not in outcome.err
