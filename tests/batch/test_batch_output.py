"""Output of a batch: what is read again from it, what is cut off, and what is refused."""

from array import array
from pathlib import Path

import pytest

from localchat.batch.output_file import (
    BatchAnswer,
    BatchOutput,
    BatchProblem,
    BatchResponse,
    answer_id,
)
from localchat.errors import UsageError

HASHES = array("Q", [0, 11, 22, 0, 44])


def answer(number: int, status: int = 200) -> BatchAnswer:
    name = answer_id(number, HASHES[number])
    return BatchAnswer(name, f"line-{number}", BatchResponse(status, "r", {"text": "x" * 50}))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """An output with an answer, an error of the server, and one without a response."""
    path = tmp_path / "out.jsonl"
    with BatchOutput(path) as output:
        output.append(answer(2))
        output.append(answer(4, 400))
        broken = BatchProblem("invalid_line", "no JSON")
        output.append(BatchAnswer(answer_id(1, 11), "line-1", error=broken))
    return path


def test_lines_are_found_again(path: Path) -> None:
    with BatchOutput(path) as output:
        assert output.answered(HASHES) == (bytearray([0, 1, 1, 0, 1]), 2)
    assert path.read_text().count("\n") == 3


@pytest.mark.parametrize("left", [1, 20, 80])
def test_a_torn_last_line_is_cut_off(path: Path, left: int) -> None:
    whole = path.read_bytes()
    with path.open("ab") as file:
        file.write(b'{"id":"batch_req_1_00000000000000'.ljust(left, b"x")[:left])
    with BatchOutput(path) as output:
        assert sum(output.answered(HASHES)[0]) == 3
    assert path.read_bytes() == whole


def test_a_torn_first_line_leaves_an_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(b'{"id":"batch_req_1_0000')
    with BatchOutput(path) as output:
        assert sum(output.answered(HASHES)[0]) == 0
        output.append(answer(1))
    with BatchOutput(path) as output:
        assert output.answered(HASHES)[0][1] == 1


def test_errors_are_taken_out_to_be_asked_again(path: Path) -> None:
    path.chmod(0o640)
    with BatchOutput(path) as output:
        assert output.answered(HASHES, retry_errors=True) == (bytearray([0, 0, 1, 0, 0]), 0)
        output.append(answer(1))
    with BatchOutput(path) as output:
        assert output.answered(HASHES) == (bytearray([0, 1, 1, 0, 0]), 0)
    assert path.stat().st_mode & 0o777 == 0o640
    assert [file.name for file in path.parent.iterdir()] == ["out.jsonl"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"some": "json"}\n', "its line 1 is not a batch answer"),
        ("a text without a line end", "its line 1 is not a batch answer"),
        ('{"id": "batch_req_2_0000000000000099"}\n', "answers line 2, which has changed"),
        (
            '{"id": "batch_req_9_0000000000000016"}\n',
            "answers line 9, which the input does not have",
        ),
        ('{"id": "batch_req_2_0000000000000016"}\n' * 2, "line 2 of the input again"),
    ],
)
@pytest.mark.parametrize("retry_errors", [False, True])
def test_the_output_of_something_else_is_refused_and_untouched(
    tmp_path: Path, content: str, words: str, retry_errors: bool
) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text(content)
    with BatchOutput(path) as output, pytest.raises(UsageError, match=words):
        output.answered(HASHES, retry_errors=retry_errors)
    assert path.read_text() == content


def test_two_at_once_are_refused(path: Path) -> None:
    with BatchOutput(path) as first:
        with pytest.raises(UsageError, match="another localchat batch"), BatchOutput(path):
            pass
        first.answered(HASHES, retry_errors=True)
        with pytest.raises(UsageError, match="another localchat batch"), BatchOutput(path):
            pass
