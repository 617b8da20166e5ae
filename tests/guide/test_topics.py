"""The classifier beside the guide's file: its answers are the facts of today, and the product asks it."""

from pathlib import Path

import checkpoint
import pytest
from topic_classifier import known_answers

from localchat.cli.context import AppContext
from localchat.engine.events import Text
from localchat.engine.guide import UNKNOWN, GuideEngine, topics_file
from localchat.engine.guide_topics import Topics
from localchat.engine.options import EngineOptions
from localchat.engine.request import GenerateRequest, Message, Messages


def test_its_answers_are_those_of_the_table() -> None:
    answers = [answer for answer in Topics(topics_file(checkpoint.GUIDE)).answers if answer]
    assert any(answer.startswith(UNKNOWN) for answer in answers)
    assert not [answer for answer in answers if not answer.endswith(known_answers())]


def test_it_fits_into_the_wheel() -> None:
    assert topics_file(checkpoint.GUIDE).stat().st_size <= 2**20


@pytest.mark.parametrize("question", ["Can I use two GPUs?", "can i use 2 gpus"])
def test_what_the_guide_takes_for_a_neighbour_is_answered_by_the_topic(question: str) -> None:
    engine = AppContext().open_engine(EngineOptions(checkpoint.GUIDE), print)
    try:
        assert isinstance(engine, GuideEngine)
        prompt = Messages((Message("user", question),))
        answer = "".join(
            event.text
            for event in engine.generate(GenerateRequest(prompt))
            if isinstance(event, Text)
        )
    finally:
        engine.close()
    assert "spreads the layers of a GGUF over all GPUs" in answer


def test_another_model_of_the_same_folder_has_no_classifier(tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(checkpoint.GUIDE.read_bytes())
    engine = AppContext().open_engine(EngineOptions(other), print)
    try:
        assert not isinstance(engine, GuideEngine)
    finally:
        engine.close()
