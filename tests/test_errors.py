"""Messages for foreign errors."""

from pathlib import Path

import pytest

from localchat.config.settings_file import write_setting
from localchat.errors import LocalchatError, reason


def test_an_error_of_the_system_is_told_without_its_number_and_path(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="Errno") as caught:
        (tmp_path / "none" / "file").read_text()
    assert reason(caught.value) == "No such file or directory"
    assert reason(ValueError("a comma is missing")) == "a comma is missing"


def test_a_sentence_names_the_file_once(tmp_path: Path) -> None:
    (tmp_path / "folder").write_text("a file where a folder should be")
    path = tmp_path / "folder" / "config.toml"
    with pytest.raises(LocalchatError) as caught:
        write_setting(path, "threads", "2")
    said = str(caught.value)
    assert said.count(str(tmp_path)) == 1
    assert "Errno" not in said
