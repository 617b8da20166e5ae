"""Messages for foreign errors."""

from pathlib import Path

import pytest

from localchat.config.settings_file import write_setting
from localchat.errors import LocalchatError, UsageError, connection_failure, from_wire, reason


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


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        (TimeoutError("timed out"), "there does not answer in time"),
        (OSError("[Errno 101] Network is unreachable"), "this computer seems to be offline"),
        (OSError("[Errno -3] Temporary failure in name resolution"), "this computer seems to be"),
        (OSError("[Errno -2] Name or service not known"), "no server of this name is known"),
        (OSError("[Errno 111] Connection refused"), "nothing listens there"),
        (
            OSError(
                "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: self-signed (_ssl.c:1006)"
            ),
            "there is not trusted: certificate verify failed: self-signed",
        ),
        (OSError("[SSL] record layer failure (_ssl.c:1006)"), "does not speak TLS: record layer"),
        (OSError("Server disconnected without sending a response."), "there closed the connection"),
        (OSError("[Errno 71] Protocol error"), "the connection to there failed: Protocol error"),
        (OSError(), "the connection to there failed: OSError"),
    ],
)
def test_a_failed_connection_is_told_in_plain_words(problem: OSError, words: str) -> None:
    found = connection_failure(problem, "there")
    assert words in found.message
    assert "Errno" not in found.message and "_ssl" not in found.message


def test_a_name_that_is_right_and_unknown_means_offline() -> None:
    problem = OSError("nodename nor servname provided, or not known")
    assert "offline" in connection_failure(problem, "there", known_host=True).message
    assert connection_failure(problem, "there").certain


def test_an_error_from_another_process_has_the_class_that_defines_its_code() -> None:
    class OwnArguments(UsageError):
        def __init__(self) -> None:
            super().__init__("never sent")

    error = from_wire("usage", "wrong", "try again", {})
    assert type(error) is UsageError
    assert (error.message, error.hint) == ("wrong", "try again")
    assert OwnArguments.code == "usage"
