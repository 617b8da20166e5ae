"""Settings as a user meets them: who wins, what an error says, `config`."""

import os
import re
from pathlib import Path

import pytest

from localchat.atomic import write_text
from localchat.cli.context import AppContext, Notify
from localchat.cli.resolve import Inputs
from localchat.config.parameters import PARAMETERS
from localchat.config.paths import Paths
from localchat.config.settings import from_environment, resolve, unread_variables, variable
from localchat.config.settings_file import SettingsFile, read_settings
from localchat.engine.attached.protocol import AttachSpec
from localchat.errors import UsageError
from localchat.server.bootstrap import ServerSpec
from localchat_llamacpp import LlamaCppBackend
from tests.support.cli_program import SCENARIOS, ScriptedApp
from tests.support.terminal_screen import Call

READING = ("localchat", "backends", "scripts", "tests/core", "tests/real", "tests/localchat_cuda")
QUOTED = re.compile(r'"(LOCALCHAT_[A-Z0-9_]*[A-Z0-9])"')
"""Names of variables in the code."""


@pytest.fixture
def file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    path = tmp_path / "mine.toml"
    monkeypatch.setenv("LOCALCHAT_CONFIG", str(path))
    return path


def test_a_flag_beats_the_environment_beats_the_file_beats_the_default(
    call: Call, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def temperature(*args: str) -> float | None:
        app = ScriptedApp(SCENARIOS["hello"])
        assert call(app, *args, "hi").code == 0
        return app.engines[0].requests[0].sampling.temperature

    assert temperature() is None
    file.write_text('[defaults]\ntemperature = 0.1\n[models."tiny"]\ntemperature = 0.2\n')
    assert temperature() == 0.2
    monkeypatch.setenv("LOCALCHAT_TEMPERATURE", "0.3")
    assert temperature() == 0.3
    assert temperature("-o", "temperature", "0.4") == 0.4
    assert temperature("-o", "temperature", "0.4", "--temperature", "0.5") == 0.5


def test_a_setting_reaches_the_engine_from_the_environment(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCALCHAT_CONTEXT_LENGTH", "1024")
    monkeypatch.setenv("LOCALCHAT_KV_CACHE_TYPE", "q4_0")
    monkeypatch.setenv("LOCALCHAT_STATS", "1")
    app = ScriptedApp(SCENARIOS["hello"])
    _, _, err = call(app, "hi")
    assert (app.options[0].load.context_tokens, app.options[0].load.kv_type) == (1024, "q4_0")
    assert "TTFT" in err
    assert "TTFT" not in call(SCENARIOS["hello"], "--no-stats", "hi").err


def test_the_library_that_is_named_is_where_backends_look_for_it(
    call: Call, file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    name = variable("llamacpp_library")
    monkeypatch.setenv(name, "")
    assert call(SCENARIOS["hello"], "hi").code == 0
    assert os.environ[name] == ""
    file.write_text('[defaults]\nllamacpp_library = "/by/file"\n')
    for ask in (("hi",), ("list",), ("doctor",)):
        monkeypatch.setenv(name, "")
        assert call(SCENARIOS["hello"], *ask, named=ask == ("hi",)).code == 0
        assert os.environ[name] == "/by/file"
    backend = LlamaCppBackend()
    assert "/by/file, which does not exist" in backend.available().reason
    monkeypatch.setenv(name, "/by/variable")
    assert call(SCENARIOS["hello"], "hi").code == 0
    assert os.environ[name] == "/by/variable"


def test_a_library_that_a_flag_names_is_loaded_and_no_servers_used(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = variable("llamacpp_library")
    monkeypatch.setenv(name, "")
    asked: list[AttachSpec] = []

    def attach(paths: Paths, spec: AttachSpec, user: str, notify: Notify) -> None:
        asked.append(spec)

    app = ScriptedApp(SCENARIOS["hello"])
    app.app = app.app._replace(attach=attach)
    assert call(app, "--llamacpp-library", "/by/flag", "hi").code == 0
    assert (os.environ[name], asked) == ("/by/flag", [])
    monkeypatch.setenv(name, "")
    assert call(app, "hi").code == 0
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("LOCALCHAT_TEMPRATURE", "did you mean LOCALCHAT_TEMPERATURE?"),
        ("LOCALCHAT_CTX", "did you mean LOCALCHAT_CONTEXT_LENGTH?"),
        ("LOCALCHAT_MODELS_DIR", "did you mean LOCALCHAT_MODELS?"),
        ("LOCALCHAT_Offline", "did you mean LOCALCHAT_OFFLINE?"),
        ("LOCALCHAT_XQXQ", "`localchat config` lists the settings"),
    ],
)
def test_a_variable_that_nothing_reads_is_named_once_on_stderr(
    call: Call, monkeypatch: pytest.MonkeyPatch, name: str, advice: str
) -> None:
    monkeypatch.setenv(name, "secret")
    sentence = f"localchat: {name} has no effect; {advice}\n"
    asked = call(SCENARIOS["hello"], "hi")
    assert (asked.out, asked.err.count(sentence)) == ("Hello.\n", 1)
    assert "secret" not in asked.err
    assert call(SCENARIOS["hello"], "-q", "hi").err == ""
    assert call(SCENARIOS["hello"], "config", "show").err == sentence


def test_a_variable_of_a_removed_setting_is_named_with_the_reason(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCALCHAT_HEAD_INT8", "1")
    assert "LOCALCHAT_HEAD_INT8 was removed, because" in call(SCENARIOS["hello"], "hi").err


def test_variables_of_other_programs_and_of_servers_are_not_named(
    call: Call, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text(
        '[remotes.box]\nurl = "http://127.0.0.1:1"\nkey_env = "LOCALCHAT_BOX_KEY"\n'
        '[mcp.hub]\ncommand = "hub"\nenv = ["LOCALCHAT_HUB"]\n'
    )
    for name in ("BOX_KEY", "HUB", "PORT", "PORT_8114_TCP_ADDR", "SERVICE_PORT_HTTP"):
        monkeypatch.setenv(f"LOCALCHAT_{name}", "1")
    monkeypatch.setenv("LOCALCHAT_UNSET", "")
    assert call(SCENARIOS["hello"], "hi").err == ""


def test_every_variable_that_the_repository_reads_is_known() -> None:
    root = Path(__file__).parents[3]
    files = [path for folder in READING for path in (root / folder).rglob("*.py")]
    names = {name for path in files for name in QUOTED.findall(path.read_text("utf-8"))}
    assert "LOCALCHAT_API_KEY" in names
    assert list(unread_variables(dict.fromkeys(names, "1"))) == []


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[defaults]\ntemprature = 1\n", ("temprature", "did you mean temperature?")),
        ("[defaults]\ntemperature = 'hot'\n", ("temperature", "'hot'", "from 0 to 10")),
        ("[defaults]\ntop_p = 1.5\n", ("top_p", "1.5", "from 0 to 1")),
        ("[defaults]\nkv_cache_type = 'q9'\n", ("kv_cache_type", "f16, q8_0 or q4_0")),
        ("[defaults]\nspeculation = 'perhaps'\n", ("speculation", "true or false")),
        ("[models.'a b']\nseed = 1.5\n", ('[models."a b"]', "seed", "whole number")),
        ("[models.x]\nmodel = 'y'\n", ("cannot name a model",)),
        ("defaults = 3\n", ("not a section",)),
        ("[defaults\n", ("not TOML", "line 1")),
    ],
)
def test_errors_name_the_file_the_key_and_what_is_valid(
    call: Call, file: Path, text: str, told: tuple[str, ...]
) -> None:
    file.write_text(text)
    code, out, err = call(SCENARIOS["hello"], "hi")
    assert (code, out) == (2, "")
    assert str(file) in err
    assert all(word in err for word in told)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "[default]\nseed = 1\n",
            "no section 'default', so it has no effect; did you mean [defaults]?",
        ),
        (
            "temperature = 1\n",
            "no section 'temperature', so it has no effect; settings belong under",
        ),
        ("[voice]\nname = 'x'\n[defaults]\nseed = 1\n", "no section 'voice', so it has no effect;"),
    ],
)
def test_an_unknown_section_is_reported_and_stops_no_command(
    call: Call, file: Path, text: str, told: str
) -> None:
    file.write_text(text)
    code, _, err = call(SCENARIOS["hello"], "hi")
    assert code == 0
    assert str(file) in err
    assert told in err
    assert call(SCENARIOS["hello"], "config", "set", "seed", "2", named=False).code == 0
    assert read_settings(file).defaults["seed"] == 2


def test_values_from_flag_and_environment_are_refused_in_the_same_words(call: Call) -> None:
    with pytest.raises(
        UsageError, match="LOCALCHAT_SEED: seed must be a whole number from 0, not 'x'"
    ):
        resolve(from_environment({"LOCALCHAT_SEED": "x"}))
    assert (
        "--seed must be a whole number from 0, not 'x'"
        in call(SCENARIOS["hello"], "--seed", "x", "q").err
    )
    assert "did you mean top_k" in call(SCENARIOS["hello"], "-o", "topk", "1", "q").err


def test_config_shows_sets_and_unsets(
    call: Call, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = SCENARIOS["hello"]
    assert call(nothing, "config", "path", named=False).out == f"{file}\n"
    assert call(nothing, "config", "set", "context-length", "4096", named=False).code == 0
    assert call(nothing, "config", "set", "ctx", "4096", named=False).code == 0
    color = call(nothing, "config", "set", "no-color", "true", named=False)
    assert color.code == 2, "the word of a flag that turns something off would mean the opposite"
    assert call(nothing, "config", "set", "seed", "x", named=False).code == 2
    monkeypatch.setenv("LOCALCHAT_SEED", "5")
    shown = call(nothing, "config", "show", "--origin", named=False).out
    assert f"{'context_length':<21} = 4096  ({file} [defaults])" in shown
    assert f"{'seed':<21} = 5  (LOCALCHAT_SEED)" in shown
    assert call(nothing, "config", "get", "ctx", named=False).out == "4096\n"
    assert call(nothing, "config", "get", "theme", named=False).out == "auto\n"
    assert "did you mean" in call(nothing, "config", "get", "thme", named=False).err.lower()
    assert '"origin":"default"' in call(nothing, "config", "show", "--origin", "--json").out
    assert call(nothing, "config", "unset", "context-length", named=False).code == 0
    written = file.read_text()
    again = call(nothing, "config", "unset", "ctx", "--for", "guide", named=False)
    assert again.err.endswith("has no ctx for guide; nothing changed\n")
    assert file.read_text() == written
    assert (
        f"{'context_length':<21} = (the largest that fits)"
        in call(nothing, "config", "show", named=False).out
    )
    call(nothing, "config", "set", "temperature", "0.9", named=False)
    assert call(nothing, "config", "get", "temperature", named=False).out == "0.9\n"
    call(nothing, "config", "temperature", "0.8", named=False)
    assert call(nothing, "config", "temperature", named=False).out == "0.8\n"
    listed = call(nothing, "config", "keys", named=False).out
    assert all(variable(key) in listed for key in PARAMETERS)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("model", "nope"), "no model 'nope'"),
        (("draft", "nope"), "no model 'nope' (the draft model)"),
        (("lora", "nope"), "there is no file or folder nope"),
        (("backend", "nope"), "no backend is called 'nope'"),
        (("tools", "nope"), "there are no tools 'nope'"),
        (("root", "/nope"), "--root /nope cannot be used"),
        (("seed", "1", "--for", "nope"), "no model 'nope'"),
        (("model", "guide"), ""),
        (("tools", "read"), ""),
        (("seed", "1", "--for", "guide"), ""),
    ],
)
def test_config_set_reports_a_name_that_leads_nowhere_and_writes_it(
    call: Call, file: Path, arguments: tuple[str, ...], told: str
) -> None:
    code, _, err = call(SCENARIOS["hello"], "config", "set", *arguments, named=False)
    assert code == 0
    assert err.startswith(f"localchat: wrote {file}\n")
    assert f"{arguments[0]} = " in file.read_text()
    assert ("this does not work yet" in err) is bool(told)
    assert told in err


def test_config_set_refuses_a_value_after_which_no_command_would_start(
    call: Call, file: Path
) -> None:
    nothing = SCENARIOS["hello"]
    assert call(nothing, "config", "set", "seed", "1", named=False).code == 0
    before = file.read_bytes()
    for key in ("model", "root"):
        name = os.fsdecode(b"m\xff")
        code, _, err = call(nothing, "config", "set", key, name, named=False)
        assert (code, "the settings file is UTF-8" in err) == (2, True)
    assert file.read_bytes() == before


def test_config_claims_no_sampling_for_a_model_that_it_does_not_know(call: Call) -> None:
    nothing = SCENARIOS["hello"]
    unknown = "(the model maker's value, or 0.95)"
    shown = call(nothing, "config", "show", "--origin", named=False).out
    assert f"{'top_p':<21} = {unknown}  (default)" in shown
    assert call(nothing, "config", "get", "top_p", named=False).out == f"{unknown}\n"
    for name, value in (("guide", "0.95"), ("nowhere", unknown)):
        known = call(nothing, "config", "get", "top_p", "--for", name, named=False).out
        assert known == f"{value}\n"


def test_config_counts_the_settings_of_the_model_behind_an_alias(call: Call) -> None:
    nothing = SCENARIOS["hello"]
    assert call(nothing, "import", "guide", "mine", named=False).code == 0
    call(nothing, "config", "set", "temperature", "0.3", "--for", "guide", named=False)
    for name, value in (
        ("guide", "0.3\n"),
        ("mine", "0.3\n"),
        ("other", "(the model maker's value, or 0.7)\n"),
    ):
        shown = call(nothing, "config", "get", "temperature", "--for", name, named=False).out
        assert shown == value
    call(nothing, "config", "set", "temperature", "0.4", "--for", "mine", named=False)
    shown = call(nothing, "config", "get", "temperature", "--for", "mine", named=False).out
    assert shown == "0.4\n"


def test_a_changed_file_is_read_again_and_one_with_an_error_is_reported_once(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    reads: list[Path] = []

    def reading(path: Path) -> SettingsFile:
        reads.append(path)
        return read_settings(path)

    monkeypatch.setattr("localchat.cli.resolve.read_settings", reading)
    inputs = Inputs(AppContext(environ={"LOCALCHAT_CONFIG": str(file)}), {})

    def context() -> int | None:
        inputs.reread(told.append)
        return inputs.settings(["tiny"]).settings.context_length

    assert context() is None
    write_text(file, '[models."tiny"]\ncontext_length = 512\n')
    assert (context(), context()) == (512, 512)
    assert len(reads) == 2
    write_text(file, '[models."tiny"]\ncontext_length = "long"\n')
    assert (context(), context()) == (512, 512)
    assert len(told) == 1 and str(file) in told[0] and "context_length" in told[0]
    write_text(file, "")
    assert context() is None


def test_a_keep_alive_that_was_set_holds_for_models_of_editors_too(
    call: Call, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs: list[ServerSpec] = []

    def build(spec: ServerSpec) -> None:
        specs.append(spec)
        raise UsageError("far enough")

    monkeypatch.setattr("localchat.server.bootstrap.open_server_context", build)

    def keeps(*flags: str) -> tuple[float, float]:
        assert "far enough" in call(SCENARIOS["hello"], "serve", "--port", "0", *flags).err
        return specs[-1].keep_alive_s, specs[-1].editor_keep_alive_s

    assert keeps() == (300, 2 * 3600)
    assert keeps("--keep-alive", "300") == (300, 0)
    file.write_text("[defaults]\nkeep_alive = 60\n")
    assert keeps() == (60, 0)
