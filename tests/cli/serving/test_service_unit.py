"""`serve --print-unit`: service files that start this very server, and commands that install them."""

import os
import plistlib
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from localchat.cli.serving import service_unit
from tests.support.cli_program import SCENARIOS
from tests.support.terminal_screen import Call, Outcome

ODD = 'a "b" $c %d\\e'
"""A folder name that systemd, launchd and a shell each read differently when it is not quoted."""


def printed(call: Call, *args: str | Path) -> Outcome:
    return call(SCENARIOS["hello"], "serve", *args, named=False)


def agent(call: Call, *args: str | Path) -> list[str]:
    return list(plistlib.loads(printed(call, *args).out.encode())["ProgramArguments"])


def test_flags_of_the_command_are_kept_and_paths_become_absolute(
    call: Call, model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("0123456789abcdef0123456789\n")
    keys.chmod(0o600)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOCALCHAT_LLAMACPP_LIBRARY", "")  # which the flag sets
    (tmp_path / "lib").mkdir()
    flags = (
        "--port",
        "9001",
        "--llamacpp-library",
        "lib",
        "--allow-host",
        "one.test",
        "--allow-host",
        "two.test",
        "--no-quiet",
    )
    got = agent(call, model.name, "--print-unit=launchd", *flags, "--api-key-file", "keys")
    assert got == [
        *(sys.executable, "-m", "localchat", "serve"),
        *("--port", "9001", "--api-key-file", str(keys)),
        *(
            "--allow-host",
            "one.test",
            "--allow-host",
            "two.test",
            "--llamacpp-library",
            str(tmp_path / "lib"),
            "--no-quiet",
            str(model),
        ),
    ]


def test_what_was_not_given_is_left_to_the_settings(call: Call) -> None:
    assert agent(call, "guide", "--print-unit=launchd")[4:] == ["guide"]


def test_the_program_is_the_command_that_ran(
    call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shim = tmp_path / "bin/localchat"
    shim.parent.mkdir()
    shim.write_text("#!/bin/sh\n")
    shim.chmod(0o755)
    monkeypatch.setenv("PATH", str(shim.parent), prepend=os.pathsep)
    monkeypatch.setattr(sys, "argv", ["localchat"])
    assert agent(call, "guide", "--print-unit=launchd")[:2] == [str(shim), "serve"]


def test_variables_are_kept_and_a_key_is_not(
    call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOCALCHAT_DATA_DIR", "data")
    monkeypatch.setenv("LOCALCHAT_API_KEY", "0123456789abcdef0123456789")
    for manager in service_unit.FORMATS:
        code, out, err = printed(call, "guide", f"--print-unit={manager}")
        assert code == 0 and "0123456789" not in out + err
        assert str(tmp_path / "data") in out
        assert "LOCALCHAT_API_KEY is not in this file" in err
        assert f"LOCALCHAT_DATA_DIR={tmp_path / 'data'}" in err


@pytest.mark.parametrize("manager", service_unit.FORMATS)
def test_the_command_that_is_told_prints_the_same_file(
    call: Call, model: Path, tmp_path: Path, manager: str
) -> None:
    odd = tmp_path / ODD / "tiny.gguf"
    odd.parent.mkdir()
    shutil.copy(model, odd)
    code, out, err = printed(call, odd, "--port", "9001", f"--print-unit={manager}")
    line = next(line for line in err.splitlines() if " > ~/" in line).partition(" > ~/")[0]
    words = shlex.split(line)
    assert code == 0
    assert printed(call, *words[words.index("serve") + 1 :]).out == out


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_systemd_accepts_the_unit(
    call: Call, model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    odd = tmp_path / ODD / "tiny.gguf"
    odd.parent.mkdir()
    shutil.copy(model, odd)
    monkeypatch.setenv("LOCALCHAT_MODELS", str(odd.parent))
    unit = tmp_path / "localchat.service"
    unit.write_text(printed(call, odd, "--print-unit=systemd").out)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--user", unit],
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_systemd_words_are_escaped(call: Call, model: Path, tmp_path: Path) -> None:
    odd = tmp_path / ODD / "tiny.gguf"
    odd.parent.mkdir()
    shutil.copy(model, odd)
    out = printed(call, odd, "--print-unit=systemd").out
    line = next(line for line in out.splitlines() if line.startswith("ExecStart="))
    assert line.endswith(f'"{tmp_path}/a \\"b\\" $$c %%d\\\\e/tiny.gguf"')


def test_a_unit_that_serve_would_refuse_is_refused(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCALCHAT_API_KEY", "0123456789abcdef0123456789")  # a service has none
    code, out, err = printed(call, "guide", "--host", "0.0.0.0", "--print-unit")
    assert (code, out) == (2, "") and "--api-key-file FILE" in err
    code, out, err = printed(call, "no-such-model", "--print-unit")
    assert (code, out) == (3, "")


def test_a_server_on_the_port_is_no_obstacle(call: Call) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        code, out, _ = printed(call, "guide", "--port", port, "--print-unit=systemd")
    assert code == 0 and f"--port {port} guide" in out


def test_without_a_name_it_is_for_this_platform(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "[Service]" in printed(call, "guide", "--print-unit=systemd").out
    monkeypatch.setattr(sys, "platform", "darwin")
    assert service_unit.default_format() == "launchd"
