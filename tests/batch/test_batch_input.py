"""Input lines of a batch: which requests they are, and which files are refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from localchat.batch.input_file import BatchInput, BatchLine, LineDefaults
from localchat.errors import UsageError


def parsed(tmp_path: Path, *lines: object, defaults: LineDefaults | None = None) -> list[BatchLine]:
    path = tmp_path / "in.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts) + "\n", "utf-8")
    source = BatchInput(path, defaults)
    return [source.parse(line) for line in source.lines()]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("one\ntwo\n".encode("utf-16"), "stdin is UTF-16, but a batch is UTF-8"),
        ("one\ntwo\n".encode("utf-16-be"), "stdin is not a text file: line 1 has null bytes"),
        (b"one\n\x7fELF\0\0\n", "stdin is not a text file: line 2 has null bytes"),
    ],
)
def test_a_file_that_is_not_text_is_refused_as_a_whole(
    tmp_path: Path, content: bytes, problem: str
) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=problem):
        BatchInput(path, name="stdin").hashes()


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_a_line_of_text_is_a_chat(tmp_path: Path) -> None:
    first, second = parsed(tmp_path, "Hello, [you]!", "", "  zwei  ")
    assert (first.custom_id, first.path) == ("line-1", "/v1/chat/completions")
    assert first.body == {"messages": [user("Hello, [you]!")]}
    assert (second.custom_id, second.body["messages"]) == ("line-3", [user("zwei")])


def test_an_object_with_a_prompt_has_fields_and_a_schema(tmp_path: Path) -> None:
    schema = {"type": "object"}
    (line,) = parsed(
        tmp_path,
        {"custom_id": "a", "prompt": "hi", "system": "be brief", "schema": schema, "top_p": 0.5},
    )
    assert line.custom_id == "a"
    assert line.body == {
        "messages": [{"role": "system", "content": "be brief"}, user("hi")],
        "top_p": 0.5,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": schema, "strict": True},
        },
    }


def test_openais_format_keeps_its_body(tmp_path: Path) -> None:
    body = {"model": "m", "prompt": "once", "stream": True, "max_tokens": 5}
    (line,) = parsed(
        tmp_path, {"custom_id": "q", "method": "POST", "url": "/v1/completions", "body": body}
    )
    assert (line.custom_id, line.path) == ("q", "/v1/completions")
    assert line.body == {"model": "m", "prompt": "once", "max_tokens": 5}


def test_what_a_line_says_goes_over_the_defaults(tmp_path: Path) -> None:
    defaults = LineDefaults("be kind", {"max_tokens": 7, "temperature": 0.0})
    plain, own, newer, brief, vectors, response = parsed(
        tmp_path,
        "hi",
        {"prompt": "hi", "max_tokens": 9, "system": "be short"},
        {"messages": [user("hi")], "max_completion_tokens": 3},
        {"messages": [user("hi")], "system": "be brief"},
        {"input": "some text"},
        {"url": "/v1/responses", "body": {"input": "hi", "stream": True}},
        defaults=defaults,
    )
    assert plain.body["messages"][0] == {"role": "system", "content": "be kind"}
    assert plain.body["max_tokens"] == 7
    assert own.body["max_tokens"] == 9
    assert own.body["messages"][0]["content"] == "be short"
    assert newer.body == {
        "messages": [user("hi")],
        "max_completion_tokens": 3,
        "temperature": 0.0,
    }
    assert brief.body["messages"] == [{"role": "system", "content": "be brief"}, user("hi")]
    assert (vectors.path, vectors.body) == ("/v1/embeddings", {"input": "some text"})
    assert response.path == "/v1/responses"
    assert response.body == {"input": "hi", "max_output_tokens": 7, "temperature": 0.0}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"prompt": ', "not valid JSON"),
        ({"n": 3}, 'no "prompt"'),
        ({"prompt": 3}, '"prompt" is not a string'),
        ({"messages": [user("hi")], "prompt": "hi"}, '"messages" and "prompt"'),
        ({"messages": [user("hi")], "files": ["chart.png"]}, '"messages" and "files"'),
        ({"url": "/v1/files", "body": {}}, "'/v1/files'"),
        ({"method": "GET", "url": "/v1/completions", "body": {}}, "'GET'"),
        ({"url": "/v1/completions", "body": []}, "not a JSON object"),
    ],
)
def test_a_line_that_is_no_request_says_why(tmp_path: Path, line: Any, words: str) -> None:
    (found,) = parsed(tmp_path, line)
    assert words in found.problem
    assert found.custom_id == "line-1"


def test_bytes_that_are_no_text_are_a_problem_of_their_line(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'\xef\xbb\xbfone\n\xff\xfe\n{"\xff\n')
    source = BatchInput(path)
    one, two, three = [source.parse(line) for line in source.lines()]
    assert one.body["messages"] == [user("one")]
    assert "UTF-8" in two.problem
    assert three.problem


def test_a_custom_id_that_stands_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(
        '{"custom_id":"a","prompt":"x"}\nplain\n{"prompt":"y"}\n{"custom_id":"a","prompt":"z"}\n'
    )
    with pytest.raises(UsageError, match=r"lines 1 and 4 .* 'a'"):
        BatchInput(path).hashes()


def test_hashes_are_those_of_the_lines_by_number(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text("one\n\none\ntwo")
    hashes = BatchInput(path).hashes()
    assert len(hashes) == 5
    assert hashes[0] == hashes[2] == 0
    assert hashes[1] == hashes[3] != hashes[4] != 0
