"""Files that users name: a named pipe or a device is refused, because reading it might never end."""

import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from localchat.config.paths import open_input, read_input
from localchat.errors import UsageError
from localchat.models.resolve import parse_adapter
from tests.support.cli_program import SCENARIOS
from tests.support.terminal_screen import Call


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[Path]:
    """A named pipe with a writer, so that a test fails, rather than hangs, if the pipe is read."""
    path = tmp_path / "pipe.txt"
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_bytes, args=(b"text",), daemon=True)
    writer.start()
    yield path
    reader = os.open(path, os.O_RDWR)
    writer.join()
    os.close(reader)


@pytest.mark.parametrize(
    "line",
    [
        "-f PIPE hi",
        "--schema PIPE hi",
        "--grammar PIPE hi",
        "--lora PIPE hi",
        "learn PIPE",
        "quality MODEL --text PIPE",
        "quality MODEL --set PIPE",
        "bench MODEL --prompts PIPE",
        "batch PIPE -o out.jsonl",
        "serve MODEL --api-key-file PIPE --port 0",
    ],
)
def test_a_named_pipe_is_refused(call: Call, model: Path, pipe: Path, line: str) -> None:
    words = line.replace("PIPE", str(pipe)).replace("MODEL", str(model)).split()
    code, out, err = call(SCENARIOS["hello"], *words)
    assert (code in (2, 3), out) == (True, "")
    assert "is a pipe or a device" in err or "is not a file" in err


def test_a_settings_file_that_is_a_pipe_is_refused(
    call: Call, pipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCALCHAT_CONFIG", str(pipe))
    assert "it is a pipe or a device" in call(SCENARIOS["hello"], "hi").err


def test_documents_that_became_a_pipe_keep_their_text(call: Call, pipe: Path) -> None:
    file = pipe.with_name("notes.txt")
    file.write_text("The plum is blue.")
    assert call(SCENARIOS["hello"], "learn", file).code == 0
    file.unlink()
    pipe.rename(file)
    assert call(SCENARIOS["hello"], "@notes which color?").code == 0
    file.rename(pipe)


def test_a_pipe_of_the_shell_and_the_null_device_are_read() -> None:
    process = subprocess.Popen(["echo", "plum"], stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process.stdout as stream:
        assert read_input(Path(f"/dev/fd/{stream.fileno()}")) == b"plum\n"
    process.wait()
    assert read_input(Path(os.devnull)) == b""


def test_a_device_without_an_end_and_a_large_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="it is a pipe or a device"):
        open_input(Path("/dev/zero"))
    with pytest.raises(UsageError, match="is a pipe or a device"):
        parse_adapter("/dev/zero")
    file = tmp_path / "large.txt"
    file.write_bytes(b"x" * 1001)
    with pytest.raises(OSError, match=r"it is larger than 1\.0 kB"):
        read_input(file, 1000)
