"""A twentieth of scripts/tools/check_schemas.py: what the guide answers under generated JSON Schemas."""

from pathlib import Path

from localchat.engine.local.engine import LocalEngine
from localchat.engine.options import EngineOptions
from localchat.fit.load_options import LoadOptions
from scripts.tools.schemas.answers import assess_answers
from scripts.tools.schemas.generator import schema

GUIDE = Path(__file__).parents[2] / "localchat" / "guide" / "guide.gguf"


def test_answers_end_in_time_and_are_valid() -> None:
    engine = LocalEngine(
        EngineOptions(load=LoadOptions(context_tokens=4096, threads=1, max_slots=8), model=GUIDE),
        notify=lambda sentence: None,
    )
    try:
        answers = list(assess_answers(engine, range(100, 110)))
    finally:
        engine.close()
    assert [one.fault for one in answers] == [""] * 10
    # The others were closed early to be valid, and say so by `length`.
    assert sum(one.finished for one in answers) >= 5


def test_a_number_names_a_schema() -> None:
    assert schema(7) == schema(7)
    assert schema(7) != schema(8)
