"""Tasks and verdicts on engines that answer by a script."""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from localchat.engine.events import Finished, ToolCall
from localchat.engine.interface import Engine
from localchat.engine.request import GenerateRequest, Messages
from localchat.errors import UsageError
from localchat.measure.comparison import Comparison
from localchat.measure.records import VariantQuality
from localchat.measure.tasks import fits, is_right, read_questions, schema_task, tool_task
from localchat.measure.variants import BenchVariant
from localchat.measure.verdict import verdict, verdicts
from tests.support.quality_specs import quality_spec
from tests.support.scripted_engine import ScriptedAnswer, ScriptedEngine

Script = Callable[[GenerateRequest], ScriptedAnswer]


def question(request: GenerateRequest) -> str:
    assert isinstance(request.prompt, Messages)
    return request.prompt.messages[-1].content


def reader(reach: int) -> Script:
    """Finds codes among the last `reach` characters of a text."""

    def script(request: GenerateRequest) -> ScriptedAnswer:
        text = question(request)
        asked = re.search(r"What is the code of the (.*)\?", text)
        assert asked is not None
        found = re.search(rf"The code of the {asked[1]} is (\d+)", text[-reach:])
        return ScriptedAnswer((found[1] if found else "none",))

    return script


def compared(scripts: dict[str, Script], *tests: str) -> list[VariantQuality]:
    @contextmanager
    def opened(variant: BenchVariant) -> Iterator[Engine]:
        yield ScriptedEngine(scripts[variant.name], context_tokens=1 << 20)

    variants = [BenchVariant(name, name) for name in scripts]
    comparison = Comparison(quality_spec(variants, tests), "", (), opened, lambda progress: None)
    comparison.run()
    return comparison.measured


def test_needles_that_a_bad_kv_type_loses_are_found() -> None:
    base, good, bad = compared(
        {"f16": reader(10**6), "q8_0": reader(10**6), "bad": reader(1200)}, "needles"
    )
    assert all(task.passed for task in base.needles) and len(base.needles) == 10
    assert verdict(base, good) == "q8_0: no needle lost to 2,048 tokens; safe"
    assert "needles lost, from 2,048 tokens on" in verdict(base, bad)
    lost = [(task.length, task.depth) for task in bad.needles if not task.passed]
    assert (2048, 0.0) in lost and (2048, 1.0) not in lost


def test_a_first_model_without_needles_shows_no_loss() -> None:
    found = compared({"a": reader(1), "b": reader(1)}, "needles")
    assert list(verdicts(found)) == [
        "b: nothing could be compared",
        "a itself passes no needle test, so that these show no loss",
    ]


def test_json_and_tool_calls_are_checked_by_their_schemas() -> None:
    def right(request: GenerateRequest) -> ScriptedAnswer:
        assert isinstance(request.prompt, Messages)
        if request.prompt.tools:
            task = next(t for t in map(tool_task, range(3)) if t.prompt == question(request))
            call = ToolCall(0, 0, "1", task.name, json.dumps(task.arguments))
            return ScriptedAnswer(events=(call, Finished(0, "tool_calls")))
        task_ = next(t for t in map(schema_task, range(3)) if t.prompt == question(request))
        return ScriptedAnswer((f"```json\n{json.dumps(example(task_.schema))}\n```",))

    good, bad = compared({"good": right, "bad": lambda request: ScriptedAnswer()}, "json", "tools")
    assert [task.passed for task in (*good.json, *good.tools)] == [True] * 6
    assert [task.passed for task in (*bad.json, *bad.tools)] == [False] * 6
    assert "JSON 0 of 3 (first: 3)" in verdict(good, bad)


def example(schema: dict[str, object]) -> object:
    """A value that fits a schema of the tests."""
    if "enum" in schema:
        return schema["enum"][0]  # type: ignore[index]
    if schema["type"] == "object":
        return {name: example(one) for name, one in schema["properties"].items()}  # type: ignore[attr-defined]
    return {"string": "x", "integer": 3, "boolean": True, "array": ["x"]}[str(schema["type"])]


def test_values_that_do_not_fit_a_schema_are_refused() -> None:
    schema = {
        "type": "object",
        "properties": {"count": {"type": "integer"}},
        "required": ["count"],
    }
    assert fits({"count": 3}, schema)
    wrong_ones: list[object] = [
        {"count": True},
        {"count": "3"},
        {},
        {"count": 3, "more": 1},
        [],
        None,
    ]
    for wrong in wrong_ones:
        assert not fits(wrong, schema)


@pytest.mark.parametrize(
    ("text", "answer", "match", "right"),
    [
        (" Lima. ", "lima", "exact", True),
        ("It is Lima", "Lima", "exact", False),
        ("It is Lima", "Lima", "contains", True),
        ("3 times 4 is 1,200.0", "1200", "number", True),
        ("12 or 13", "12", "number", False),
        ("b) two", r"^b\)", "regex", True),
    ],
)
def test_answers_are_right_by_their_match(text: str, answer: str, match: str, right: bool) -> None:
    assert is_right(text, answer, match) is right


def test_a_line_that_is_no_question_is_named(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text(
        '{"question": "6 times 7?", "answer": 42, "match": "number"}\n\n{"question": 1}\n'
    )
    with pytest.raises(UsageError, match="line 3"):
        read_questions(path)
