"""Presets on the command line: `localchat preset`, and `@name` before prompts, in pipes and in line mode."""

import json
from pathlib import Path

import pytest

from localchat.cli.preset_options import complete_preset
from localchat.config.paths import find_paths
from localchat.engine.request import Message, Messages
from tests.support.cli_program import SCENARIOS, ScriptedApp
from tests.support.terminal_screen import Call


@pytest.fixture
def settings() -> Path:
    path = find_paths({}).settings_file
    path.parent.mkdir(parents=True)
    path.write_text(
        '[defaults]\ntemperature = 0.9\n[presets.sum]\nsystem = "Be brief."\ntemperature = 0.1\n'
        'template = "Sum up: {input}"\n[presets.joke]\ntemplate = "Tell a joke."\n'
    )
    return path


def asked(app: ScriptedApp) -> tuple[tuple[Message, ...], float | None]:
    (request,) = app.engines[0].requests
    assert isinstance(request.prompt, Messages)
    return request.prompt.messages, request.sampling.temperature


def test_a_mention_brings_instructions_sampling_and_template(call: Call, settings: Path) -> None:
    app = ScriptedApp(SCENARIOS["hello"])
    assert call(app, "@sum", "this", "here").code == 0
    assert asked(app) == (
        (Message("system", "Be brief."), Message("user", "Sum up: this here")),
        0.1,
    )


def test_the_template_takes_the_whole_input_of_a_pipe(call: Call, settings: Path) -> None:
    app = ScriptedApp(SCENARIOS["hello"])
    assert call(app, "@sum", stdin=b"a long text").code == 0
    assert asked(app)[0][-1].content == "Sum up: a long text"
    app = ScriptedApp(SCENARIOS["hello"])
    assert call(app, "@sum in French", stdin=b"a long text").code == 0
    assert asked(app)[0][-1].content == "Sum up: a long text\n\nin French"


def test_a_template_without_a_place_for_input_is_a_question_itself(
    call: Call, settings: Path
) -> None:
    app = ScriptedApp(SCENARIOS["hello"])
    assert call(app, "@joke").code == 0
    assert asked(app)[0][-1].content == "Tell a joke."
    assert "nothing to ask" in call(SCENARIOS["hello"], "@sum").err


def test_flags_win_over_a_preset_and_it_wins_over_the_environment(
    call: Call, settings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCALCHAT_TEMPERATURE", "0.7")
    for flags, expected in ((), 0.1), (("--temp", "0.4"), 0.4):
        app = ScriptedApp(SCENARIOS["hello"])
        assert call(app, *flags, "@sum x").code == 0
        assert asked(app)[1] == expected


def test_a_preset_names_a_model_and_a_continued_conversation_takes_it(
    call: Call, settings: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(b"GGUF")
    with settings.open("a") as file:
        file.write(f"[presets.big]\nmodel = {json.dumps(str(other))}\n")
    call(SCENARIOS["hello"], "the first")
    app = ScriptedApp(SCENARIOS["hello"])
    assert call(app, "-c", "@big second").code == 0
    assert app.options[0].model == other


@pytest.mark.parametrize("args", [("--", "@sum x"), ("--", "@everyone x"), ("to @sum x",)])
def test_other_texts_with_a_sign_stay_as_they_are(
    call: Call, settings: Path, args: tuple[str, ...]
) -> None:
    app = ScriptedApp(SCENARIOS["hello"])
    assert call(app, *args).code == 0
    assert asked(app)[0][-1].content == args[-1]


def test_presets_are_made_listed_and_removed(call: Call) -> None:
    assert call((), "preset").out == ""
    assert call((), "preset", "add", "tidy", "-s", "Tidy up.", "--temp", "0").code == 0
    assert call((), "preset", "add", "tidy", "-s", "x").code == 2
    assert "@tidy" in call((), "preset").out
    (shown,) = json.loads(call((), "preset", "list", "--json").out)
    assert shown["name"] == "tidy"
    assert shown["system"] == "Tidy up."
    assert call((), "preset", "rm", "tdiy").err.endswith("did you mean tidy?\n")
    assert call((), "preset", "add", "empty").code == 2
    assert call((), "preset", "rm", "tidy").code == 0
    assert json.loads(call((), "preset", "list", "--json").out) == []


def test_names_are_completed(call: Call, settings: Path) -> None:
    import click

    app = ScriptedApp(()).app
    context = click.Context(click.Command("x"), obj=app)
    name = click.Argument(["name"])
    mentions = complete_preset(context, name, "@s", sign="@")
    assert [item.value for item in mentions] == ["@sum"]
    assert [item.value for item in complete_preset(context, name, "")] == ["joke", "sum"]


def test_in_the_line_mode_a_mention_holds_from_then_on(
    call: Call, settings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = iter(("@sum one", "two", "@ctx three"))

    class Keys:
        def read(self) -> str | None:
            return next(lines, None)

    with settings.open("a") as file:
        file.write("[presets.ctx]\ncontext_length = 512\n")
    monkeypatch.setattr("localchat.cli.chat.line_input.open_keyboard", lambda terminal: Keys())
    app = ScriptedApp(SCENARIOS["hello"])
    outcome = call(app, "-i")
    first, second = app.engines[0].requests
    assert isinstance(first.prompt, Messages)
    assert isinstance(second.prompt, Messages)
    assert first.prompt.messages[0] == Message("system", "Be brief.")
    assert first.prompt.messages[-1].content == "Sum up: one"
    assert second.prompt.messages[-1].content == "two"
    assert (first.sampling.temperature, second.sampling.temperature) == (0.1, 0.1)
    assert "localchat -c -i @ctx" in outcome.err
