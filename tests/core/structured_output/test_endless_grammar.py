"""Grammars in Lark and GBNF: rules that no text ends are refused before anything is computed."""

import pytest

from localchat.core.structured_output.compiler import grammar_spec
from localchat.core.structured_output.endless_grammar import endless_rule
from localchat.engine.request import Grammar
from localchat.errors import UsageError


@pytest.mark.parametrize(
    ("grammar", "rule"),
    [
        ('start: "a" start', "start"),
        ('start: start "a"', "start"),
        ('start: x\nx: y "a"\ny: x "b"', "start"),
        ('start: "a"* start', "start"),
        ('start: ("a" | "b") start', "start"),
        ('start: (start "x")+', "start"),
        ('start: a{2,3}\na: "x" a', "a"),
        ('start: a~1..2\na: a b\nb: "x"', "a"),
        ('start: "y" | a\na: "x" a // | "c"', "a"),
        ('start[lazy]: "(" start ")"\n   | "[" start "]"', "start"),
        ('root ::= "a" root', "root"),
        ('root ::= item+\nitem ::= "- " [^\\n]+ "\\n" item', "item"),
    ],
)
def test_grammar_that_reaches_a_rule_without_end_is_refused_by_its_name(
    grammar: str, rule: str
) -> None:
    with pytest.raises(
        UsageError, match=f"'grammar' cannot be used: the rule '{rule}' refers"
    ) as info:
        grammar_spec(Grammar("lark", grammar, "grammar"))
    assert info.value.details["field"] == "grammar"


@pytest.mark.parametrize(
    "grammar",
    [
        'start: (""*)*',
        "start: start*",
        'start: "a" start | ""',
        'start: start start | "a"',
        'start: "a" start?',
        'start: "a" [start]',
        'start: "a" start{0,3}',
        'start: "a" start~0..2',
        'start: "a" (start ("b" | "c"))*',
        'start: "x"\nunused: "a" unused',
        'start: %json {"properties": {"start": {"a": "|"}}} "x"',
        'start: /start [(]/ "start" // start',
        "start: <[12]> TEXT\nTEXT: /a/\n%ignore /x/",
        "%import common.INT\nstart: @answer INT",
        '?start: item+\nitem.2: "a" | "(" item ")"',
        'start: word::0x0\nword::_: "a" word::_',
        "start: {",
        "no rule",
    ],
)
def test_grammar_with_a_text_that_ends_is_not_endless(grammar: str) -> None:
    assert not endless_rule(grammar)


def test_grammars_as_long_as_allowed_are_read_in_linear_time() -> None:
    chain = "".join(f'r{i}: r{i + 1} "x"\n' for i in range(9000))
    assert not endless_rule(f'start: r0\n{chain}r9000: "y"')
    assert endless_rule(f"start: r0\n{chain}r9000: r0") == "r0"
    for piece in ("\n", "<", '\\"', "/x<", " ", "(", "[", "{", "a[ "):
        assert not endless_rule('start: "' + piece * (250_000 // len(piece)))
        assert not endless_rule("start: " + piece * (250_000 // len(piece)))
