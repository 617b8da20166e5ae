"""Closing a constrained answer: its path to an end is short, and taken when the room for it runs out."""

import json
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher

from localchat.core.structured_output.compiler import (
    GrammarCompiler,
    GrammarSpec,
    grammar_spec,
    llguidance_tokenizer,
)
from localchat.core.structured_output.length_guard import LengthGuard
from localchat.core.structured_output.matcher import GrammarMatcher
from localchat.engine.request import Grammar
from tests.support.scripted_backend import EOS, ScriptedTokenizer

TOKENIZER = ScriptedTokenizer()
NODE = {
    "type": "object",
    "properties": {
        "v": {"type": "integer"},
        "kids": {"type": "array", "items": {"$ref": "#"}},
    },
    "required": ["v", "kids"],
    "additionalProperties": False,
}
LIST = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"number": {"type": "integer"}, "again": {"type": "integer"}},
        "required": ["number", "again"],
        "additionalProperties": False,
    },
}
LEXICON = llguidance_tokenizer(TOKENIZER)
GRAMMARS = GrammarCompiler(TOKENIZER)


def ending(source: GrammarSpec, said: str) -> str | None:
    """Return the text that closes a value."""
    endings = LengthGuard(TOKENIZER)
    matcher = LLMatcher(LEXICON, source.source, log_level=0)
    assert matcher.consume_tokens(list(said.encode()))
    steps = endings.steps(matcher, 100)
    if steps is None:
        return None
    text = b""
    for _ in range(steps):
        words = endings.closing_tokens(endings.allowed(matcher))
        forced = matcher.compute_ff_tokens()
        bits = np.unpackbits(np.frombuffer(words, np.uint8), bitorder="little")
        token = forced[0] if forced else int(np.flatnonzero(bits)[-1])
        text += bytes([token])
        matcher.consume_token(token)
    return text.decode()


@pytest.mark.parametrize(
    ("schema", "said", "end"),
    [
        ({"type": "string"}, '"some } text', '"'),
        ({"type": "integer"}, "123", ""),
        ({"type": "array", "items": {"type": "string"}}, '["a", "b', '"]'),
        ({"type": "array", "items": {"type": "integer"}, "minItems": 2}, "[1", ", 9]"),
        (
            {
                "$ref": "#/$defs/n",
                "$defs": {
                    "n": {
                        "type": "object",
                        "properties": {
                            "v": {"type": "boolean"},
                            "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/n"}]},
                        },
                        "required": ["v", "next"],
                        "additionalProperties": False,
                    }
                },
            },
            '{"v": true, "next": {"v": true, "next": ',
            "null}}",
        ),
        ({"type": "number", "exclusiveMinimum": 0.5, "maximum": 0.9}, "0.", "9"),
    ],
)
def test_the_path_to_an_end_is_short(schema: dict[str, Any], said: str, end: str) -> None:
    assert ending(grammar_spec(Grammar("json_schema", json.dumps(schema))), said) == end


class Joined(ScriptedTokenizer):
    """A list's bracket and the beginning of its first item are one token, as they often are, and so are the end
    of a tag and a line break."""

    def piece(self, token: int, *, special: bool = False) -> bytes:
        joined = {200: b'[{"', 201: b">\n"}
        return joined.get(token) or super().piece(token, special=special)


def test_a_list_of_lists_is_closed_and_not_begun_once_more() -> None:
    source = grammar_spec(
        Grammar(
            "json_schema",
            json.dumps(
                {
                    "$ref": "#/$defs/n",
                    "$defs": {
                        "n": {
                            "type": "object",
                            "required": ["a"],
                            "additionalProperties": False,
                            "properties": {"a": {"type": "array", "items": {"$ref": "#/$defs/n"}}},
                        }
                    },
                }
            ),
        )
    )
    matcher = LLMatcher(llguidance_tokenizer(Joined()), source.source, log_level=0)
    assert matcher.consume_tokens(list(b'{"a": [{"a": '))
    assert LengthGuard(Joined()).steps(matcher, 100) == len("[]}]}")


def test_the_last_call_is_closed_and_no_other_begun() -> None:
    source = grammar_spec(Grammar("lark", 'start: call ("\\n" call)*\ncall: "<a>"'))
    matcher = LLMatcher(llguidance_tokenizer(Joined()), source.source, log_level=0)
    assert LengthGuard(Joined()).steps(matcher, 100) == len("<a>")


def test_the_tag_that_ends_calls_is_found_on_either_side_of_the_one_that_begins_another() -> None:
    for more, end in ("ba", "ab"):
        source = grammar_spec(Grammar("lark", f'start: "<x>" ("{more}<x>")* "{end}"'))
        matcher = LLMatcher(LEXICON, source.source, log_level=0)
        assert LengthGuard(TOKENIZER).steps(matcher, 100) == len("<x>") + 1


def test_there_may_be_no_end_in_sight() -> None:
    assert ending(grammar_spec(Grammar("regex", "(ab){200}")), "ab") is None


def allowed_behind(said: bytes, room: int) -> set[str]:
    source = grammar_spec(Grammar("json_schema", '{"type": "array", "items": {"type": "integer"}}'))
    one = GRAMMARS.grammar_matcher(source, room=room)
    for token in said:
        one.masks(())[0]()
        assert one.accept(token)
    words = np.frombuffer(one.masks(())[0](), np.uint8)
    return {chr(bit) for bit in np.flatnonzero(np.unpackbits(words, bitorder="little"))}


def test_nothing_changes_while_there_is_room_and_then_only_the_end_is_allowed() -> None:
    assert allowed_behind(b"[1, 2, 3", 400) == set("0123456789,]")
    assert allowed_behind(b"[1, 2, 3", 45) == set("0123456789,]")
    assert allowed_behind(b"[" + b"1, " * 40 + b"1", 129) == set("0123456789,]")
    assert allowed_behind(b"[" + b"1, " * 40 + b"1", 127) == {"]"}


def test_of_a_short_answer_an_eighth_is_left_over() -> None:
    """With the reserve of a long one it would end at once: an empty list, a number of one digit."""
    assert allowed_behind(b"[", 20) >= set("123456789]")
    assert allowed_behind(b"[1, 2, 3, 4, 5, 6", 20) == {"]"}
    number = GRAMMARS.grammar_matcher(grammar_spec(Grammar("regex", "[1-9][0-9]{0,2}")), room=8)
    assert number.accept(ord("4"))
    words = np.frombuffer(number.masks(())[0](), np.uint8)
    assert words[ord("2") >> 3] >> (ord("2") & 7) & 1


def test_the_path_to_an_end_is_measured_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    places = []
    real = LengthGuard.check

    def look(self: LengthGuard, matcher: Any, said: int, left: int) -> Any:
        places.append(said)
        return real(self, matcher, said, left)

    monkeypatch.setattr(LengthGuard, "check", look)
    allowed_behind(b"[" + b"1, " * 110, 400)
    assert len(places) < 30
    assert places == sorted(set(places))
    assert places[0] >= 200
    places.clear()
    allowed_behind(b"[1", 10)
    assert not places


def _eager(matcher: GrammarMatcher, room: int) -> bytes:
    """Generate as a model that always starts another item where the mask allows one."""
    text = b""
    while len(text) < room and not matcher.ended:
        allowed = np.unpackbits(
            np.frombuffer(matcher.masks(())[0](), np.uint8), bitorder="little"
        ).nonzero()[0]
        if EOS in allowed and len(allowed) == 1:
            break
        wanted = (b"," + b"[{" + b"1]}").index
        ranks = {token: wanted(token) for token in allowed.tolist() if token in b",[{1]}"}
        token = min(ranks, key=ranks.__getitem__) if ranks else int(allowed[allowed != EOS][0])
        assert matcher.accept(token)
        text += bytes([token])
    return text


@pytest.mark.parametrize("room", [60, 90, 128, 300])
@pytest.mark.parametrize("schema", [NODE, LIST], ids=["tree", "list"])
def test_a_model_that_always_goes_on_gets_a_whole_value(schema: dict[str, Any], room: int) -> None:
    spec = grammar_spec(Grammar("json_schema", json.dumps(schema)))
    matcher = GRAMMARS.grammar_matcher(spec, room=room)
    value = json.loads(_eager(matcher, room))
    assert matcher.shortened
    assert isinstance(value, (dict, list))
