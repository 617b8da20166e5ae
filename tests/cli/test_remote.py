"""`--remote`: where a prompt goes, and that nothing goes to another machine unasked."""

from pathlib import Path

import pytest

from localchat.cli.ask import command
from localchat.cli.launch_tui import workplace_of
from localchat.cli.main import root
from localchat.cli.resolve import prepare
from localchat.config.paths import find_paths
from tests.support.cli_program import ScriptedDoor, answer
from tests.support.terminal_screen import Call


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "settings.toml"
    path.write_text('[remotes.box]\nurl = "http://10.0.0.5:8000"\nmodel = "big"\n')
    monkeypatch.setenv("LOCALCHAT_CONFIG", str(path))
    return path


def test_a_named_remote_answers_with_its_model(call: Call, settings: Path) -> None:
    door = ScriptedDoor(answer("hi"))
    found = call(door, "--remote", "box", "hello", named=False)
    assert (found.code, found.out) == (0, "hi\n")
    remote = door.options[-1].remote
    assert remote is not None and (remote.url, remote.model) == ("http://10.0.0.5:8000", "big")


def test_a_model_beside_it_is_the_servers(call: Call, settings: Path) -> None:
    door = ScriptedDoor(answer("hi"))
    call(door, "--remote", "box", "-m", "small", "hello", named=False)
    remote = door.options[-1].remote
    assert remote is not None and remote.model == "small"


def test_a_remote_is_not_remembered_as_the_next_runs_model(
    call: Call, settings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    assert call(ScriptedDoor(answer("hi")), "--remote", "box", "hello", named=False).code == 0
    assert not (find_paths(os.environ).state_dir / "last-model").exists()


def test_a_model_named_by_flag_is_of_this_machine(
    call: Call, settings: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCALCHAT_REMOTE", "box")
    door = ScriptedDoor(answer("hi"))
    call(door, "-m", str(model), "hello", named=False)
    assert door.options[-1].remote is None


def test_a_model_chosen_on_the_screen_of_a_remote_is_of_this_machine(settings: Path) -> None:
    parent = root.make_context("localchat", [], obj=ScriptedDoor(answer("hi")).door)
    with parent, command.make_context("ask", ["--remote", "box"], parent=parent) as ctx:
        workplace, settled = workplace_of(ctx, prepare(ctx))

        def server_of(word: str, **changes: str) -> str | None:
            remote = workplace.resolve(word, changes).options.remote
            return remote.model if remote is not None else None

        assert server_of(settled.model.word, temperature="0.5") == "big"
        assert server_of("remote:box#small") == "small"
        assert server_of("guide") is None


def test_an_unknown_remote_and_an_offline_one_are_refused(call: Call, settings: Path) -> None:
    door = ScriptedDoor(answer("hi"))
    found = call(door, "--remote", "bix", "hello", named=False)
    assert found.code == 2 and "box" in found.err
    found = call(door, "--remote", "box", "--offline", "hello", named=False)
    assert found.code == 2 and "offline" in found.err
    assert not door.options
