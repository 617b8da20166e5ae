"""Calls as Python writes them, and Gemma: names, keywords, quotes, and what is no literal."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localchat.chat_format.tool_calls.families import TOOL_CALL_FAMILIES, UNKNOWN
from localchat.chat_format.tool_calls.parser import CallParser
from localchat.chat_format.tool_calls.python_literals import PythonObject
from tests.support.tool_calls import NAMED, TOOLS, gather, whole

LFM = next(style for style in TOOL_CALL_FAMILIES if style.name == "lfm2")


def called(said: str, style: str = "unknown") -> tuple[str, list[tuple[str, Any]]]:
    text, calls = whole(CallParser(NAMED[style], TOOLS), said)
    return text, [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize(
    ("said", "arguments"),
    [
        ('[get_weather(town="Köln", days=3)]', {"town": "Köln", "days": 3}),
        ("```tool_code\nget_weather(town='Köln')\n```", {"town": "Köln"}),
        ("```tool_code\nprint(get_weather(town='Köln', days=2))\n```", {"town": "Köln", "days": 2}),
        ("Look:\n```tool_code\nprint(default_api.get_weather('Köln', 3))\n```", {"town": "Köln", "days": 3}),
        ("<function_calls>\nget_weather(days=-1.5e3)\n</function_calls>", {"days": -1500.0}),
        ('<|tool_call_start|>[get_weather(where={"a": [1, None], "b": (True,)})]<|tool_call_end|>',
         {"where": {"a": [1, None], "b": [True]}}),
        ("[get_weather(where={'a': {}}, unit=None, days=1_000,)]",
         {"where": {"a": {}}, "unit": None, "days": 1000}),
        ("[get_weather(town='it\\'s \\u00fc \\x41\\n' \"and\" ' on')]", {"town": "it's ü A\nand on"}),
        ('[get_weather(town="""a "b"\nc""")]', {"town": 'a "b"\nc'}),
        ("[get_weather(town='')]", {"town": ""}),
        ("[get_weather( )]", {}),
        ("[get_weather(days=date(2024, 1, '2)'), town=a + b)]",
         {"days": "date(2024, 1, '2)')", "town": "a + b"}),
        ("[get_weather(town=r'\\d', days=[i for i in x])]", {"town": "\\d", "days": "[i for i in x]"}),
        ("[get_weather(days=1e999, unit=inf)]", {"days": "1e309", "unit": "inf"}),
        ("[get_weather(where={1: 'a', b: 'c'})]", {"where": {"1": "a", "b": "c"}}),
        ("[get_weather(town='a' + b, days=2)]", {"town": "'a' + b", "days": 2}),
        ("[get_weather(town='\\ud83d\\ude00')]", {"town": "😀"}),
    ],
)  # fmt: skip
def test_a_python_call_is_read(said: str, arguments: dict[str, Any]) -> None:
    text, calls = called(said)
    assert text in ("", "Look:")
    assert calls == [("get_weather", arguments)]


@pytest.mark.parametrize("between", [", ", "\n", ""])
def test_several_calls_are_several(between: str) -> None:
    said = f"```tool_code\nget_weather(town='a'){between}get_time()\n```"
    assert called(said) == ("", [("get_weather", {"town": "a"}), ("get_time", {})])


@pytest.mark.parametrize(
    "said",
    [
        "[get_weather(town) for town in towns]",
        "[get_weather]",
        "[get_weathers(a=1)]",
        "get_weather(town='a') is how you call it",
        "```python\nget_weather(town='a')\n```",
        "[1, 2, 3]",
        "[get_",
        "[other(a=1)]",
    ],
)
def test_python_that_is_no_call_is_told_whole(said: str) -> None:
    assert called(said) == (said, [])
    one = CallParser(UNKNOWN, TOOLS)
    parts = [part for letter in said for part in one.feed(letter)] + one.finish()
    assert gather(parts) == (said, [])


def test_text_behind_a_python_call_is_told_and_not_held() -> None:
    one = CallParser(LFM, TOOLS)
    parts = one.feed("<|tool_call_start|>[get_time()]<|tool_call_end|>\nThat")
    assert gather(parts) == ("That", [("get_time", "{}")])


floats = st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=12) | floats,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@given(
    st.dictionaries(st.from_regex(r"[a-z_]{1,8}\Z", fullmatch=True), values, max_size=4), st.data()
)
@settings(max_examples=80, deadline=None)
def test_whatever_python_prints_is_read_back(
    arguments: dict[str, Any], data: st.DataObject
) -> None:
    said = "get_time(" + ", ".join(f"{key}={value!r}" for key, value in arguments.items()) + ")"
    said = f"<|tool_call_start|>[{said}]<|tool_call_end|>"
    cuts = sorted(data.draw(st.sets(st.integers(0, len(said)), max_size=20)))
    one = CallParser(LFM, TOOLS)
    parts = []
    for begin, end in zip([0, *cuts], [*cuts, len(said)], strict=True):
        parts += one.feed(said[begin:end])
    text, calls = gather([*parts, *one.finish()])
    assert text == ""
    assert json.loads(calls[0][1]) == arguments


@given(st.text("()[]{}'\",:=\\ ab1<|>\n", max_size=40), st.booleans(), st.data())
@settings(max_examples=200, deadline=None)
def test_anything_gives_sound_json_or_none(said: str, call: bool, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(said)))
    one = PythonObject(call=call, order=["a"])
    rest = one.feed(said[:cut])
    rest = rest + said[cut:] if one.done else one.feed(said[cut:])
    out = one.text
    again = PythonObject(call=call, order=["a"])
    assert (again.feed(said), again.text) == (rest if again.done else "", out)
    if one.done:
        assert isinstance(json.loads(out), dict)


@pytest.mark.parametrize(
    ("said", "arguments"),
    [
        ('call:get_weather{town:<|"|>Kö"ln, {a}<|"|>,where:{a:[1,{b:<|"|>x<|"|>}],c:null},days:2}',
         {"town": 'Kö"ln, {a}', "where": {"a": [1, {"b": "x"}], "c": None}, "days": 2}),
        ("call:get_weather{}", {}),
        ('call:get_weather{town:"Köln"}', {"town": "Köln"}),
        ('call:get_weather{town:<|"|><|"|>}', {"town": ""}),
    ],
)  # fmt: skip
def test_gemma_s_objects_are_read(said: str, arguments: dict[str, Any]) -> None:
    assert called(f"<|tool_call>{said}<tool_call|>", "gemma-4") == (
        "",
        [("get_weather", arguments)],
    )


def test_a_long_argument_comes_through() -> None:
    long = "x\n" * 20_000
    _, calls = called(f"[get_weather(town={long!r})]")
    assert calls == [("get_weather", {"town": long})]
