"""Tables and sentences of commands at the width of a terminal."""

import json

from localchat.cli.output import json_line, report_width, table

HEAD = ("MODEL", "SIZE", "KV", "PERPLEXITY")
ROWS = [("a.gguf", "15 MB", "f16", "4.92 ±0.1"), ("b.gguf", "9 MB", "q8_0", "5.07 ±0.1")]


def test_a_table_that_fits_stays_in_one_piece() -> None:
    assert table(HEAD, ROWS, width=80) == table(HEAD, ROWS)


def test_a_wide_table_goes_on_below_with_its_first_column() -> None:
    lines = table(HEAD, ROWS, right=(1, 2, 3), width=24)
    assert lines == [
        *("MODEL    SIZE    KV", "a.gguf  15 MB   f16", "b.gguf   9 MB  q8_0"),
        *("MODEL   PERPLEXITY", "a.gguf   4.92 ±0.1", "b.gguf   5.07 ±0.1"),
    ]


def test_a_column_wider_than_the_terminal_still_shows() -> None:
    assert table(("A", "B"), [("x" * 9, "y" * 9)], width=8)[1] == f"{'x' * 9}  {'y' * 9}"


def test_in_a_pipe_lines_have_any_length() -> None:
    assert report_width({}) is None


def test_json_of_a_file_name_that_is_not_utf8_is_read_back() -> None:
    name = b"m\xfe.gguf".decode(errors="surrogateescape")
    assert json.loads(json_line({"path": name, "text": "caf\u00e9"})) == {
        "path": name,
        "text": "caf\u00e9",
    }
    assert json_line({"text": "caf\u00e9"}) == '{"text":"caf\u00e9"}'
