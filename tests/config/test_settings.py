"""Settings: one name everywhere, and errors that name file, key and valid values."""

import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from localchat.cli.chat.run import prompt_command as ask
from localchat.config.parameters import PARAMETERS
from localchat.config.paths import find_paths
from localchat.config.settings import (
    SAMPLING_KEYS,
    Given,
    Settings,
    convert,
    find_key,
    from_environment,
    resolve,
)
from localchat.config.settings_file import read_settings, write_setting
from localchat.engine.request import Sampling
from localchat.errors import LocalchatError, UsageError

SERVER_KEYS = ("keep_alive",)
"""Keys whose flags only `localchat serve` has."""


def test_every_key_has_type_words_and_flag() -> None:
    assert set(PARAMETERS) == set(Settings.__struct_fields__)
    assert set(SAMPLING_KEYS) == set(Sampling.__struct_fields__) - {"text_bias"}
    flags = {name for param in ask.params for name in (*param.opts, *param.secondary_opts)}
    for key, parameter in PARAMETERS.items():
        name, _, option = parameter.flag.partition(" ")
        assert name in flags or key in SERVER_KEYS, key
        assert option in ("", key)


def test_every_name_of_a_flag_finds_its_key() -> None:
    for key, parameter in PARAMETERS.items():
        for flag in (parameter.flag, *parameter.names.split()[:-1]):
            if flag.startswith("--") and not flag.startswith("--no-"):
                assert find_key(flag, "") == find_key(flag.removeprefix("--"), "") == key
    assert find_key("temp", "") == "temperature"


def test_every_flag_that_is_a_setting_is_named_as_its_key() -> None:
    own = {"words", "files", "interactive", "extract", "as_json", "raw_prompt", "option"}
    own |= {"schema", "grammar", "regex", "require_complete", "yes"}
    own |= {"continue_last", "conversation"}
    named = {param.name for param in ask.params} - own
    assert named | set(SAMPLING_KEYS) | set(SERVER_KEYS) == set(PARAMETERS)


def test_an_empty_variable_is_not_set() -> None:
    assert from_environment({"LOCALCHAT_SEED": "", "LOCALCHAT_DEBUG": "1"}) == {}


@given(
    st.sampled_from(list(PARAMETERS)),
    st.one_of(st.text(), st.integers(), st.floats(), st.booleans(), st.lists(st.text())),
)
def test_any_value_becomes_the_type_or_a_usage_error(key: str, value: object) -> None:
    refusal: UsageError | None = None
    try:
        msgspec.convert({key: convert(key, Given(value, "here"))}, Settings)
    except UsageError as refused:
        refusal = refused
    if refusal is not None:
        assert re.search(
            rf"{key} must be ({re.escape(PARAMETERS[key].valid)}|at most [\d,]+), not .",
            refusal.message,
        )


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("threads", "999999", "--x must be at most 1,024, not '999999'"),
        ("cache_ram_mib", "1" + "0" * 30, "--x must be at most 2,147,483,647, not '1000"),
        ("gpu_layers", "1" + "0" * 30, "--x must be at most 2,147,483,647, not '1000"),
        ("keep_alive", 10**12, "--x must be at most 2,147,483,647, not 1000"),
        ("n", "17", "--x must be a whole number from 1 to 16, not '17'"),
        ("stop", [""], "--x must be text that is not empty, 16 at most, not ''"),
        ("seed", [], "--x must be a whole number from 0, not []"),
    ],
)
def test_a_refused_value_is_told_the_bound_that_it_exceeds(
    key: str, value: object, said: str
) -> None:
    with pytest.raises(UsageError) as refused:
        convert(key, Given(value, "--x"))
    assert refused.value.message.startswith(said)


def test_settings_that_are_written_at_once_are_all_stored(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    models = [f"qwen{number}" for number in range(24)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda model: write_setting(file, "seed", "2", model), models))
    assert set(read_settings(file).models) == set(models)


def test_writing_keeps_comments_order_and_other_values(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(
        "# mine\n[defaults]\nseed = 1 # lucky\n\n# models\n[models.'a b']\nthreads = 2\n"
    )
    write_setting(file, "seed", "2")
    write_setting(file, "stop", '["END"]')
    write_setting(file, "logit_bias", '{"5": 1}', "qwen2.5:7b")
    write_setting(file, "threads", None, "a b")
    text = file.read_text()
    assert text.startswith("# mine\n[defaults]\nseed = 2 # lucky\n")
    assert "# models" in text
    read = read_settings(file)
    assert read.defaults == {"seed": 2, "stop": ["END"]}
    assert read.models["a b"] == {}
    assert resolve(read.layer(["qwen2.5:7b"])).settings.logit_bias == {5: 1.0}


def test_keys_of_earlier_releases_are_reported_and_have_no_effect(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(
        "[defaults]\ntechnical_metrics = true\nseed = 1\n"
        '[models."a"]\ntechnical_metrics = false\n'
        '[presets.sum]\ntemplate = "Sum up"\n'
        '[keys]\n"metrics.terms" = "f12"\n"chat.new" = "ctrl+k"\n'
        '[routes.easy]\nsmall = "a"\nlarge = "b"\n'
    )
    settings = read_settings(file)
    assert settings.defaults == {"seed": 1}
    assert settings.models == {"a": {}}
    assert settings.keys == {"chat.new": "ctrl+k"}
    removed = sorted(notice.split()[1] for notice in settings.notices)
    assert removed == ["metrics.terms", "presets", "routes", "technical_metrics"]
    assert "technical_metrics was removed, because" in " ".join(settings.notices)
    write_setting(file, "seed", "2")
    assert read_settings(file).defaults == {"seed": 2}
    with pytest.raises(UsageError, match="was removed"):
        write_setting(file, "technical_metrics", "true")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[mcp.files]\ncomand = 'npx'", "[mcp.files]: there is no 'comand'"),
        ("[mcp.files]\ncommand = 'npx'\ncommnad = 'npx'", "did you mean command?"),
        ("[mcp.files]\ncommand = 'npx'\ntimeout = 5", "did you mean timeout_s?"),
        ("[mcp.files]\ncommand = 'npx'\ntrust = true", "did you mean trusted?"),
        ("[mcp.files]\ncommand = 'npx'\nheaders = {}", "valid names: args, command, env"),
        ("[remotes.box]\nurl = 'http://x'\nkey_enf = 'K'", "did you mean key_env?"),
    ],
)
def test_a_misspelled_field_of_a_server_is_named_with_the_nearest(
    tmp_path: Path, text: str, told: str
) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(text)
    with pytest.raises(UsageError) as error:
        read_settings(file)
    assert told in str(error.value)


def test_a_file_with_errors_is_not_written_over(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("[defaults]\nnonsense = 1\n")
    with pytest.raises(UsageError):
        write_setting(file, "seed", "2")
    assert file.read_text() == "[defaults]\nnonsense = 1\n"


def test_a_file_in_another_encoding_is_told_as_that_and_a_mark_of_utf8_is_none(
    tmp_path: Path,
) -> None:
    file = tmp_path / "settings.toml"
    file.write_bytes("theme = 'light'\n".encode("utf-16"))
    with pytest.raises(UsageError, match=r"settings\.toml is not UTF-8 \(first at byte 0\)"):
        read_settings(file)
    file.write_bytes(b"\xef\xbb\xbf[defaults]\ntheme = 'light'\n")
    write_setting(file, "seed", "7")
    assert read_settings(file).defaults == {"theme": "light", "seed": 7}


def test_an_endless_or_huge_settings_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is a pipe or a device"):
        read_settings(Path("/dev/zero"))
    file = tmp_path / "settings.toml"
    file.write_bytes(b"#" * 1_000_001)
    with pytest.raises(UsageError, match=r"it is larger than 1\.0 MB"):
        read_settings(file)


def test_a_folder_that_cannot_be_written_is_an_error_in_words(tmp_path: Path) -> None:
    (tmp_path / "occupied").write_text("")
    with pytest.raises(LocalchatError, match="cannot be"):
        write_setting(tmp_path / "occupied" / "settings.toml", "seed", "2")


def test_paths_follow_the_platform_and_the_variables(tmp_path: Path) -> None:
    usual = find_paths(os.environ)
    assert len({usual.data_dir, usual.state_dir, usual.cache_dir, usual.settings_file.parent}) == 4
    moved = find_paths({"LOCALCHAT_DATA_DIR": str(tmp_path), "LOCALCHAT_MODELS": "~/models"})
    assert moved.state_dir.is_relative_to(tmp_path)
    assert moved.models_dir == Path.home() / "models"
    assert find_paths({"LOCALCHAT_CONFIG": "a.toml"}).settings_file == Path.cwd() / "a.toml"


def test_one_of_several_words_may_be_written_in_any_letters() -> None:
    given = {
        "kv_cache_type": Given("Q8_0", "--kv-type"),
        "gpu_layers": Given("ALL", "--gpu-layers"),
    }
    found = resolve(given).settings
    assert (found.kv_cache_type, found.gpu_layers) == ("q8_0", "all")
    assert resolve({"gpu_layers": Given("12", "--gpu-layers")}).settings.gpu_layers == 12
    with pytest.raises(UsageError, match="--kv-type must be f16"):
        resolve({"kv_cache_type": Given("Q9", "--kv-type")})


@pytest.mark.parametrize(
    ("text", "tokens"), [("4k", 4096), ("128K", 131072), ("1.5k", 1536), ("4096", 4096)]
)
@pytest.mark.parametrize("key", ["context_length", "max_tokens", "think_budget"])
def test_tokens_may_be_written_in_thousands(key: str, text: str, tokens: int) -> None:
    assert convert(key, Given(text, "--ctx")) == tokens


@pytest.mark.parametrize("text", ["k", "4kk", "k4", "0k", "-4k", "4m", "1.2.3k", "nank", "\u00b2k"])
def test_other_units_of_tokens_are_refused_as_they_were_written(text: str) -> None:
    with pytest.raises(UsageError, match="thousands as 4k") as refused:
        convert("context_length", Given(text, "--ctx"))
    assert repr(text) in refused.value.message


def test_a_remote_that_is_not_there_is_not_written(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    with pytest.raises(UsageError, match="no remote 'box'"):
        write_setting(file, "remote", "box")
    file.write_text('[remotes.box]\nurl = "http://127.0.0.1:1"\n')
    write_setting(file, "remote", "box")
    assert read_settings(file).defaults == {"remote": "box"}
    write_setting(file, "remote", "http://127.0.0.1:8000")
    write_setting(file, "remote", None)


def test_a_home_that_is_a_file_has_no_settings(tmp_path: Path) -> None:
    (tmp_path / "home").touch()
    assert not read_settings(tmp_path / "home" / "settings.toml").defaults
