"""The streams of a run, where a whole program is too blunt to see it."""

import io
import sys
from collections.abc import Callable

import pytest

from localchat.cli import streams
from localchat.cli.streams import OutputClosed, Terminal
from localchat.errors import LocalchatError

OnTty = Callable[[], tuple[Terminal, "FakeTty"]]


class FakeTty(io.StringIO):
    def isatty(self) -> bool:
        return True


class Failing(io.StringIO):
    def __init__(self, error: OSError) -> None:
        super().__init__()
        self._error = error

    def write(self, text: str) -> int:
        raise self._error


@pytest.fixture
def on_tty(monkeypatch: pytest.MonkeyPatch) -> OnTty:
    """Makes a colourless terminal whose stdout and stderr are one screen."""

    def make() -> tuple[Terminal, FakeTty]:
        tty = FakeTty()
        monkeypatch.setattr(sys, "stdout", tty)
        monkeypatch.setattr(sys, "stderr", tty)
        return Terminal({"NO_COLOR": "1"}), tty

    return make


def test_a_notice_in_mid_answer_waits_for_its_end(on_tty: OnTty) -> None:
    terminal, shared = on_tty()
    terminal.answer("one ")
    terminal.notify("one thread fewer")
    terminal.answer("two\n")
    terminal.end_answer()
    assert shared.getvalue() == "one two\nlocalchat: one thread fewer\n"


def test_a_notice_in_a_log_is_one_line_whatever_names_it_has(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    terminal = Terminal({})
    terminal.notify("a\nlocalchat: b is loaded")
    monkeypatch.setattr(terminal, "_next_line_s", 0.0)
    terminal.progress("loading a\nb")
    lines = capfd.readouterr().err.splitlines()
    assert lines == ["localchat: a␊localchat: b is loaded", "localchat: loading a␊b"]


def test_reasoning_and_answer_are_parted(on_tty: OnTty) -> None:
    terminal, shared = on_tty()
    terminal.reasoning("hm")
    terminal.answer("yes")
    terminal.end_answer()
    assert shared.getvalue() == "hm\n\nyes\n"


def test_newlines_inside_an_answer_stay_and_those_at_its_end_become_one(on_tty: OnTty) -> None:
    terminal, shared = on_tty()
    for piece in ("a\n", "\n", "b", "\n\n", "\n"):
        terminal.answer(piece)
    terminal.end_answer()
    assert shared.getvalue() == "a\n\nb\n"


def test_progress_is_drawn_in_place_and_erased(on_tty: OnTty) -> None:
    terminal, shared = on_tty()
    terminal.progress("loading")
    terminal.progress("")
    terminal.progress("")
    assert shared.getvalue() == "\r\x1b[2Kloading\r\x1b[2K"


def test_notices_break_at_words_and_progress_keeps_to_one_row(
    on_tty: OnTty, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "columns", lambda stream: 24)
    terminal, shared = on_tty()
    terminal.notify("other programs are using the CPU")
    streams.tell("  the question is kept: /send sends it")
    terminal.progress("prefill 1,344/3,278 (41%), 20.0 tok/s")
    assert shared.getvalue() == (
        "localchat: other\nprograms are using the\nCPU\n"
        "  the question is kept:\n  /send sends it\n"
        "\r\x1b[2Kprefill 1,344/3,278 (4…"
    )


def test_a_command_to_copy_is_one_line(on_tty: OnTty, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "columns", lambda stream: 24)
    terminal, shared = on_tty()
    terminal.print_command("curl http://127.0.0.1:8114/v1/models -d '{}'")
    assert shared.getvalue() == "curl http://127.0.0.1:8114/v1/models -d '{}'\n"


def test_notices_in_a_pipe_keep_their_lines(capfd: pytest.CaptureFixture[str]) -> None:
    long = "other programs are using the CPU " * 10
    Terminal({"COLUMNS": "20"}).notify(long)
    streams.tell(long)
    assert capfd.readouterr().err == f"localchat: {long}\n{long}\n"


def test_off_a_terminal_progress_takes_a_line_every_ten_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    monkeypatch.setattr("localchat.cli.streams.time.monotonic", lambda: now)
    terminal = Terminal({})
    for now in (1.0, 9.0, 10.5, 11.0, 19.0, 21.0):
        terminal.progress(f"at {now}")
    assert capsys.readouterr().err == "localchat: at 10.5\nlocalchat: at 21.0\n"


def test_a_closed_reader_and_a_full_disk_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Failing(BrokenPipeError()))
    with pytest.raises(OutputClosed):
        Terminal({}).answer("text")
    monkeypatch.setattr(sys, "stdout", Failing(OSError(28, "No space left on device")))
    with pytest.raises(LocalchatError, match="No space left"):
        Terminal({}).answer("text")


def test_talk_that_nobody_reads_does_not_stop_the_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stderr", Failing(BrokenPipeError()))
    terminal = Terminal({})
    terminal.notify("a notice")
    terminal.answer("text")
    terminal.end_answer()
    assert capsys.readouterr().out == "text\n"


def test_notes_come_once_for_each_cause_below_the_answer(
    capfd: pytest.CaptureFixture[str],
) -> None:
    terminal = Terminal({}, stats=True)
    terminal.note("Slower than usual: other programs are busy. Computing with 3 threads now.")
    terminal.answer("an an")
    terminal.note("Slower than usual: other programs are busy. Computing with 1 thread now.")
    terminal.note("the context was shortened to 4,096 tokens")
    terminal.notify("this conversation is not saved")
    terminal.answer("swer")
    assert capfd.readouterr() == ("an answer", "")
    terminal.end_answer()
    out, err = capfd.readouterr()
    assert out == "\n"
    assert [line.split(": ")[1].split(" ")[0] for line in err.splitlines()] == [
        "Slower",
        "the",
        "this",
    ]


def test_a_note_during_a_long_prompt_comes_once_where_lines_are_only_appended(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr("localchat.cli.streams.time.monotonic", lambda: now)
    terminal = Terminal({"TERM": "dumb"}, stats=True)
    now = 60.0
    terminal.note("the context was shortened")
    terminal.answer("x")
    terminal.end_answer()
    assert capfd.readouterr() == ("x\n", "localchat: the context was shortened\n")


def test_a_pipe_gets_no_notes_but_with_stats(capfd: pytest.CaptureFixture[str]) -> None:
    terminal = Terminal({})
    terminal.note("the context was shortened")
    terminal.answer("x")
    terminal.end_answer()
    assert capfd.readouterr() == ("x\n", "")


@pytest.mark.parametrize("quiet", [False, True])
def test_a_warning_reaches_a_pipe_once_unless_the_run_is_quiet(
    capfd: pytest.CaptureFixture[str], quiet: bool
) -> None:
    terminal = Terminal({}, quiet=quiet)
    terminal.note("no chat template. Take care.")
    terminal.warn("no chat template. Take care.")
    terminal.warn("no chat template. Take care.")
    terminal.warn("")
    terminal.answer("Hello")
    terminal.end_answer()
    expected = "" if quiet else "localchat: no chat template. Take care.\n"
    assert capfd.readouterr() == ("Hello\n", expected)


def test_a_file_name_that_is_not_utf8_keeps_its_bytes_in_a_pipe(
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    terminal = Terminal({})
    terminal.answer(b"m\xfe.gguf".decode(errors="surrogateescape") + "\ud83d!")
    terminal.end_answer()
    assert capfdbinary.readouterr().out == b"m\xfe.gguf?!\n"
