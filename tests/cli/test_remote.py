"""`--remote`: where a prompt goes, and that nothing goes to another machine unasked."""

from pathlib import Path

import pytest

from localchat.cli.chat.run import prompt_command as command
from localchat.cli.chat.session_context import session_context
from localchat.cli.main import root
from localchat.cli.resolve import resolve_setup
from localchat.config.paths import find_paths
from tests.support.cli_program import ScriptedApp, answer
from tests.support.terminal_screen import Call


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "settings.toml"
    path.write_text('[remotes.box]\nurl = "http://10.0.0.5:8000"\nmodel = "big"\n')
    monkeypatch.setenv("LOCALCHAT_CONFIG", str(path))
    return path


def test_a_named_remote_answers_with_its_model(call: Call, settings: Path) -> None:
    app = ScriptedApp(answer("hi"))
    found = call(app, "--remote", "box", "hello", named=False)
    assert (found.code, found.out) == (0, "hi\n")
    remote = app.options[-1].remote
    assert remote is not None and (remote.url, remote.model) == ("http://10.0.0.5:8000", "big")


def test_a_model_beside_it_is_the_servers(call: Call, settings: Path) -> None:
    app = ScriptedApp(answer("hi"))
    call(app, "--remote", "box", "-m", "small", "hello", named=False)
    remote = app.options[-1].remote
    assert remote is not None and remote.model == "small"


def test_flags_of_a_load_are_reported_without_effect_on_a_remote(
    call: Call, settings: Path
) -> None:
    app = ScriptedApp(answer("hi"))
    flags = ("--ctx", "2k", "--threads", "3", "--temp", "0")
    err = call(app, "--remote", "box", *flags, "hello", named=False).err
    assert "--ctx has no effect: big on box is loaded by its own server" in err
    assert "--threads has no effect" in err
    assert "no effect" not in call(app, "--remote", "box", "hello", named=False).err


def test_a_remote_is_not_remembered_as_the_next_runs_model(
    call: Call, settings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    assert call(ScriptedApp(answer("hi")), "--remote", "box", "hello", named=False).code == 0
    assert not (find_paths(os.environ).state_dir / "last-model").exists()


def test_a_model_named_by_flag_is_of_this_machine(
    call: Call, settings: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCALCHAT_REMOTE", "box")
    app = ScriptedApp(answer("hi"))
    call(app, "-m", str(model), "hello", named=False)
    assert app.options[-1].remote is None


def test_a_model_chosen_on_the_screen_of_a_remote_is_of_this_machine(settings: Path) -> None:
    parent = root.make_context("localchat", [], obj=ScriptedApp(answer("hi")).app)
    with parent, command.make_context("ask", ["--remote", "box"], parent=parent) as ctx:
        context, setup = session_context(resolve_setup(ctx))

        def server_of(word: str, **changes: str) -> str | None:
            remote = context.resolve(word, changes).options.remote
            return remote.model if remote is not None else None

        assert server_of(setup.model.word, temperature="0.5") == "big"
        assert server_of("remote:box#small") == "small"
        assert server_of("guide") is None


def test_an_unknown_remote_and_an_offline_one_are_refused(call: Call, settings: Path) -> None:
    app = ScriptedApp(answer("hi"))
    found = call(app, "--remote", "bix", "hello", named=False)
    assert found.code == 2 and "box" in found.err
    found = call(app, "--remote", "box", "--offline", "hello", named=False)
    assert found.code == 2 and "offline" in found.err
    assert not app.options


@pytest.mark.parametrize("variable", ["", "LOCALCHAT_REMOTE"])
def test_run_with_a_remote_asks_for_no_local_model(
    call: Call, settings: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    flags = [] if variable else ["--remote", "box"]
    if variable:
        monkeypatch.setenv(variable, "box")
    app = ScriptedApp(answer("hi"))
    outcome = call(app, "run", *flags, stdin=b"hello", named=False)
    assert (outcome.code, outcome.out) == (0, "hi\n"), outcome.err
    remote = app.options[-1].remote
    assert remote is not None and remote.url == "http://10.0.0.5:8000"
