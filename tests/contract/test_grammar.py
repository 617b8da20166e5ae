"""Answers that a grammar binds, whatever runs under the loop."""

import json
import re

import pytest

from localchat.engine.events import ToolCall
from localchat.engine.request import (
    GenerateRequest,
    Grammar,
    Message,
    Messages,
    Sampling,
    TextPrompt,
)
from localchat.errors import UsageError
from tests.support.answers import ask
from tests.support.contract_engines import Open

HOT = Sampling(temperature=1.0, top_p=1.0, min_p=0.0, seed=7)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["alpha", "beta", 3]},
        "list": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "kind", "list"],
    "additionalProperties": False,
}
JSON = Grammar("json_schema", json.dumps(SCHEMA))
TOOL = {
    "type": "function",
    "function": {
        "name": "paint",
        "parameters": {
            "type": "object",
            "properties": {"colour": {"enum": ["red", "blue"]}, "size": {"enum": [1, 2]}},
            "required": ["colour", "size"],
            "additionalProperties": False,
        },
    },
}


def bound(grammar: Grammar, **fields: object) -> GenerateRequest:
    chosen = {"sampling": HOT, "max_tokens": 300, **fields}
    return GenerateRequest(TextPrompt("abc " * 10), grammar=grammar, **chosen)  # type: ignore[arg-type]


def check(text: str) -> None:
    value = json.loads(text)
    assert list(value) == ["name", "kind", "list"]
    assert len(value["name"]) <= 12
    assert value["kind"] in ("alpha", "beta", 3)
    assert all(isinstance(one, bool) for one in value["list"])


def test_every_choice_has_the_form_and_ends_by_itself(start: Open) -> None:
    answer = ask(start(), bound(JSON, n=3))
    assert answer.reasons == ["stop"] * 3
    for text in answer.texts:
        check(text)


def test_drafts_and_logprobs_change_no_token_of_a_bound_text(start: Open) -> None:
    engine = start()
    drafted = ask(engine, bound(JSON, salt="a"))
    plain = ask(engine, bound(JSON, salt="b", speculation=False))
    told = ask(engine, bound(JSON, salt="c", logprobs=1))
    assert drafted.text == plain.text == told.text
    assert drafted.done.usage.completion_tokens == told.done.usage.completion_tokens
    assert b"".join(entry.text for entry in told.logprobs).decode() == told.text
    assert all(entry.logprob <= 0 for entry in told.logprobs)


def test_what_is_forced_takes_fewer_steps(start: Open) -> None:
    engine = start()
    fixed = Grammar("regex", "The answer to your question is: (yes|no), and nothing else\\.")
    before = engine.stats().steps
    answer = ask(engine, bound(fixed, speculation=False))
    assert re.fullmatch(fixed.source, answer.text)
    assert answer.done.usage.completion_tokens > 5
    taken = engine.stats().steps - before
    assert before == taken == 0 or taken < answer.done.usage.completion_tokens


def test_ignoring_the_end_does_not_break_the_form(start: Open) -> None:
    grammar = Grammar("regex", "(ab){1,40}")
    answer = ask(start(), bound(grammar, ignore_eos=True))
    assert answer.text == "ab" * 40


def test_a_bound_answer_can_be_cut_by_length_and_by_a_stop_string(start: Open) -> None:
    engine = start()
    grammar = Grammar("regex", "abcdef(gh|ij)klmn")
    assert ask(engine, bound(grammar, max_tokens=1)).reasons == ["length"]
    stopped = ask(engine, bound(grammar, stop=("ef",)))
    assert (stopped.text, stopped.stops) == ("abcd", ["ef"])


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        (Grammar("json_schema", '{"type": "strin"}'), "the JSON schema cannot be used.*strin"),
        (
            Grammar("json_schema", '{"type": '),
            "the JSON schema is not valid JSON.*line 1 column 10",
        ),
        (Grammar("json_schema", "[]"), "a schema must be an object"),
        (Grammar("json_schema", "false"), "allows no value"),
        (Grammar("json_schema", '{"a": ' * 70 + "{}" + "}" * 70), "nests deeper"),
        (Grammar("json_schema", '{"enum": ["' + "x" * 300_000 + '"]}'), "262,144 bytes"),
        (
            Grammar("json_schema", '{"$ref": "#"}'),
            "the JSON schema refers to itself without end, so no answer satisfies it",
        ),
        (
            Grammar("regex", "(a|b"),
            r"the regular expression cannot be used: unclosed group, at position 0$",
        ),
        (Grammar("lark", "start: foo"), 'the grammar cannot be used.*1.8.*"foo"'),
        (Grammar("lark", " "), "the grammar is empty"),
    ],
)
def test_a_grammar_that_cannot_be_used_is_refused_before_it_is_accepted(
    start: Open, grammar: Grammar, said: str
) -> None:
    with pytest.raises(UsageError, match=f"(?s){said}"):
        ask(start(), bound(grammar))


def test_a_grammar_that_grows_too_large_on_the_way_is_the_requests_fault(start: Open) -> None:
    # Each text has many derivations.
    rules = "".join(f'r{number}: r{number} r{number} | "a"\n' for number in range(1000))
    grammar = f"start: {' | '.join(f'r{number}' for number in range(1000))}\n{rules}"
    with pytest.raises(UsageError, match=r"failed at token.*items[^<]*$"):
        ask(start(), bound(Grammar("lark", grammar), ignore_eos=True))


@pytest.mark.parametrize("kind", ["lark", "json_schema"])
def test_a_long_chain_of_rules_does_not_end_the_engine(start: Open, kind: str) -> None:
    if kind == "lark":
        chain = "".join(f"r{number}: r{number + 1}\n" for number in range(9000))
        grammar = Grammar("lark", f'start: r0\n{chain}r9000: "b"')
        text = "b"
    else:
        definitions: dict[str, object] = {
            f"d{number}": {"allOf": [{"$ref": f"#/$defs/d{number + 1}"}]} for number in range(3000)
        }
        definitions["d3000"] = {"const": 3}
        grammar = Grammar("json_schema", json.dumps({"$ref": "#/$defs/d0", "$defs": definitions}))
        text = "3"
    assert ask(start(), bound(grammar)).text == text


def test_a_required_call_names_a_tool_and_keeps_to_its_schema(start: Open) -> None:
    prompt = Messages(
        (Message("user", "hello"),),
        tools=(TOOL,),
        tool_choice="required",
        parallel_tool_calls=False,
    )
    answer = ask(start(), GenerateRequest(prompt, sampling=HOT, max_tokens=200))
    calls = [event for event in answer.events if isinstance(event, ToolCall)]
    named = [call for call in calls if call.name]
    assert named
    assert answer.text == ""
    for call in named:
        said = "".join(one.arguments for one in calls if one.call == call.call)
        assert call.name == "paint"
        assert json.loads(said)["colour"] in ("red", "blue")
    assert answer.reasons == ["tool_calls"]


@pytest.mark.parametrize("choice", ["sing", "required"])
def test_a_choice_without_its_tool_is_refused(start: Open, choice: str) -> None:
    tools = (TOOL,) if choice == "sing" else ()
    prompt = Messages((Message("user", "hello"),), tools=tools, tool_choice=choice)
    with pytest.raises(UsageError, match=f"tool_choice is '{choice}'"):
        ask(start(), GenerateRequest(prompt))
