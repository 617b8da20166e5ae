"""The form of an answer: --schema, --grammar and --regex."""

import json
from pathlib import Path

import pytest

from localchat.engine.events import Finished, Text
from localchat.engine.repetition import Repetition
from localchat.engine.request import Grammar
from tests.support.cli_program import BEGIN, DONE, SCENARIOS, ScriptedApp
from tests.support.terminal_screen import Call

SCHEMA = '{"type": "integer"}'


def asked(call: Call, *args: str | Path) -> Grammar | None:
    app = ScriptedApp(SCENARIOS["hello"])
    assert call(app, *args, "hi").code == 0
    return app.engines[0].requests[0].grammar


def test_a_schema_is_a_file_or_the_json_itself(call: Call, tmp_path: Path) -> None:
    file = tmp_path / "answer.json"
    file.write_text(SCHEMA)
    assert asked(call, "--schema", file) == Grammar("json_schema", SCHEMA)
    assert asked(call, "--schema", SCHEMA) == Grammar("json_schema", SCHEMA)


def test_a_grammar_is_a_file_or_the_rules_and_a_pattern_is_the_argument(
    call: Call, tmp_path: Path
) -> None:
    file = tmp_path / "answer.lark"
    file.write_text('start: "a"')
    assert asked(call, "--grammar", file) == Grammar("lark", 'start: "a"')
    for text in ('start: "a"', 'root ::= "a" | b\nb ::= "b"'):
        assert asked(call, "--grammar", text) == Grammar("lark", text)
    assert asked(call, "--regex", "a|b") == Grammar("regex", "a|b")
    assert asked(call) is None


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (("--schema", "nowhere.json", "hi"), 3, "--schema: there is no file nowhere.json"),
        (("--grammar", "no:where", "hi"), 3, "or a grammar that begins with start: or root ::="),
        (("--schema", ".", "hi"), 2, "cannot be read"),
        (("--schema", "{}", "--regex", "a", "hi"), 2, "--schema and --regex cannot be combined"),
        (("--regex", "a", "-i", "hi"), 2, "for one answer"),
        (("--regex", "a"), 2, "nothing to ask"),
    ],
)
def test_nonsense_is_refused(call: Call, args: tuple[str, ...], code: int, said: str) -> None:
    outcome = call(SCENARIOS["hello"], *args)
    assert (outcome.code, outcome.out) == (code, "")
    assert said in outcome.err


def test_a_value_that_was_cut_leaves_stdout_empty_and_is_an_error(call: Call) -> None:
    script = (*BEGIN, Text(0, '{"a": '), Finished(0, "length", limit="max_tokens"), DONE)
    for flags in (("--schema", "{}"), ("--regex", "a+"), ("-x",)):
        outcome = call(script, *flags, "hi")
        assert (outcome.code, outcome.out) == (1, "")
        assert '{"a":' in outcome.err
        trouble = "code block did not begin" if flags == ("-x",) else "not complete"
        assert f"{trouble} after" in outcome.err
        assert "--max-tokens" in outcome.err
    assert call(script, "hi").code == 0


def test_a_report_of_a_value_that_was_cut_says_so_once(call: Call) -> None:
    script = (*BEGIN, Text(0, '{"a": 1}'), Finished(0, "length", limit="max_tokens"), DONE)
    outcome = call(script, "--schema", "{}", "--json", "hi")
    assert outcome.code == 1
    assert json.loads(outcome.out)["finish_reason"] == "length"
    assert outcome.err.count("localchat:") == 1


@pytest.mark.parametrize(
    ("end", "sentence"),
    [
        (Finished(0, "length", limit="max_tokens"), "The answer was cut at"),
        (Finished(0, "length", limit="default"), "the default limit"),
        (Finished(0, "length", limit="context"), "tokens is full"),
        (
            Finished(0, "repetition", repetition=Repetition("on and on. ", 9, 99, 11)),
            'repeated "on and on." 9 times',
        ),
    ],
)
def test_an_answer_that_ended_early_says_so_once(call: Call, end: Finished, sentence: str) -> None:
    script = (*BEGIN, Text(0, "on and on. " * 9), end, DONE)
    outcome = call(script, "hi")
    assert outcome.code == 0
    assert outcome.err.count(sentence) == 1
    told = json.loads(call(script, "--json", "hi").out)
    assert (told["finish_reason"], told["limit"]) == (end.reason, end.limit or None)
    assert call(script, "--require-complete", "hi").code == 7
