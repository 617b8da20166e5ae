"""launch: programs of others on a model of this machine, with nothing left behind."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from localchat.cli.serving.agent_programs import PROGRAMS, Program, ServedModel, Start
from localchat.cli.serving.launch import _start, _wait
from localchat.engine.attached.engine import ServerClient
from localchat.errors import EngineDied
from localchat.fit.hardware import Machine
from localchat.measure.server_process import ServerCommand, ServerLog, ServerProcess
from localchat.pool.entry import ModelStatus
from tests.support.cli_program import SCENARIOS
from tests.support.gguf_files import Q4_0, Size, llama
from tests.support.memory_plans import GB
from tests.support.terminal_screen import Call, Outcome

EIGHT_B = Size(32, 4096, 32, 8, 128, 14336, 1024, 131072, Q4_0)
ROOMY = Machine("roomy", frozenset({"avx2"}), 4, 32 * GB, 28 * GB)
URL = "http://127.0.0.1:4711"


class Desk:
    """A machine with fake programs. They write their arguments and environment to a file and exit with 7."""

    def __init__(self, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bin = tmp_path / "bin"
        self.bin.mkdir()
        self.temporary = tmp_path / "temporary"
        self.temporary.mkdir()
        self.commands: list[ServerCommand] = []
        self._record = tmp_path / "record.json"
        self._call = call
        monkeypatch.setenv("PATH", str(self.bin))
        monkeypatch.setattr("tempfile.tempdir", str(self.temporary))
        monkeypatch.setattr("localchat.measure.server_process.server_process", self._serve)

    @contextmanager
    def _serve(self, command: ServerCommand, environ: Mapping[str, str]) -> Iterator[ServerProcess]:
        self.commands.append(command)
        with subprocess.Popen(
            ["/bin/cat"], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as cat:
            assert cat.stderr is not None
            yield ServerProcess(URL, "eight-b", cat, ServerLog(cat.stderr))
            cat.kill()

    def install(self, name: str) -> None:
        script = self.bin / name
        script.write_text(
            f"#!{sys.executable}\n"
            "import json, os, pathlib, sys\n"
            "folders = [os.environ.get('CRUSH_GLOBAL_CONFIG', ''), *sys.argv]\n"
            "files = [p for f in folders for p in (pathlib.Path(f), pathlib.Path(f) / 'crush.json')]\n"
            "texts = [p.read_text() for p in files if p.suffix == '.json' and p.is_file()]\n"
            f"pathlib.Path({str(self._record)!r}).write_text("
            "json.dumps([sys.argv[1:], dict(os.environ), texts]))\n"
            "sys.exit(7)\n"
        )
        script.chmod(0o755)

    def launch(self, *args: str | Path) -> Outcome:
        return self._call(SCENARIOS["hello"], "launch", *args, named=False)

    def seen(self) -> tuple[list[str], dict[str, str], list[str]]:
        """Arguments, environment and files of the program."""
        arguments, environment, texts = json.loads(self._record.read_text())
        return arguments, environment, texts


@pytest.fixture
def desk(tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> Desk:
    monkeypatch.setattr("localchat.fit.hardware.read_machine", lambda: ROOMY)
    return Desk(tmp_path, call, monkeypatch)


@pytest.fixture
def eight_b(tmp_path: Path) -> Path:
    return llama(EIGHT_B).sparse(tmp_path / "eight-b.gguf")


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_a_program_gets_the_server_and_its_exit_code_is_ours(
    desk: Desk, eight_b: Path, program: Program
) -> None:
    desk.install(program.name)
    outcome = desk.launch(program.name, "-m", eight_b, "--", "--flag", "a b")
    assert outcome.code == 7
    assert outcome.out == ""
    (command,) = desk.commands
    arguments, environment, texts = desk.seen()
    assert arguments[-2:] == ["--flag", "a b"]
    told = json.dumps([arguments, environment, texts])
    assert URL in told
    assert "eight-b" in told
    assert environment["LOCALCHAT_LAUNCH_KEY"] == command.key
    assert len(command.key) >= 32
    # Every program of the machine can read arguments.
    assert command.key not in " ".join((*arguments, *command.arguments()))
    assert command.settings["context_length"] == str(program.good_context)
    assert str(program.good_context) in told
    assert list(desk.temporary.iterdir()) == []


def test_variables_of_the_user_lead_no_program_to_another_server(
    desk: Desk, eight_b: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.install("claude")
    monkeypatch.setenv("ANTHROPIC_API_KEY", "theirs")
    monkeypatch.setenv("ANTHROPIC_BASE_URL", "https://api.example")
    desk.launch("claude", "-m", eight_b)
    _, environment, _ = desk.seen()
    assert "ANTHROPIC_API_KEY" not in environment
    assert environment["ANTHROPIC_BASE_URL"] == URL
    assert environment["ANTHROPIC_AUTH_TOKEN"] == desk.commands[0].key


def test_crush_knows_no_provider_but_ours(tmp_path: Path) -> None:
    start = PROGRAMS["crush"].start(ServedModel(URL, "key", "m", 32_768), tmp_path)
    environment = start.environment
    assert environment["CRUSH_DISABLE_DEFAULT_PROVIDERS"] == "1"
    # What it stores must not be read as its settings.
    assert environment["CRUSH_GLOBAL_CONFIG"] != environment["CRUSH_GLOBAL_DATA"]
    assert json.loads(start.files["crush.json"])["models"]["small"]["provider"] == "localchat"


def test_claude_gets_fewer_tools_in_a_short_context(desk: Desk, tmp_path: Path) -> None:
    long = PROGRAMS["claude"].start(ServedModel(URL, "key", "m", 65_536), tmp_path)
    short = PROGRAMS["claude"].start(ServedModel(URL, "key", "m", 32_768), tmp_path)
    assert long.arguments == ()
    assert short.arguments == ("--tools", "Bash,Edit,Read,Write")


def test_the_context_follows_the_memory_and_is_reported(
    desk: Desk, eight_b: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.install("codex")
    tight = replace(ROOMY, ram_total_bytes=9 * GB, ram_free_bytes=6 * GB)
    monkeypatch.setattr("localchat.fit.hardware.read_machine", lambda: tight)
    outcome = desk.launch("codex", "-m", eight_b)
    chosen = int(desk.commands[0].settings["context_length"])
    assert 16_384 <= chosen < 32_768
    assert f"a context of {chosen:,} tokens" in outcome.err

    tiny = replace(ROOMY, ram_total_bytes=7 * GB, ram_free_bytes=5 * GB)
    monkeypatch.setattr("localchat.fit.hardware.read_machine", lambda: tiny)
    outcome = desk.launch("codex", "-m", eight_b)
    assert outcome.code == 4
    assert (
        "Codex CLI needs a context of 16,384 tokens; with eight-b there is memory for"
        in outcome.err
    )
    assert len(desk.commands) == 1


def test_a_context_that_is_too_short_is_refused(desk: Desk, tmp_path: Path, eight_b: Path) -> None:
    desk.install("codex")
    outcome = desk.launch("codex", "-m", eight_b, "--ctx", "4k")
    assert outcome.code == 2
    assert "--ctx is 4,096" in outcome.err
    short = llama(replace(EIGHT_B, context=8192)).sparse(tmp_path / "short.gguf")
    outcome = desk.launch("codex", "-m", short)
    assert outcome.code == 2
    assert "needs a context of 16,384 tokens; short has 8,192" in outcome.err
    assert desk.commands == []


def test_missing_programs_and_models_are_named(desk: Desk, eight_b: Path) -> None:
    outcome = desk.launch("codex", "-m", eight_b)
    assert outcome.code == 1
    assert "Codex CLI is not installed" in outcome.err
    assert "npm install -g @openai/codex" in outcome.err
    assert "codex" in desk.launch("codx").err
    desk.install("codex")
    assert desk.launch("codex", "-m", "nothere").code == 3
    guide = desk.launch("codex", "-m", "guide")
    assert (guide.code, "cannot call tools" in guide.err) == (2, True)
    remote = desk.launch("codex", "-m", "remote:http://127.0.0.1:1/v1")
    assert (remote.code, "a model of this machine" in remote.err) == (2, True)


def test_without_a_program_the_table_is_printed(desk: Desk) -> None:
    desk.install("aider")
    rows = desk.launch().out.splitlines()
    assert len(rows) == 1 + len(PROGRAMS)
    assert any(row.startswith("aider") and row.endswith(str(desk.bin / "aider")) for row in rows)
    assert any("not installed: npm install -g opencode-ai" in row for row in rows)


class _Server(ServerClient):
    def __init__(self) -> None:
        super().__init__(URL, "token")


class Running:
    """A server that runs, with its models."""

    def __init__(self, model: Path) -> None:
        self.loaded: tuple[ModelStatus, ...] = (ModelStatus("eight-b", str(model), "ready"),)
        self.contexts: dict[str, int] | None = {"eight-b": 20_000, "other": 131_072}


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch, eight_b: Path) -> Running:
    running = Running(eight_b)
    monkeypatch.setattr(
        "localchat.cli.attach.running_servers", lambda paths: [(_Server(), running.loaded)]
    )
    monkeypatch.setattr("localchat.cli.serving.launch._contexts", lambda url, key: running.contexts)
    return running


def test_a_running_server_is_used(desk: Desk, running: Running) -> None:
    desk.install("gptme")
    outcome = desk.launch("gptme")
    assert outcome.code == 7
    assert desk.commands == []
    assert "gptme uses eight-b of the server at" in outcome.err
    _, environment, _ = desk.seen()
    assert environment["GPTME_CONTEXT_LENGTH"] == "20000"


def test_the_own_model_of_a_server_may_be_unloaded(
    desk: Desk, eight_b: Path, running: Running
) -> None:
    desk.install("gptme")
    running.loaded = ()
    assert desk.launch("gptme", "-m", eight_b).code == 7
    assert desk.commands == []
    # Its context is known for its own model only.
    running.contexts = {"other": 131_072, "eight-b": 131_072}
    assert desk.launch("gptme", "-m", eight_b).code == 7
    assert len(desk.commands) == 1


def test_a_server_that_requires_a_key_is_named(desk: Desk, eight_b: Path, running: Running) -> None:
    desk.install("gptme")
    running.contexts = None
    outcome = desk.launch("gptme", "-m", eight_b)
    assert (outcome.code, "export LOCALCHAT_API_KEY" in outcome.err) == (2, True)
    running.loaded = ()
    assert desk.launch("gptme", "-m", eight_b).code == 7


def test_a_running_server_is_not_used_if_its_context_is_short_or_the_user_says_so(
    desk: Desk, eight_b: Path, running: Running
) -> None:
    desk.install("gptme")
    assert desk.launch("gptme", "-m", eight_b, "--no-attach").code == 7
    assert "second time" in desk.launch("gptme", "-m", eight_b, "--ctx", "24k").err
    running.contexts = {"eight-b": 4096}
    assert "second time" in desk.launch("gptme", "-m", eight_b).err
    contexts = [command.settings["context_length"] for command in desk.commands]
    assert contexts == ["32768", "24576", "32768"]


@pytest.mark.process
def test_interrupts_go_to_the_program_and_its_signal_is_our_exit_code() -> None:
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from localchat.cli.serving.agent_programs import ServedModel, Program, Start\n"
        "from localchat.cli.serving.launch import _start, _wait\n"
        "program = Program('p', 'P', '', lambda served, folder: Start())\n"
        "script = 'import signal,sys; print(1, flush=True); signal.pause()'\n"
        "served = ServedModel('u', 'k', 'm', 1)\n"
        "process = _start(program, [sys.executable, '-c', script], served, Path(), {})\n"
        "sys.exit(_wait(process, program, None))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert process.stdout is not None
    process.stdout.readline()
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(30) == 128 + signal.SIGINT
    process.stdout.close()


SERVER = """
import os, sys
sys.stderr.write("localchat: loading\\n12:00:00 req_1 GET /health 503 took_ms=1\\nlast words\\n")
sys.stderr.flush()
sys.stdin.readline()
{end}
"""


@pytest.mark.process
@pytest.mark.parametrize(
    ("end", "reason"),
    [
        ("os.kill(os.getpid(), 9)", "SIGKILL, which the system sends when memory runs out"),
        ("sys.exit(3)", "exit code 3"),
    ],
)
@pytest.mark.parametrize("is_stubborn", [False, True])
def test_a_server_that_dies_ends_the_program_and_its_log_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, reason: str, is_stubborn: bool
) -> None:
    monkeypatch.setattr("localchat.cli.serving.launch._EXIT_S", 0.01)
    program = Program("p", "Agent P", "", lambda served, folder: Start())
    script = "import signal, sys\n"
    if is_stubborn:
        script += "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    script += f"print(file=open({str(tmp_path / 'ready')!r}, 'w')); signal.pause()"
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER.format(end=end)],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert server.stderr is not None and server.stdin is not None
    handle = ServerProcess(URL, "eight-b", server, ServerLog(server.stderr))
    served = ServedModel(URL, "k", "m", 1)
    agent = _start(program, [sys.executable, "-c", script], served, tmp_path, {})
    while not (tmp_path / "ready").exists():
        assert agent.poll() is None
    server.stdin.write("\n")
    server.stdin.flush()
    with pytest.raises(EngineDied) as caught:
        _wait(agent, program, handle)
    assert agent.poll() is not None
    assert f"the server of eight-b ended: {reason}" in caught.value.message
    assert "Agent P was ended" in caught.value.message
    assert caught.value.hint == "its last lines:\nlocalchat: loading\nlast words"
    for pipe in (server.stdin, server.stderr):
        pipe.close()
