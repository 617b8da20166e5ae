"""Formulas are shown as Unicode, and what has no such form stays as it was written."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localchat.tui.transcript.markdown.latex import to_unicode
from localchat.tui.transcript.markdown.layout import layout


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (r"x^2\,dx", "x² dx"),
        (r"a_i", "aᵢ"),
        (r"x_{i+1}", "xᵢ₊₁"),
        (r"\frac{a+b}{2}", "(a+b)/2"),
        (r"\int_0^\infty e^{-x^2}\,dx = \frac{\sqrt{\pi}}{2}", "∫₀^∞ e^(-x²) dx = √π/2"),
        (r"\sum_{i=1}^{n} i", "∑ᵢ₌₁ⁿ i"),
        (r"\mathbb{R}^n", "ℝⁿ"),
        (r"\left( \frac{1}{n} \right)^{n}", "( 1/n )ⁿ"),
        (r"\sqrt[3]{x+1}", "∛(x+1)"),
        (r"90^\circ", "90°"),
        (r"\hat{y} = \text{softmax}(W x)", "ŷ = softmax(W x)"),
        (r"\sin\theta \Lambda \lambda", "sin θ Λ λ"),
        (r"\begin{pmatrix} a & b \\ c & d \end{pmatrix}", "(a b; c d)"),
        (r"\begin{aligned} a &= b \\ &= c \end{aligned}", "a = b\n= c"),
        (r"\foo{a}{b^2}", r"\foo{a}{b²}"),
        (r"50\%", "50%"),
    ],
)
def test_a_formula_as_unicode(source: str, text: str) -> None:
    assert to_unicode(source) == text


@given(st.text(st.sampled_from(r"\{}^_&$ ab1frac[]().~")))
def test_any_formula_is_read_to_its_end(source: str) -> None:
    shown = to_unicode(source)
    for letter in "ab1":
        if "\\" not in source:
            plain = shown.translate(str.maketrans("₁¹ᵃᵇₐ", "11aba"))
            assert plain.count(letter) == source.count(letter)


@pytest.mark.parametrize("piece", ["{", "\\frac", "^", "^\\hat", "\\foo{x}"])
def test_a_hostile_formula_is_read_too(piece: str) -> None:
    assert to_unicode(piece * 3000)


def lines(text: str) -> list[str]:
    return [row.text.rstrip() for row in layout(text, 80)]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (r"So \(a_i\) and $x^2\,dx$.", "So aᵢ and x² dx."),
        (r"**\(a_1 < b\)** and *more*", "a₁ < b and more"),
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
    assert lines(text) == ["Then", "", "  ∫₀¹ x dx = 1/2 - c", "", "holds."]
