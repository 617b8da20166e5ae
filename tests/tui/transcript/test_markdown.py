"""Markdown as rows: nothing of a text vanishes, no row is too wide, a stream ends as the whole."""

import random
import re
import unicodedata
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from localchat.sanitize import sanitize
from localchat.tui.transcript.markdown import IncrementalMarkdown, Piece, Row, code, layout
from localchat.tui.transcript.markdown.wrap import line_breaks

DOCUMENT = """# Title
Some *emphasis*, **strong**, `code`, ~~gone~~, [words](https://x.org/a), https://e.com/f(o)).
second line

- one
- two is long enough that it has to be wrapped somewhere
  1. deep
  2. deeper
     - deepest
- [x] done
- [ ] open

1. first

2. loose

> quoted *text*
> more
>
> ```py
> def f(x): return "a"
> ```

| a | b |
|---|--:|
| 1 | a long cell that has to be wrapped in a narrow column |
| **x** | `2` |

```python
def f(x: int) -> str:
    \"\"\"doc
    more\"\"\"
\treturn f"{x}"  # why
```

    indented code

---
日本語のテキストは幅が二倍です。👩‍🚀 é שלום <b>html</b> &amp; ![alt](rel.png) [x](javascript:1) [y](rel)

[ref]: https://example.com/definition
"""

_WORDS = st.sampled_from(
    [
        *(
            "word ",
            "a ",
            "\n",
            "\n\n",
            "- ",
            "1. ",
            "> ",
            "# ",
            "```\n",
            "~~~py\n",
            "`",
            "*",
            "**",
            "_",
            "~~",
        ),
        *(
            "| a | b |\n|---|---|\n| c | d |\n",
            "[l](https://x.org)",
            "[l](x)",
            "![i](u)",
            "<b>",
            "&amp;",
        ),
        *(
            "    ",
            "\t",
            "日本",
            "👩‍🚀",
            "e\u0301",
            "שלום",
            "\x1b[2J",
            "\u202e",
            "\r\n",
            "x" * 90,
            "[x] ",
            "---\n",
        ),
        *("\\", "&#27;", "&#x202e;", "[r]: https://r.org\n", "\u2028", "\u200b"),
    ]
)
TEXTS = st.lists(_WORDS, max_size=40).map("".join)


def letters(text: str) -> str:
    """Visible letters and digits, in order."""
    return "".join(c for c in text if unicodedata.category(c)[0] in "LN")


def shown(rows: list[Row]) -> str:
    return "\n".join(row.text for row in rows)


@pytest.mark.parametrize("width", [4, 10, 24, 76, 104])
def test_no_row_is_wider_than_asked_and_no_word_vanishes(width: int) -> None:
    rows = layout(sanitize(DOCUMENT), width)
    assert max(cell_len(row.text) for row in rows) <= width
    for word in re.findall(r"[a-z]{4,}", DOCUMENT):
        if word not in ("https", "javascript", "python"):
            assert word in shown(rows).replace("\n", "") or width < 76


@settings(max_examples=150, deadline=None)
@given(TEXTS, st.sampled_from([6, 20, 80]))
def test_any_text_keeps_its_width(text: str, width: int) -> None:
    for row in layout(sanitize(text), width):
        assert cell_len(row.text) <= width
        assert row.text == sanitize(row.text)
        assert "\n" not in row.text and "\t" not in row.text


@settings(max_examples=150, deadline=None)
@given(st.text(st.sampled_from("ab c-日👩\u200d🚀é\u0301\u200b"), max_size=60), st.integers(2, 20))
def test_wrapping_drops_nothing(text: str, width: int) -> None:
    parts = list(line_breaks(text, width))
    assert (
        "".join(text[cut.start : cut.end] + (cut.joint or "") for cut in parts).rstrip()
        == text.rstrip()
    )
    assert all(cell_len(text[cut.start : cut.end].rstrip()) <= width for cut in parts)
    assert [cut.joint for cut in parts].count(None) == 1


@settings(max_examples=100, deadline=None)
@given(TEXTS, st.randoms(use_true_random=False))
def test_a_stream_in_any_pieces_ends_as_the_whole(text: str, chance: random.Random) -> None:
    growing = IncrementalMarkdown(30)
    at = 0
    while at < len(text):
        size = chance.randint(1, 9)
        growing.append(text[at : at + size])
        growing.rows()
        at += size
    whole = IncrementalMarkdown(30, text)
    assert growing.source == whole.source


@pytest.mark.parametrize("seed", range(5))
def test_before_its_end_a_stream_shows_what_the_whole_would(seed: int) -> None:
    chance, growing, at = random.Random(seed), IncrementalMarkdown(60), 0
    while at < len(DOCUMENT):
        size = chance.randint(1, 30)
        growing.append(DOCUMENT[at : at + size])
        assert growing.frozen <= len(growing.rows())
        at += size
    assert shown(growing.rows()) == shown(layout(growing.source, 60))


@pytest.mark.parametrize("mark", ["- ", "> ", "1. "])
def test_what_is_nested_200_deep_is_shown(mark: str) -> None:
    text = "\n".join(
        "  " * depth * (mark != "> ") + mark * (depth if mark == "> " else 1) + f"word{depth}"
        for depth in range(1, 200)
    )
    rows = shown(layout(text, 80))
    assert all(f"word{depth}" in rows.replace("\n", "") for depth in range(1, 200))


def test_a_long_table_and_a_long_line_are_shown_as_written() -> None:
    table = "| a | b |\n|---|---|\n" + "".join(f"| c{i} | d{i} |\n" for i in range(1000))
    rows = layout(table, 80)
    assert "| c999 | d999 |" in [row.text for row in rows]
    line = "".join(f"{i}," for i in range(30_000))
    assert shown(layout(line, 80)).replace("\n", "") == line


def test_a_table_narrower_than_its_columns_is_stacked() -> None:
    table = (
        "|"
        + "".join(f" h{i} |" for i in range(12))
        + "\n|"
        + "---|" * 12
        + "\n|"
        + "".join(f" c{i} |" for i in range(12))
    )
    rows = layout(table, 20)
    assert letters(shown(rows)) == "".join(f"h{i}c{i}" for i in range(12))


def test_only_web_links_become_links() -> None:
    rows = layout(
        "[a](https://x.org/p?q=1) [b](javascript:alert) [c](file:///etc) <mailto:a@b.c> https://y.org.",
        200,
    )
    links = {piece.text: piece.look.link for row in rows for piece in row.pieces if piece.look.link}
    assert links == {"a": "https://x.org/p?q=1", "https://y.org": "https://y.org"}
    assert "javascript:alert" in rows[0].text and "file:///etc" in rows[0].text


def test_an_escape_by_entity_or_by_link_is_inert() -> None:
    rows = layout("&#27;]0;x&#7; &#x9b;2J &#x202e; [a](https://x.org/&#27;]8) &#13;", 80)
    for row in rows:
        assert row.text == sanitize(row.text)
        assert all(
            piece.look.link.isprintable() and piece.look.link.isascii() for piece in row.pieces
        )


def test_code_keeps_its_lines_and_is_coloured_whole_once_closed() -> None:
    growing = IncrementalMarkdown(60, '```python\nx = """a\nb')
    before = growing.rows()
    growing.append('"""\n```\n')
    after = growing.rows()
    assert [row.text for row in after[1:]] == ['  x = """a', '  b"""']
    assert after[0].text.split() == ["python", "·", "1", "copy"]
    assert len(after[0].text) == 59
    assert all(row.ground == "code" for row in (*before, *after))
    assert {piece.look.tint for piece in after[2].pieces[1:]} == {"code.string"}


def tints(line: Sequence[Piece]) -> set[str]:
    return {piece.look.tint for piece in line}


def test_code_of_any_length_has_its_colours_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code, "_FIRST_SLICE_S", -1.0)
    text = "\n".join(f"value_{n} = 'text {n}'  # comment" for n in range(1500))
    unfinished: list[code.Highlighting] = []
    first = layout(f"```python\n{text}\n```", 100, unfinished)
    (highlighting,) = unfinished
    assert tints(first[-1].pieces[1:]) == {"code.text"}, "what no slice has reached is plain"
    assert shown(first).count("comment") == 1500
    while not highlighting.is_complete:
        highlighting.advance(0.005)
    unfinished.clear()
    last = layout(f"```python\n{text}\n```", 100, unfinished)
    assert not unfinished
    assert shown(last) == shown(first)
    assert {"code.string", "code.comment"} <= tints(last[-1].pieces)


def test_the_last_line_of_code_is_coloured_without_its_line_end() -> None:
    assert tints(code.highlight("ls # a", "sh")[0]) >= {"code.comment"}
    assert tints(code.highlight_line("ls # a", "sh")) >= {"code.comment"}
    assert len(code.highlight("a\n", "sh")) == 2


def test_a_wrapped_line_of_code_is_marked() -> None:
    rows = layout(f"```\n{'word ' * 30}\nnext\n```", 40)
    marked = [row.text.startswith("↪ ") for row in rows]
    assert marked == [False, False, *[True] * (len(rows) - 3), False]
    assert all(row.text[: row.lead_length] in ("↪ ", "  ") for row in rows[1:]), "never copied"


def test_code_blocks_are_numbered_also_while_they_stream() -> None:
    text = "```sh\nls\n```\n\n- and\n  ```\n  cd\n  ```\n\nlast:\n\n```py\nx"
    growing = IncrementalMarkdown(60)
    for letter in text:
        growing.append(letter)
        growing.rows()
    for rows in (growing.rows(), layout(text, 60)):
        labels = [row for row in rows if " · " in row.text]
        names = [row.text.strip(" •").removesuffix("copy").rstrip() for row in labels]
        assert names == ["sh · 1", "code · 2", "py · 3"]
        assert [row.pieces[-1].look.code for row in labels] == [1, 2, 3]


def test_a_list_of_5000_items_is_formatted() -> None:
    rows = layout("\n".join(f"- **item {n}** and some words" for n in range(5000)), 80)
    assert [rows[0].text, rows[-1].text] == [
        "• item 0 and some words",
        "• item 4999 and some words",
    ]


def test_a_name_of_no_language_asks_no_other_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(group: str) -> list[object]:
        raise AssertionError(f"looked for {group}")

    monkeypatch.setattr("pygments.plugin.iter_entry_points", asked)
    for name, tints in (("no-such-language", {"code.text"}), ("Python", {"code.number"})):
        assert {piece.look.tint for piece in code.highlight("1", name)[0]} == tints


def test_single_line_ends_are_kept_but_in_prose_wrapped_by_hand() -> None:
    prose = "a line of prose that somebody wrapped by hand at the usual width of\nabout seventy characters"
    verse = "short lines\nstay as they are\n"
    ended = "this line is long enough to have been wrapped, but here a sentence ends.\nAnother one"
    assert [row.text for row in layout(prose, 200)] == [prose.replace("\n", " ")]
    assert [row.text for row in layout(verse, 200)] == verse.splitlines()
    assert [row.text for row in layout(ended, 200)] == ended.splitlines()
