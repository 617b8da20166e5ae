"""Where the text of a gap ends, because its editor has no use for more."""

import pytest

from localchat.server.llamacpp.early_stop import LineStop


def sent(stop: LineStop, *pieces: str) -> str:
    """Text that a client receives of these pieces."""
    shown = ""
    for piece in pieces:
        text, ended = stop.push(piece)
        shown += text
        if ended:
            return shown + "|"
    return shown + stop.flush()


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        (["x = 1\n    y = 2\n", "}"], "x = 1\n    y = 2|"),
        (["x\n  ", "  y\n    z"], "x\n    y\n    z"),
        (["x\n", "\n\n    y"], "x\n\n\n    y"),
        (["x\n   \n", "    y\n  z"], "x\n   \n    y|"),
        (["\n}"], "|"),
        (["x\r\n    y\r\n}"], "x\r\n    y\r|"),
        (["x\n   "], "x\n   "),
        (["x"], "x"),
        (["a", "\n", "\t\t\t\tb", "\n", "\tc"], "a\n\t\t\t\tb|"),
    ],
)
def test_lines_that_leave_the_block_end_the_text(pieces: list[str], expected: str) -> None:
    assert sent(LineStop(4, None), *pieces) == expected
    assert sent(LineStop(4, None), *"".join(pieces)) == expected


def test_every_line_passes_without_an_indentation() -> None:
    assert sent(LineStop(0, None), "x\n", "}\n") == "x\n}\n"


def test_the_time_ends_the_text_with_its_line() -> None:
    times = iter([0.0, 0.5, 0.9, 1.2])
    stop = LineStop(0, 1.0, lambda: next(times))
    assert sent(stop, "a", "b\n", "c\n", "d", "e\nf") == "ab\nc\nde\n|"


def test_a_text_of_one_line_is_not_ended_by_the_time() -> None:
    times = iter([0.0])
    assert sent(LineStop(0, 1.0, lambda: next(times)), "a", "b", "c") == "abc"
