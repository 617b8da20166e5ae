"""The command as a process: pipes that close, signals, terminals of several kinds."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from localchat.cli.chat.conversation_options import HISTORY_FILE
from localchat.config.paths import find_paths
from localchat.history.store import History
from tests.support.cli_program import HOSTILE
from tests.support.terminal_screen import Screen

Start = Callable[..., Screen]


def command(scenario: str, *args: str) -> list[str]:
    return [sys.executable, "-m", "tests.support.cli_program", scenario, *args]


@pytest.fixture(autouse=True)
def _named(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALCHAT_MODEL", str(model))


def test_a_reader_that_goes_away_is_no_error() -> None:
    with subprocess.Popen(
        command("endless", "-q", "hi"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"line\n"
        process.stdout.close()
        assert process.wait(90) == 141
        assert process.stderr.read() == b""


def test_ctrl_c_keeps_what_was_said_and_ends_with_130() -> None:
    with subprocess.Popen(
        command("slow", "hi"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert os.read(process.stdout.fileno(), 100) == b"first "
        process.send_signal(signal.SIGINT)
        assert process.wait(90) == 130
        assert process.stdout.read() == b"\n"
        assert b"Traceback" not in process.stderr.read()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_ends_it_leaves_what_was_said_in_the_history(
    number: signal.Signals,
) -> None:
    with subprocess.Popen(
        command("slow", "hi"), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert os.read(process.stdout.fileno(), 100) == b"first "
        process.send_signal(number)
        assert process.wait(90) == -number
    with History.open(find_paths(os.environ).data_dir / HISTORY_FILE) as history:
        (summary,) = history.list()
        nodes = history.load(summary.id).nodes.values()
    assert [(node.message.content, node.state) for node in nodes] == [
        ("hi", "whole"),
        ("first ", "stopped"),
    ]


def test_a_signal_that_is_ignored_ends_nothing() -> None:
    with subprocess.Popen(
        ["nohup", *command("slow", "hi")], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert os.read(process.stdout.fileno(), 100) == b"first "
        process.send_signal(signal.SIGHUP)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        process.send_signal(signal.SIGTERM)
        assert process.wait(90) == -signal.SIGTERM


def with_closed(streams: str, *args: str) -> subprocess.CompletedProcess[str]:
    line = " ".join(["exec", *command("hello", *args), streams])
    return subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("closed", ["<&-", "2>&-", "<&- 2>&-"])
def test_closed_streams_do_no_harm(closed: str) -> None:
    done = with_closed(closed, "hi")
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
    assert done.stdout == "Hello.\n"


@pytest.mark.parametrize("closed", [">&-", "<&- >&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("word", ["hi", "--help", "list"])
def test_an_answer_that_cannot_be_written_is_no_success(closed: str, word: str) -> None:
    done = with_closed(closed, word)
    assert done.returncode == 1
    assert done.stdout == ""
    assert ("cannot write to stdout" in done.stderr) == ("2>" not in closed)
    assert "Traceback" not in done.stderr
    assert "bug in localchat" not in done.stderr


def test_a_server_is_started_with_closed_streams() -> None:
    line = f"exec {sys.executable} -m localchat serve --port 0 guide <&- >&-"
    with subprocess.Popen(["sh", "-c", line], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert any("serving on" in told for told in process.stderr)
        assert any("ready" in told for told in process.stderr)
        process.send_signal(signal.SIGTERM)
        rest = process.stderr.read()
        assert process.wait(90) == 0, rest


def test_what_says_nothing_on_stdout_needs_none() -> None:
    assert with_closed(">&-", "config", "set", "theme", "light").returncode == 0


@pytest.mark.parametrize(
    "words",
    [
        *[
            ("hi",),
            ("doctor",),
            ("doctor", "--json"),
            ("config", "show"),
            ("pull", "--json", "a/b"),
        ],
        *[("--help",), ("--version",), ("history", "--help")],
    ],
)
def test_a_full_disk_is_an_error_with_a_reason(words: tuple[str, ...]) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            command("hello", *words), stdin=subprocess.DEVNULL, stdout=full, stderr=subprocess.PIPE
        )
    assert done.returncode == 1
    assert b"cannot write to stdout" in done.stderr
    assert b"bug in localchat" not in done.stderr


def test_a_terminal_shows_progress_and_erases_it_before_the_answer(screen: Start) -> None:
    code, shown = screen("hello", "hi").finish()
    assert code == 0
    assert "loading the model, 45%, 2.1/4.7 GB" in shown
    answer, _, foot = shown.partition("Hello.\r\n")
    assert "localchat: " not in answer
    assert foot.count("localchat: the engine speaks") == 1
    assert "context 4,096 of 32,768" in foot
    assert shown.rindex("\r\x1b[2K") < shown.rindex("Hello.")


def test_a_terminal_never_obeys_a_models_text(screen: Start) -> None:
    code, shown = screen("hostile", "-q", "hi").finish()
    assert code == 0
    assert not set(shown) & set("\x1b\x07\x00\x9b\u202e")
    assert len(shown.rstrip("\r\n")) == len(HOSTILE)


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_colours_go_where_they_are_not_wanted_never(
    screen: Start, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    assert "\x1b[2m" in screen("thinks", "hi").finish()[1]
    monkeypatch.setenv(name, value)
    if name == "TERM":
        page = screen("thinks", "hi", term=value)
        shown = page.finish()[1]
        assert "\x1b" not in shown
    else:
        shown = screen("thinks", "hi").finish()[1]
        assert "\x1b[2m" not in shown
    assert "hm so" in shown


def test_alone_on_a_terminal_it_talks_until_ctrl_d(screen: Start) -> None:
    page = screen("hello", "-i")
    page.wait_for("> ")
    page.press("first question\n")
    page.wait_for("Hello.")
    page.wait_for("> ")
    page.press("/system be kind\n")
    page.wait_for("set")
    page.wait_for("> ")
    page.press("/nonsense\n")
    page.wait_for("no command /nonsense")
    page.wait_for("> ")
    page.press("/stats\n")
    page.wait_for("62.0 tok/s")
    page.wait_for("> ")
    page.press("\x04")
    assert page.finish()[0] == 0


def test_ctrl_c_stops_an_answer_and_the_conversation_goes_on(screen: Start) -> None:
    page = screen("slow", "-i")
    page.wait_for("> ")
    page.press("go\n")
    page.wait_for("first ")
    page.press("\x03")
    page.wait_for("stopped")
    page.wait_for("> ")
    page.interrupt("Ctrl+D leaves")
    page.wait_for("Ctrl+D leaves")
    page.wait_for("> ")
    page.press("/quit\n")
    assert page.finish()[0] == 0


def test_ctrl_d_while_an_answer_comes_leaves_behind_it(screen: Start) -> None:
    page = screen("pauses", "-i", "go")
    page.wait_for("first ")
    page.press("\x04")
    page.wait_for("and last")
    assert page.finish()[0] == 0


def test_piped_text_and_then_the_keyboard(screen: Start) -> None:
    page = screen("hello", "-i", "sum up", stdin=b"a long text")
    page.wait_for("Hello.")
    page.wait_for("> ")
    page.press('"""two\n')
    page.wait_for(". ")
    page.press('lines"""\n')
    page.wait_for("Hello.")
    page.wait_for("> ")
    page.press("/quit\n")
    assert page.finish()[0] == 0


def test_a_dead_engine_and_a_long_prompt_leave_the_conversation_alive(screen: Start) -> None:
    page = screen("dies", "-i")
    page.wait_for("> ")
    page.press("q\n")
    page.wait_for("SIGKILL")
    page.wait_for("> ")
    page.press("/quit\n")
    assert page.finish()[0] == 0


def test_conversation_without_any_terminal_is_refused() -> None:
    done = subprocess.run(
        command("hello", "-i"),
        input=b"text",
        capture_output=True,
        start_new_session=True,
        timeout=300,
    )
    assert done.returncode == 2
    assert b"needs a terminal" in done.stderr


def test_the_module_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "localchat", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("localchat ")


def test_a_model_name_that_is_no_unicode_is_told_escaped() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "localchat", b"bad \xff word", "-m", b"\xff.gguf"],
        capture_output=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stdout) == (3, b"")
    assert b"\\udcff.gguf" in done.stderr


def test_a_name_that_is_no_unicode_is_written_as_its_bytes(tmp_path: Path) -> None:
    from localchat.atomic import write_text

    name = os.fsdecode(b"\xff.gguf")
    write_text(tmp_path / "last", name)
    assert (tmp_path / "last").read_bytes() == b"\xff.gguf"


@pytest.mark.parametrize(
    ("limit", "told"), [("-v 200000", "out of memory"), ("-n 10", "too many open files")]
)
def test_a_limit_of_the_system_is_named(limit: str, told: str) -> None:
    line = f"ulimit {limit}; exec {sys.executable} -m localchat --no-attach hi"
    done = subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
    )
    assert done.returncode == 1
    assert told in done.stderr
    assert "bug" not in done.stderr
