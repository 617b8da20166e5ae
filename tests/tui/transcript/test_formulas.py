"""Formulas stay as they are written: their backslashes and signs are no Markdown."""

import pytest

from localchat.tui.transcript.markdown.layout import layout


def lines(text: str) -> list[str]:
    return [row.text.rstrip() for row in layout(text, 80)]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (r"So \(a_i\) and $x^2\,dx$.", r"So a_i and x^2\,dx."),
        (r"**\(a_1 < b\)** and *more*", "a_1 < b and more"),
        ("It costs $5 and $10.", "It costs $5 and $10."),
        ("Set $HOME and $PATH.", "Set $HOME and $PATH."),
        ("A fare of US$5-US$10.", "A fare of US$5-US$10."),
        (r"\[citation needed\] \(see below\)", "[citation needed] (see below)"),
        (r"Code `\(a\)` and `$x^2$` stays.", r"Code \(a\) and $x^2$ stays."),
    ],
)
def test_formulas_are_told_from_money_brackets_and_code(text: str, shown: str) -> None:
    assert lines(text) == [shown]


@pytest.mark.parametrize(("opening", "closing"), [("$$", "$$"), (r"\[", r"\]")])
def test_a_formula_over_several_lines_is_one(opening: str, closing: str) -> None:
    text = f"Then\n{opening}\n\\int_0^1 x\\,dx\n\n= \\frac{{1}}{{2}}\n- c\n{closing}\nholds."
    assert lines(text) == [
        "Then",
        "",
        r"  \int_0^1 x\,dx",
        r"  = \frac{1}{2}",
        "  - c",
        "",
        "holds.",
    ]
