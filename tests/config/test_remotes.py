"""Engines on other machines: what the settings say, what a word means, and where a prompt goes then."""

from pathlib import Path

import pytest

from localchat.config.remotes import Remote, find_remote, read_remotes
from localchat.config.settings_file import read_settings
from localchat.errors import UsageError

BOX = Remote("box", "http://10.0.0.5:8000", "big", key_env="BOX_KEY")


def test_the_settings_file_names_remotes(tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    path.write_text(
        '[remotes.box]\nurl = "http://10.0.0.5:8000"\nmodel = "big"\nkey_env = "BOX_KEY"\n'
    )
    assert read_settings(path).remotes == {"box": BOX}


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"box": {}}, "no url"),
        ({"box": {"url": "http://x", "key": "secret"}}, "'key'"),
        ({"box": {"url": 3}}, "text"),
        ({"box": "http://x"}, "text"),
        ("http://x", "section"),
    ],
)
def test_what_is_wrong_with_a_remote_is_named(section: object, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        read_remotes(Path("settings.toml"), section)


def test_a_word_means_a_name_or_an_address() -> None:
    known = {"box": BOX}
    assert find_remote("remote:box", known) == BOX
    assert find_remote("box#small", known).model == "small"
    assert find_remote("10.0.0.7:8000", known) == Remote("10.0.0.7:8000", "10.0.0.7:8000")
    assert find_remote("localhost", {}).url == "localhost"
    with pytest.raises(UsageError, match="no remote 'bix'") as caught:
        find_remote("bix", known)
    assert "box" in caught.value.hint
    with pytest.raises(UsageError, match="address"):
        find_remote("ftp://x", known)


def test_a_remote_is_found_again_by_its_word() -> None:
    named = find_remote("http://10.0.0.5:8000#m", {})
    assert find_remote(named.word, {}) == named


def test_the_key_comes_from_the_environment_or_a_file_when_it_is_needed(tmp_path: Path) -> None:
    assert BOX.key({"BOX_KEY": "k\n"}) == "k"
    with pytest.raises(UsageError, match="BOX_KEY"):
        BOX.key({})
    (tmp_path / "key").write_text("secret\n")
    assert Remote("b", "u", key_file=str(tmp_path / "key")).key({}) == "secret"
    with pytest.raises(UsageError, match="cannot be read"):
        Remote("b", "u", key_file=str(tmp_path / "none")).key({})
    assert Remote("b", "u").key({}) == ""


@pytest.mark.parametrize(
    ("url", "here"),
    [("localhost:1", True), ("http://127.0.0.1", True), ("http://[::1]:1", True), ("a.b", False)],
)
def test_this_machine_is_known(url: str, here: bool) -> None:
    assert Remote("x", url).here is here
